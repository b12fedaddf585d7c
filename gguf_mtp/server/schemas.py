"""What clients may send: OpenAI's request bodies, and our own fields.

Every field may be null where OpenAI documents it so, which then means the default. Unknown fields
are ignored; known ones that this server cannot honour are refused, because an answer that silently
disregards them would be wrong.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from gguf_mtp.errors import RequestError

__all__ = ["ChatRequest", "CompletionRequest", "Detokenize", "Generation", "Tokenize"]

MAX_MESSAGES, MAX_TOOLS, MAX_PROMPTS = 10_000, 1_000, 128
MAX_N, MAX_STOPS, MAX_STOP_CHARS, MAX_BIASES = 16, 16, 1_000, 1_024

# Fields that change the answer and are not built, and the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repeat_penalty": (1,),
    "repetition_penalty": (1,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "typical_p": (1,),
    "mirostat": (0,),
    "logit_bias": ({}, []),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "grammar": ("",),
    "json_schema": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "prompt_logprobs": (),
    "chat_template": (),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
}


class Body(BaseModel):
    """Types are taken as they are: "5" is no number, 1 is no truth value."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


Stop = Annotated[str, StringConstraints(max_length=MAX_STOP_CHARS)]


class StreamOptions(Body):
    include_usage: bool | None = None


class Generation(Body):
    """What both endpoints take."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    draft: bool | Literal["auto", "mtp", "off"] | None = None
    draft_max: Annotated[int, Field(ge=0)] | None = None
    return_token_ids: bool | None = None
    return_token_sources: bool | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def draft_limit(self) -> int | None:
        """The most tokens to draft at once; None where the server decides."""
        return 0 if self.draft in (False, "off") else self.draft_max

    def refuse_what_is_not_built(self) -> None:
        """Raises `RequestError` that names the field."""
        given = self.model_extra or {}
        bias = given.get("logit_bias")
        if isinstance(bias, dict | list) and len(bias) > MAX_BIASES:
            raise RequestError(f"logit_bias has {len(bias)} entries, {MAX_BIASES} is the most")
        for name, neutral in _NEUTRAL.items():
            value = given.get(name)
            if value is not None and not any(_equal(value, one) for one in neutral):
                raise RequestError(f"{name} is not supported yet; leave it out")
        _refuse_formats(given.get("response_format"))


def _equal(value: Any, neutral: Any) -> bool:
    """0 is 0.0, but not False: `logprobs: 0` of /v1/completions asks for something."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _refuse_formats(response_format: Any) -> None:
    kind = response_format.get("type") if isinstance(response_format, dict) else response_format
    if kind not in (None, "text"):
        raise RequestError(
            f"response_format {kind!r} is not supported yet; only 'text' is, and leaving it out"
        )


class TextPart(Body):
    """A content part. Only text can be read."""

    type: str
    text: str | None = None


class Function(Body):
    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    type: Literal["function"] = "function"
    function: Function


class CalledFunction(Body):
    name: str
    arguments: str | None = None


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


class ChosenFunction(Body):
    name: str


class ToolChoice(Body):
    type: Literal["function"] = "function"
    function: ChosenFunction


class ChatRequest(Generation):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(Generation):
    """`POST /v1/completions`: a prompt, several of them, or token ids."""

    prompt: (
        str
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[str] | list[list[int]], Field(min_length=1, max_length=MAX_PROMPTS)]
        | None
    ) = None


class Tokenize(Body):
    """`POST /tokenize`, as llama-server's."""

    content: str
    add_special: bool | None = None
    parse_special: bool | None = None


class Detokenize(Body):
    """`POST /detokenize`, as llama-server's."""

    tokens: list[int]
