"""From a request to what has to be done for it: prompts as tokens, how to sample, how to read.

Everything that can be wrong with a request is found here, before anything is queued. Knows neither
HTTP nor the worker's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gguf_mtp.answers.parse import ParseOptions
from gguf_mtp.chat import reasoning
from gguf_mtp.chat.conversation import ChatTemplate, Turns
from gguf_mtp.engine.config import EngineLimits
from gguf_mtp.errors import RequestError
from gguf_mtp.grammar.matching import Grammar, Grammars
from gguf_mtp.grammar.reasoning import GrammarState, MinTokens
from gguf_mtp.params import AnswerOptions, SamplingParams
from gguf_mtp.server.sampling_fields import params_of, stop_tokens_of
from gguf_mtp.server.schemas import ChatRequest, CompletionRequest, Generation, Message, ToolChoice
from gguf_mtp.server.structured_output import (
    Calls,
    OutputFormat,
    call_grammar,
    format_grammar,
    output_format_of,
)
from gguf_mtp.session import Vocabulary, follow, piece_of

__all__ = ["AnswerPlan", "Served", "plan_chat", "plan_completion"]

AS_MANY_AS_FIT = 1 << 30
COMPLETION_TOKENS = 16
"""max_tokens of /v1/completions without one, as OpenAI documents it."""


@dataclass(frozen=True, slots=True)
class Served:
    """The model behind a server. `defaults` and `max_tokens` hold where a request says nothing;
    `created` is in seconds since 1970."""

    name: str
    vocab: Vocabulary
    n_vocab: int
    limits: EngineLimits
    template: ChatTemplate
    defaults: SamplingParams
    created: int
    grammars: Grammars
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """`n` answers to each of `prompts`; answer i of a prompt is drawn with the i-th of `params`.
    Each obeys a constraint of its own, if `constrain` makes one."""

    is_chat: bool
    prompts: Sequence[Sequence[int]]
    params: Sequence[SamplingParams]
    max_tokens: int
    options: AnswerOptions
    reading: ParseOptions
    stream: bool
    include_usage: bool
    include_ids: bool
    constrain: Callable[[], GrammarState | None]

    @property
    def n_choices(self) -> int:
        return len(self.prompts) * len(self.params)


class _Bound(NamedTuple):
    """What an answer must obey, from the first of the tokens `openings` on; without, at once."""

    grammar: Grammar
    openings: frozenset[int] = frozenset()


class _Asked(NamedTuple):
    """What the two kinds of requests are made into before they are treated alike.

    `reasons_after` is the prompt where the answer may begin with reasoning.
    """

    prompts: Sequence[Sequence[int]]
    reading: ParseOptions
    max_tokens: int | None
    n_logprobs: int | None
    bound: _Bound | None
    reasons_after: str = ""


def plan_chat(served: Served, request: ChatRequest) -> AnswerPlan:
    """Raises `RequestError`."""
    request.refuse_what_is_not_built()
    must_call, call_name = _choice(request)
    tools = [] if request.tool_choice == "none" else request.tools or []
    turns = Turns(
        messages=[_message(i, message) for i, message in enumerate(request.messages)],
        tools=[tool.model_dump(exclude_none=True) for tool in tools],
        must_call=must_call,
        call_name=call_name,
        variables=request.chat_template_kwargs or {},
    )
    template = served.template
    prompt = template.prompt(turns)
    markers: list[str] = []
    if template.can_think:
        markers += [reasoning.OPEN, reasoning.CLOSE]
    calls: Calls | None = None
    if tools and template.tool_format:
        markers += template.tool_format.markers
        is_single = call_name is not None or request.parallel_tool_calls is False
        calls = Calls(template.tool_format, tools, must_call, call_name, is_single)
    reading = ParseOptions(
        piece=piece_of(served.vocab, markers),
        stops=request.stops,
        thinks=prompt.thinks if template.can_think and not must_call else None,
        begun=prompt.begun,
        max_calls=(1 if calls.is_single else None) if calls else 0,
        with_origins=bool(request.return_token_sources),
    )
    max_tokens = request.max_completion_tokens
    if max_tokens is None:
        max_tokens = request.max_tokens
    tokens = served.vocab.tokenize(prompt.text, add_special=not prompt.has_bos)
    bound = _bound(served, output_format_of(request, served.grammars), calls)
    reasons_after = "" if reading.thinks is None else prompt.text
    asked = _Asked([tokens], reading, max_tokens, request.n_logprobs, bound, reasons_after)
    return _plan(served, request, asked)


def plan_completion(served: Served, request: CompletionRequest) -> AnswerPlan:
    """Raises `RequestError`."""
    request.refuse_what_is_not_built()
    reading = ParseOptions(
        piece=served.vocab.piece,
        stops=request.stops,
        with_origins=bool(request.return_token_sources),
    )
    max_tokens = request.max_tokens
    if max_tokens is None and served.max_tokens is None:
        max_tokens = COMPLETION_TOKENS
    prompts = _prompts(served, request.prompt)
    bound = _bound(served, output_format_of(request, served.grammars), None)
    return _plan(served, request, _Asked(prompts, reading, max_tokens, request.n_logprobs, bound))


def _plan(served: Served, request: Generation, asked: _Asked) -> AnswerPlan:
    max_tokens = asked.max_tokens
    if max_tokens is None:
        max_tokens = served.max_tokens
    if max_tokens is None or max_tokens == -1:
        max_tokens = AS_MANY_AS_FIT
    for prompt in asked.prompts:
        served.limits.check(prompt, max_tokens)
    params = params_of(served.defaults, request, served.vocab, served.limits)
    params[0].check_vocabulary(served.n_vocab)
    stop_tokens = stop_tokens_of(request, served.n_vocab)
    options = request.stream_options
    return AnswerPlan(
        is_chat=isinstance(request, ChatRequest),
        prompts=asked.prompts,
        params=params,
        max_tokens=max_tokens,
        options=AnswerOptions(
            draft_max=request.draft_max,
            n_logprobs=asked.n_logprobs,
            stop_tokens=stop_tokens,
            draft=request.drafters,
        ),
        reading=asked.reading,
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        include_ids=bool(request.return_token_ids),
        constrain=_constraint(served, request, asked, stop_tokens),
    )


def _bound(served: Served, form: OutputFormat | None, calls: Calls | None) -> _Bound | None:
    """What the answer must be: text of a form, calls, either of them; or what it likes, as long as
    its calls are as strict tools were promised to be called."""
    grammars = served.grammars
    if calls is None:
        return _Bound(format_grammar(grammars, form)) if form else None
    if form is not None and form.kind != "json":
        raise RequestError(f"{form.field} and tools cannot be combined; set tool_choice to 'none'")
    if calls.has_begun:
        return _Bound(call_grammar(grammars, calls))
    if form is not None:
        format_grammar(grammars, form)  # what is wrong with it alone is told by its own name
        return _Bound(call_grammar(grammars, calls, form))
    openings = calls.openings(grammars) if calls.is_strict else None
    return _Bound(call_grammar(grammars, calls), openings) if openings else None


def _constraint(
    served: Served, request: Generation, asked: _Asked, stop_tokens: frozenset[int]
) -> Callable[[], GrammarState | None]:
    """Raises `RequestError` where two wishes contradict each other."""
    bound = asked.bound
    for name in ("ignore_eos", "min_tokens"):
        if bound and getattr(request, name):
            raise RequestError(
                f"{name} cannot be used with a grammar: the grammar decides when the answer ends"
            )
    if bound:
        grammar, openings = bound
        return lambda: follow(grammar, served.vocab, asked.reasons_after, openings)
    n_least = request.min_tokens
    if n_least:
        ends = served.limits.end_tokens | stop_tokens
        return lambda: MinTokens(n_least, ends, served.n_vocab)
    return lambda: None


def _prompts(served: Served, prompt: Any) -> list[list[int]]:
    """Text is tokenised, with one BOS where the model wants it; ids are taken as they are."""
    if prompt is None or isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompt = [prompt or ""]
    return [_tokens(served, one) for one in prompt]


def _tokens(served: Served, prompt: str | list[int]) -> list[int]:
    vocab = served.vocab
    if isinstance(prompt, str):
        has_bos = bool(vocab.bos) and prompt.startswith(vocab.bos)
        return vocab.tokenize(prompt, add_special=not has_bos)
    check_ids(served, prompt)
    return prompt


def check_ids(served: Served, ids: Sequence[int]) -> None:
    """Raises `RequestError` for an id that the vocabulary does not have."""
    for id_ in ids:
        if not 0 <= id_ < served.n_vocab:
            raise RequestError(
                f"there is no token {id_}: the vocabulary has {served.n_vocab} tokens"
            )


def _choice(request: ChatRequest) -> tuple[bool, str | None]:
    """Whether a call must be made, and of which tool."""
    choice = request.tool_choice
    if choice is None or choice in ("none", "auto"):
        return False, None
    names = [tool.function.name for tool in request.tools or []]
    if not names:
        raise RequestError("tool_choice requires a tool call, but the request has no tools")
    if not isinstance(choice, ToolChoice):
        return True, None
    if choice.function.name not in names:
        raise RequestError(f"tool_choice names {choice.function.name!r}, which is not in tools")
    return True, choice.function.name


def _message(index: int, message: Message) -> dict[str, Any]:
    """The message for a template; content is text, None only beside tool calls."""
    out = message.model_dump(exclude_none=True, include=_FOR_TEMPLATES)
    content = message.content
    if isinstance(content, list):
        for part in content:
            if part.type != "text" or part.text is None:
                raise RequestError(
                    f"messages[{index}] has a content part of type {part.type!r}; "
                    "only parts of type 'text' with a text are supported"
                )
        content = "\n".join(part.text or "" for part in content)
    if content is None and not message.tool_calls:
        if message.role != "assistant":
            raise RequestError(f"messages[{index}] has no content")
        content = ""
    for call in out.get("tool_calls", ()):
        call["function"].setdefault("arguments", "{}")
    if not out.get("tool_calls", True):
        del out["tool_calls"]
    return out | {"content": content}


_FOR_TEMPLATES = {"role", "name", "tool_calls", "tool_call_id", "reasoning_content"}
