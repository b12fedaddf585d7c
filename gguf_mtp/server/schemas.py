"""What clients may send: OpenAI's request bodies, and our own fields.

Every field may be null where OpenAI documents it so, which then means the default. Unknown fields
are ignored; known ones that this server cannot honour are refused, because an answer that silently
disregards them would be wrong.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from pydantic_core import PydanticCustomError

from gguf_mtp.drafters.registry import parse_drafters
from gguf_mtp.errors import RequestError
from gguf_mtp.server.field_tables import NOT_BUILT, Neutral, refused

__all__ = ["ChatRequest", "CompletionRequest", "Detokenize", "Generation", "Tokenize"]

MAX_MESSAGES, MAX_TOOLS, MAX_PROMPTS = 10_000, 1_000, 128
MAX_N, MAX_STOPS, MAX_STOP_CHARS, MAX_STOP_TOKENS = 16, 16, 1_000, 64
MAX_BIASES, MAX_SAMPLERS, MAX_CHOICES, MAX_LOGPROBS = 1_024, 20, 1_000, 20


class Body(BaseModel):
    """Types are taken as they are: "5" is no number, 1 is no truth value."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


Stop = Annotated[str, StringConstraints(max_length=MAX_STOP_CHARS)]


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None


class JsonSchema(Body):
    """OpenAI's `response_format.json_schema`. `strict` False lets unknown keywords pass."""

    name: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """`schema` is llama-server's, beside `json_object`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")


Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]
Schema = dict[str, Any] | bool | str
"""A JSON schema, or its text."""


class StructuredOutputs(Body):
    """vLLM's."""

    json_: Schema | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: None = None


Bias = float | bool
"""False bans a token."""
BiasPair = Annotated[list[int | str | float | bool], Field(min_length=2, max_length=2)]


def _named(text: str) -> str:
    try:
        parse_drafters(text)
    except RequestError as error:
        raise PydanticCustomError("drafters", "{why}", {"why": str(error)}) from None
    return text


Drafters = Annotated[str, Field(max_length=100), AfterValidator(_named)]
"""Names, as `--draft` takes them."""


class Generation(Body):
    """What both endpoints take."""

    model: str | None = None
    max_tokens: int | None = None
    n_predict: int | None = None
    cache_prompt: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_last_n: int | None = None
    samplers: str | Annotated[list[str], Field(max_length=MAX_SAMPLERS)] | None = None
    logit_bias: dict[str, Bias] | list[BiasPair] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKENS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    draft: Drafters | bool | None = None
    draft_max: Annotated[int, Field(ge=0)] | None = None
    return_token_ids: bool | None = None
    return_token_sources: bool | None = None
    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | bool | None = None
    grammar: str | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def n_most(self) -> int | None:
        """The most tokens of the answer, by OpenAI's name or llama-server's."""
        return self.n_predict if self.max_tokens is None else self.max_tokens

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def drafters(self) -> tuple[str, ...] | None:
        """Who may draft; None: all there are."""
        if isinstance(self.draft, str):
            return parse_drafters(self.draft)
        return () if self.draft is False else None

    def refuse_what_is_not_built(self, *more: Neutral) -> None:
        """`more`: what this endpoint does not build. Raises `RequestError` that names the field."""
        if self.logit_bias and len(self.logit_bias) > MAX_BIASES:
            n = len(self.logit_bias)
            raise RequestError(f"logit_bias has {n} entries, but at most {MAX_BIASES} are allowed")
        name = refused(self.model_extra or {}, (NOT_BUILT, *more))
        if name is not None:
            raise RequestError(f"{name} is not supported yet; omit it")


class TextPart(Body):
    """A content part. Only text can be read."""

    type: str
    text: str | None = None


class Function(Body):
    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"] = "function"
    function: Function


class CalledFunction(Body):
    """Arguments as JSON text (OpenAI's) or as the object itself (ollama's)."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChosenFunction(Body):
    name: str


class ToolChoice(Body):
    type: Literal["function"] = "function"
    function: ChosenFunction


class Thinking(Body):
    """DeepSeek's and Anthropic's switch."""

    type: Literal["enabled", "disabled", "adaptive"]


class ChatRequest(Generation):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking: bool | Thinking | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def thinks(self) -> bool | None:
        """Whether the answer shall begin with reasoning; None where nothing is said."""
        if self.thinking is not None:
            is_on = self.thinking if isinstance(self.thinking, bool) else True
            return is_on and getattr(self.thinking, "type", "") != "disabled"
        if self.enable_thinking is not None:
            return self.enable_thinking
        return False if self.reasoning_effort == "none" else None

    @property
    def variables(self) -> dict[str, Any]:
        """For the chat template, which may know the switch by either name; what is said of the
        template's own variables wins."""
        found: dict[str, Any] = {}
        if self.thinks is not None:
            found |= {"thinking": self.thinks, "enable_thinking": self.thinks}
        if self.reasoning_effort not in (None, "none"):
            found["reasoning_effort"] = self.reasoning_effort
        return found | (self.chat_template_kwargs or {})

    @property
    def n_logprobs(self) -> int | None:
        """How many alternatives to report with each token's log-probability; None for neither."""
        if not self.logprobs and self.top_logprobs:
            raise RequestError("top_logprobs is given, but logprobs is not true")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Generation):
    """`POST /v1/completions`: a prompt, several of them, or token ids."""

    prompt: (
        str
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[str] | list[list[int]], Field(min_length=1, max_length=MAX_PROMPTS)]
        | None
    ) = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def n_logprobs(self) -> int | None:
        """See `ChatRequest`."""
        return self.logprobs


class Tokenize(Body):
    """`POST /tokenize`, as llama-server's."""

    content: str
    add_special: bool | None = None
    parse_special: bool | None = None


class Detokenize(Body):
    """`POST /detokenize`, as llama-server's."""

    tokens: list[int]
