"""What every dialect shares: an answer's events written as its own, whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Protocol

from gguf_mtp.answers.parse import Delta, End, Failure
from gguf_mtp.errors import RequestError
from gguf_mtp.server.error_responses import Problem, problem_of
from gguf_mtp.server.responses import ResponseChoice
from gguf_mtp.server.stream import RequestStream

__all__ = ["DialectAnswer", "dialect_stream", "function_tool", "text_of"]


class DialectAnswer(Protocol):
    """Writes one answer as its dialect's clients read it: `whole`, or the events of a stream, from
    `opening` to `end` or `failure`."""

    id: str
    media_type: str

    @property
    def still_there(self) -> bytes: ...

    def whole(self, choice: ResponseChoice) -> dict[str, Any]: ...
    def opening(self) -> Iterable[bytes]: ...
    def delta(self, delta: Delta) -> Iterable[bytes]: ...
    def end(self, end: End) -> Iterable[bytes]: ...
    def failure(self, problem: Problem) -> Iterable[bytes]: ...


async def dialect_stream(
    exchange: RequestStream, answer: DialectAnswer, comment_s: float
) -> AsyncIterator[bytes]:
    """The bytes of a stream. `still_there` goes out whenever nothing else did for `comment_s`
    seconds (0: never)."""
    for event in answer.opening():
        yield event
    while not exchange.is_over:
        found = await exchange.news(comment_s or None)
        if found is None:
            yield answer.still_there
            continue
        news = found[1]
        if isinstance(news, Failure):
            exchange.close()
            events = answer.failure(problem_of(news.error))
        elif isinstance(news, End):
            events = answer.end(news)
        else:
            events = answer.delta(news)
        for event in events:
            yield event
        if isinstance(news, Failure):
            return


def function_tool(
    name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None
) -> dict[str, Any]:
    """A function as a chat request has it; what was not said is not there."""
    more = {"description": description, "strict": strict}
    given = {key: value for key, value in more.items() if value is not None}
    function = {"name": name, "parameters": parameters or {}, **given}
    return {"type": "function", "function": function}


def text_of(content: object, where: str, kinds: Sequence[str]) -> str:
    """The text of a message's content: text itself, or parts of these `kinds`.

    Raises `RequestError` for a part that is not text, with its place.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be text or a list of parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(text, str):
            raise RequestError(f"{where}[{i}] is of type {kind!r}, but this model reads only text")
        texts.append(text)
    return "\n".join(texts)
