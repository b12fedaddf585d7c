"""From a request to what has to be done for it: prompts as tokens, how to sample, how to read.

Everything that can be wrong with a request is found here, before anything is queued. Knows neither
HTTP nor the worker's thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gguf_mtp import reasoning
from gguf_mtp.conversation import ChatTemplate, Turns
from gguf_mtp.errors import RequestError
from gguf_mtp.limits import EngineLimits
from gguf_mtp.params import AnswerOptions, SamplingParams
from gguf_mtp.server.reader import Reading
from gguf_mtp.server.schemas import ChatRequest, CompletionRequest, Generation, Message, ToolChoice
from gguf_mtp.session import Vocabulary

__all__ = ["Plan", "Served", "plan_chat", "plan_completion"]

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
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """`n` answers to each of `prompts`; answer i of a prompt is drawn with the i-th of `params`."""

    is_chat: bool
    prompts: Sequence[Sequence[int]]
    params: Sequence[SamplingParams]
    max_tokens: int
    options: AnswerOptions
    reading: Reading
    stream: bool
    include_usage: bool
    include_ids: bool

    @property
    def n_choices(self) -> int:
        return len(self.prompts) * len(self.params)


def plan_chat(served: Served, request: ChatRequest) -> Plan:
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
    if tools and template.tool_format:
        markers += template.tool_format.markers
    single = call_name is not None or request.parallel_tool_calls is False
    reading = Reading(
        piece=_piece(served.vocab, markers),
        stops=request.stops,
        thinks=prompt.thinks if template.can_think and not must_call else None,
        begun=prompt.begun,
        max_calls=(1 if single else None) if tools and template.tool_format else 0,
        with_origins=bool(request.return_token_sources),
    )
    tokens = served.vocab.tokenize(prompt.text, add_special=not prompt.has_bos)
    max_tokens = request.max_completion_tokens
    if max_tokens is None:
        max_tokens = request.max_tokens
    return _plan(served, request, [tokens], reading, max_tokens)


def plan_completion(served: Served, request: CompletionRequest) -> Plan:
    """Raises `RequestError`."""
    request.refuse_what_is_not_built()
    reading = Reading(
        piece=served.vocab.piece,
        stops=request.stops,
        with_origins=bool(request.return_token_sources),
    )
    max_tokens = request.max_tokens
    if max_tokens is None and served.max_tokens is None:
        max_tokens = COMPLETION_TOKENS
    return _plan(served, request, _prompts(served, request.prompt), reading, max_tokens)


def _plan(
    served: Served,
    request: Generation,
    prompts: Sequence[Sequence[int]],
    reading: Reading,
    max_tokens: int | None,
) -> Plan:
    if max_tokens is None:
        max_tokens = served.max_tokens
    if max_tokens is None or max_tokens == -1:
        max_tokens = AS_MANY_AS_FIT
    for prompt in prompts:
        served.limits.check(prompt, max_tokens)
    options = request.stream_options
    return Plan(
        is_chat=isinstance(request, ChatRequest),
        prompts=prompts,
        params=_params(served.defaults, request),
        max_tokens=max_tokens,
        options=AnswerOptions(draft_max=request.draft_limit),
        reading=reading,
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        include_ids=bool(request.return_token_ids),
    )


def _params(defaults: SamplingParams, request: Generation) -> list[SamplingParams]:
    """One for each of the `n` answers; with a seed, each has its own: seed, seed + 1, ..."""
    names = ("temperature", "top_p", "top_k", "min_p")
    given = {name: value for name in names if (value := getattr(request, name)) is not None}
    params = dataclasses.replace(defaults, **given)
    seed = defaults.seed if request.seed is None or request.seed < 0 else request.seed
    return [
        dataclasses.replace(params, seed=None if seed is None else seed + i)
        for i in range(request.n or 1)
    ]


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


def _piece(vocab: Vocabulary, markers: Sequence[str]) -> Callable[[int], bytes]:
    """The bytes of a token; `markers` have theirs even where they are control tokens."""
    known: dict[int, bytes] = {}
    for marker in markers:
        ids = vocab.tokenize(marker, add_special=False)
        if len(ids) == 1:
            known[ids[0]] = marker.encode()
    return lambda token: known.get(token) or vocab.piece(token)


def _choice(request: ChatRequest) -> tuple[bool, str | None]:
    """Whether a call must be made, and of which tool."""
    choice = request.tool_choice
    if choice is None or choice in ("none", "auto"):
        return False, None
    names = [tool.function.name for tool in request.tools or []]
    if not names:
        raise RequestError("tool_choice asks for a call, but there are no tools")
    if not isinstance(choice, ToolChoice):
        return True, None
    if choice.function.name not in names:
        raise RequestError(f"tool_choice names {choice.function.name!r}, which is not among tools")
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
                    "only parts of type 'text' with a text can be read"
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
