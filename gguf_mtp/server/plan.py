"""From a request's body to what has to be done for it: prompts, parameters, how to answer.

Everything that can be wrong with a request is found here, before anything is queued. Knows neither
HTTP nor the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gguf_mtp.answers.parse import ParseOptions
from gguf_mtp.answers.prepare import (
    AnswerOptions,
    PreparedAnswer,
    TextModel,
    as_tokens,
    prepare_chat,
    prepare_completion,
)
from gguf_mtp.errors import RequestError, UnknownModel
from gguf_mtp.grammar.reasoning import GrammarState
from gguf_mtp.params import AS_MANY_AS_FIT, RequestOptions, SamplingParams
from gguf_mtp.server.field_tables import NOT_BUILT_IN_CHATS, NOT_BUILT_IN_COMPLETIONS
from gguf_mtp.server.sampling_fields import params_of
from gguf_mtp.server.schemas import ChatRequest, CompletionRequest, Generation, ToolChoice
from gguf_mtp.server.structured_output import output_format_of

__all__ = ["AnswerPlan", "Served", "check_ids", "plan_chat", "plan_completion"]

COMPLETION_TOKENS = 16
"""max_tokens of /v1/completions without one, as OpenAI documents it."""


@dataclass(frozen=True, slots=True)
class Served:
    """The model behind a server. `defaults` and `max_tokens` hold where a request says nothing;
    `created` is in seconds since 1970. Without `any_model` requests must name this one, if any."""

    name: str
    model: TextModel
    defaults: SamplingParams
    created: int
    max_tokens: int | None = None
    any_model: bool = True
    architecture: str = ""

    def check_name(self, name: str | None) -> None:
        """Raises `UnknownModel` for another model's."""
        if name is not None and name != self.name and not self.any_model:
            raise UnknownModel(name)


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """`n` answers to each of `prompts`; answer i of a prompt is drawn with the i-th of `params`.
    Each obeys a constraint of its own, if `constrain` makes one."""

    is_chat: bool
    prompts: Sequence[Sequence[int]]
    params: Sequence[SamplingParams]
    max_tokens: int
    options: RequestOptions
    parsing: ParseOptions
    stream: bool
    include_usage: bool
    include_ids: bool
    constrain: Callable[[], GrammarState | None]

    @property
    def n_choices(self) -> int:
        return len(self.prompts) * len(self.params)


def plan_chat(served: Served, request: ChatRequest) -> AnswerPlan:
    """Raises `RequestError`."""
    served.check_name(request.model)
    request.refuse_what_is_not_built(NOT_BUILT_IN_CHATS)
    template = served.model.template
    if request.thinks is False and template.can_think and not template.has_switch:
        raise RequestError("this model's chat template cannot turn reasoning off")
    messages = [message.model_dump(exclude_none=True) for message in request.messages]
    if request.continue_final_message and request.add_generation_prompt:
        raise RequestError("continue_final_message and add_generation_prompt contradict each other")
    if request.add_generation_prompt is False and not request.continue_final_message:
        raise RequestError(
            "add_generation_prompt can only be false with continue_final_message: true"
        )
    max_tokens = request.max_completion_tokens
    if max_tokens is None:
        max_tokens = request.n_most
    options = _options(served, request, request.n_logprobs, **_tool_options(request))
    return _plan(served, request, prepare_chat(served.model, messages, options), max_tokens)


def plan_completion(served: Served, request: CompletionRequest) -> AnswerPlan:
    """Raises `RequestError`."""
    served.check_name(request.model)
    request.refuse_what_is_not_built(NOT_BUILT_IN_COMPLETIONS)
    max_tokens = request.n_most
    if max_tokens is None and served.max_tokens is None:
        max_tokens = COMPLETION_TOKENS
    prompts = _prompts(served, request.prompt)
    options = _options(served, request, request.n_logprobs)
    return _plan(served, request, prepare_completion(served.model, prompts, options), max_tokens)


def _options(
    served: Served, request: Generation, n_logprobs: int | None, **tools: Any
) -> AnswerOptions:
    return AnswerOptions(
        stop=request.stops,
        stop_tokens=frozenset(request.stop_token_ids or ()),
        min_tokens=request.min_tokens or 0,
        format=output_format_of(request, served.model.grammars),
        n_logprobs=n_logprobs,
        token_sources=bool(request.return_token_sources),
        draft=request.drafters,
        draft_max=request.draft_max,
        cache_prompt=request.cache_prompt is not False,
        **tools,
    )


def _tool_options(request: ChatRequest) -> dict[str, Any]:
    choice = request.tool_choice
    return {
        "tools": [tool.model_dump(exclude_none=True) for tool in request.tools or []],
        "tool_choice": choice if isinstance(choice, str) else "auto",
        "tool_name": choice.function.name if isinstance(choice, ToolChoice) else None,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "continue_final_message": bool(request.continue_final_message),
        "variables": request.variables,
    }


def _plan(
    served: Served, request: Generation, prepared: PreparedAnswer, max_tokens: int | None
) -> AnswerPlan:
    model = served.model
    if max_tokens is None:
        max_tokens = served.max_tokens
    if max_tokens is None or max_tokens == -1:
        max_tokens = AS_MANY_AS_FIT
    if prepared.is_bound and request.ignore_eos:
        raise RequestError(
            "ignore_eos cannot be used with a grammar: the grammar decides when the answer ends"
        )
    for prompt in prepared.prompts:
        model.limits.check(prompt, max_tokens)
    params = params_of(served.defaults, request, model.vocab, model.limits)
    params[0].check_vocabulary(model.n_vocab)
    stream = request.stream_options
    return AnswerPlan(
        is_chat=isinstance(request, ChatRequest),
        prompts=prepared.prompts,
        params=params,
        max_tokens=max_tokens,
        options=prepared.options,
        parsing=prepared.parsing,
        stream=bool(request.stream),
        include_usage=bool(stream and stream.include_usage),
        include_ids=bool(request.return_token_ids),
        constrain=prepared.constrain,
    )


def _prompts(served: Served, prompt: Any) -> list[list[int]]:
    """Text is tokenised; ids are taken as they are."""
    if prompt is None or isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompt = [prompt or ""]
    return [_tokens(served, one) for one in prompt]


def _tokens(served: Served, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        return as_tokens(served.model, prompt)
    check_ids(served, prompt)
    return prompt


def check_ids(served: Served, ids: Sequence[int]) -> None:
    """Raises `RequestError` for an id that the vocabulary does not have."""
    n_vocab = served.model.n_vocab
    for id_ in ids:
        if not 0 <= id_ < n_vocab:
            raise RequestError(f"there is no token {id_}: the vocabulary has {n_vocab} tokens")
