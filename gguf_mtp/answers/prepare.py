"""From messages, or a prompt, and what an answer shall be, to what has to be done for it.

Everything that can be wrong with a question is found here, before anything is queued: the prompt as
tokens, the grammar that binds the answer, and how its text will be read. It runs no engine and
knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from gguf_mtp.answers.constraint import Vocabulary, constraint_after, piece_of
from gguf_mtp.answers.guard import Guarded, guarded
from gguf_mtp.answers.messages import Message, check_function, for_template
from gguf_mtp.answers.parse import ParseOptions
from gguf_mtp.answers.structured_output import (
    Calls,
    OutputFormat,
    Tool,
    call_grammar,
    format_grammar,
    grammar_format,
    json_format,
)
from gguf_mtp.chat import reasoning
from gguf_mtp.chat.conversation import ChatPrompt, ChatTemplate, Turns
from gguf_mtp.chat.tool_calls import ToolCallParser
from gguf_mtp.engine.config import EngineLimits
from gguf_mtp.errors import RequestError
from gguf_mtp.grammar.matching import Grammar, Grammars
from gguf_mtp.grammar.reasoning import GrammarState, MinTokens
from gguf_mtp.params import RequestOptions

__all__ = [
    "AnswerOptions",
    "PreparedAnswer",
    "TextModel",
    "as_tokens",
    "prepare_chat",
    "prepare_completion",
]


@dataclass(frozen=True)
class TextModel:
    """What turns text into tokens and back, for one model of `n_vocab` tokens. `chat_template`
    takes the place of the model's own; with `parses_content` a message may name control tokens."""

    vocab: Vocabulary
    n_vocab: int
    limits: EngineLimits
    grammars: Grammars
    chat_template: str | None = None
    parses_content: bool = False

    @cached_property
    def template(self) -> ChatTemplate:
        """Made when the first conversation comes: it is rendered several times then."""
        vocab = self.vocab
        source = self.chat_template or vocab.chat_template
        return ChatTemplate(source, vocab.bos, vocab.eos)


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What an answer shall be, beyond how its tokens are drawn.

    It ends before a string of `stop` or a token of `stop_tokens`, and not before `min_tokens` have
    come. `tools` are functions as in an OpenAI request; `tool_choice` says whether the answer may,
    must or must not call one, and `tool_name` which. With `continue_final_message` it goes on with
    the last message, which is the assistant's, instead of answering it. `variables` go to the chat
    template, such as `{"thinking": True}`. One of `json_schema`, `grammar` (GBNF, or Lark after a
    line `%llguidance {}`) and `format` binds the text behind the reasoning.

    `n_logprobs` asks for every token's log-probability and for as many of the likeliest tokens
    beside it; `token_sources` for where each token came from. `draft`, `draft_max` and
    `cache_prompt` as in `params.RequestOptions`.
    """

    stop: Sequence[str] = ()
    stop_tokens: frozenset[int] = frozenset()
    min_tokens: int = 0
    tools: Sequence[Tool] = ()
    tool_choice: Literal["auto", "none", "required"] = "auto"
    tool_name: str | None = None
    parallel_tool_calls: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    json_schema: Any = None
    grammar: str | None = None
    format: OutputFormat | None = None
    n_logprobs: int | None = None
    token_sources: bool = False
    draft: tuple[str, ...] | None = None
    draft_max: int | None = None
    cache_prompt: bool = True

    def __post_init__(self) -> None:
        for name in ("stop", "draft", "tools"):
            if isinstance(getattr(self, name), str):
                raise RequestError(f"{name} is {getattr(self, name)!r}, but must be a list")
        if self.continue_final_message and (self.tool_choice == "required" or self.tool_name):
            raise RequestError("continue_final_message and a required tool call contradict")
        if self.tool_choice == "none" and self.tool_name is not None:
            raise RequestError(f"tool_choice is 'none', but tool_name is {self.tool_name!r}")


@dataclass(frozen=True, slots=True)
class PreparedAnswer:
    """Answers to each of `prompts`. `constrain` makes the constraint of one answer, if it has one;
    `is_bound` says that a grammar decides when it ends."""

    prompts: Sequence[Sequence[int]]
    parsing: ParseOptions
    options: RequestOptions
    constrain: Callable[[], GrammarState | None]
    is_bound: bool


class _Bound(NamedTuple):
    """What an answer must obey, from the first of the tokens `openings` on; without, at once."""

    grammar: Grammar
    openings: frozenset[int] = frozenset()


def prepare_chat(
    model: TextModel, messages: Sequence[Message], options: AnswerOptions
) -> PreparedAnswer:
    """Raises `RequestError` for messages or options that make no sense, and when the chat template
    is missing or refuses."""
    must_call = _must_call(options)
    tools = [] if options.tool_choice == "none" else list(options.tools)
    for i, tool in enumerate(tools):
        check_function(tool, f"tools[{i}]")
    given = Guarded([for_template(messages), tools, options.variables], "")
    if not model.parses_content:
        given = guarded(model.vocab, given.values)
    prompt = model.template.prompt(
        Turns(
            messages=given.values[0],
            tools=given.values[1],
            must_call=must_call,
            call_name=options.tool_name,
            continues=options.continue_final_message,
            variables=given.values[2],
        )
    )
    calls = _calls(model.template, tools, options, must_call)
    parsing = _chat_parsing(model, prompt, calls, options)
    bound = _bound(model, _format(model, options), calls)
    tokens = model.vocab.prompt_tokens(
        prompt.text, not prompt.has_bos, model.limits.n_ctx, given.letter
    )
    reasons_after = "" if parsing.thinks is None else prompt.text
    return _prepared(model, [tokens], parsing, options, bound, reasons_after)


def prepare_completion(
    model: TextModel, prompts: Sequence[Sequence[int]], options: AnswerOptions
) -> PreparedAnswer:
    """Continuations of raw prompts. Raises `RequestError` for options that make no sense."""
    parsing = ParseOptions(
        piece=model.vocab.piece, stops=options.stop, with_sources=options.token_sources
    )
    bound = _bound(model, _format(model, options), None)
    return _prepared(model, prompts, parsing, options, bound, "")


def as_tokens(model: TextModel, prompt: str) -> list[int]:
    """A raw prompt's tokens, with one BOS where the model wants one: not a second one where the
    text begins with it. Raises `ContextFull` for one that cannot fit."""
    vocab = model.vocab
    has_bos = bool(vocab.bos) and prompt.startswith(vocab.bos)
    return vocab.prompt_tokens(prompt, not has_bos, model.limits.n_ctx, guard="")


def _must_call(options: AnswerOptions) -> bool:
    must_call = options.tool_choice == "required" or options.tool_name is not None
    if not must_call:
        return False
    if not options.tools:
        raise RequestError("tool_choice requires a tool call, but the request has no tools")
    names = [tool.get("function", {}).get("name") for tool in options.tools]
    if options.tool_name is not None and options.tool_name not in names:
        raise RequestError(f"tool_choice names {options.tool_name!r}, which is not in tools")
    return True


def _calls(
    template: ChatTemplate, tools: Sequence[Tool], options: AnswerOptions, must_call: bool
) -> Calls | None:
    if not tools or template.tool_format is None:
        return None
    is_single = options.tool_name is not None or not options.parallel_tool_calls
    return Calls(template.tool_format, tools, must_call, options.tool_name, is_single)


def _chat_parsing(
    model: TextModel, prompt: ChatPrompt, calls: Calls | None, options: AnswerOptions
) -> ParseOptions:
    markers: list[str] = []
    if model.template.can_think:
        markers += [reasoning.OPEN, reasoning.CLOSE]
    if calls:
        markers += calls.format.markers
    must_call = calls is not None and calls.has_begun
    return ParseOptions(
        piece=piece_of(model.vocab, markers),
        stops=options.stop,
        thinks=prompt.thinks if model.template.can_think and not must_call else None,
        begun=prompt.begun,
        max_calls=(1 if calls.is_single else None) if calls else 0,
        parser=calls.format.parser if calls else ToolCallParser,
        with_sources=options.token_sources,
    )


def _format(model: TextModel, options: AnswerOptions) -> OutputFormat | None:
    """Raises `RequestError` for two formats that cannot both hold."""
    formats = [options.format] if options.format else []
    if options.json_schema is not None:
        formats.append(json_format("json_schema", options.json_schema))
    if options.grammar is not None:
        formats.append(grammar_format("grammar", options.grammar, model.grammars))
    if len(formats) > 1:
        raise RequestError(
            f"{formats[0].field} and {formats[1].field} cannot be combined; give only one"
        )
    return formats[0] if formats else None


def _bound(model: TextModel, form: OutputFormat | None, calls: Calls | None) -> _Bound | None:
    """What the answer must be: text of a form, calls, either of them; or what it likes, as long as
    its calls are as strict tools were promised to be called."""
    grammars = model.grammars
    if calls is None:
        return _Bound(format_grammar(grammars, form)) if form else None
    if form is not None and form.kind != "json":
        raise RequestError(f"{form.field} and tools cannot be combined; set tool_choice to 'none'")
    if calls.has_begun:
        return _Bound(call_grammar(grammars, calls))
    if form is not None:
        format_grammar(grammars, form)  # what is wrong with it alone is reported by its own name
        return _Bound(call_grammar(grammars, calls, form))
    openings = calls.openings(grammars) if calls.is_strict else None
    return _Bound(call_grammar(grammars, calls), openings) if openings else None


def _prepared(
    model: TextModel,
    prompts: Sequence[Sequence[int]],
    parsing: ParseOptions,
    options: AnswerOptions,
    bound: _Bound | None,
    reasons_after: str,
) -> PreparedAnswer:
    """`reasons_after` is the prompt where the answer may begin with reasoning."""
    for token in options.stop_tokens:
        if not 0 <= token < model.n_vocab:
            raise RequestError(
                f"token {token} cannot stop an answer: the vocabulary ends at {model.n_vocab - 1}"
            )
    if bound and options.min_tokens:
        raise RequestError(
            "min_tokens cannot be used with a grammar: the grammar decides when the answer ends"
        )

    def constrain() -> GrammarState | None:
        if bound:
            return constraint_after(bound.grammar, model.vocab, reasons_after, bound.openings)
        if options.min_tokens:
            ends = model.limits.end_tokens | options.stop_tokens
            return MinTokens(options.min_tokens, ends, model.n_vocab)
        return None

    request = RequestOptions(
        draft_max=options.draft_max,
        n_logprobs=options.n_logprobs,
        stop_tokens=options.stop_tokens,
        draft=options.draft,
        cache_prompt=options.cache_prompt,
    )
    return PreparedAnswer(prompts, parsing, request, constrain, bound is not None)
