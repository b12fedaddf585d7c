"""Responses in OpenAI's shapes, as plain dicts, and our `timings` object.

A whole response is put together from the same news as a stream, so both say the same.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from gguf_mtp.answers.parse import Delta, End
from gguf_mtp.chat.tool_calls import CallArguments, CallStart
from gguf_mtp.server.logprob_fields import ChatLogprobs, CompletionLogprobs
from gguf_mtp.server.plan import AnswerPlan
from gguf_mtp.stats import Stats
from gguf_mtp.types import TokenLogprobs

__all__ = ["ResponseChoice", "Responses", "sse", "timings"]


def sse(data: Any) -> bytes:
    """One server-sent event."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


def timings(stats: Stats) -> dict[str, Any]:
    """Counts and times of an answer (`stats.Stats`), in seconds, with the usual ratios.

    `depth`: tokens drafted per round, on average.
    """
    ratios = {
        "tokens_per_s": round(stats.tokens_per_s, 3),
        "accepted": stats.accepted,
        "acceptance_rate": round(stats.acceptance_rate, 4),
        "depth": round(stats.drafted / stats.rounds, 3) if stats.rounds else 0.0,
    }
    counts = {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in dataclasses.asdict(stats).items()
    }
    return counts | ratios


@dataclass(slots=True)
class ResponseChoice:
    """One choice as it grows."""

    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: End | None = None

    def add(self, delta: Delta) -> None:
        self.reasoning += delta.reasoning
        self.content += delta.content
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        for event in delta.calls:
            if isinstance(event, CallStart):
                self.calls.append(_call(event))
            else:
                self.calls[event.number]["function"]["arguments"] += event.text


class Responses:
    """The responses to one request."""

    def __init__(self, plan: AnswerPlan, model: str, created: int) -> None:
        self._plan = plan
        prefix, kind = ("chatcmpl", "chat.completion") if plan.is_chat else _COMPLETION
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created": created,
            "model": model,
            "system_fingerprint": f"gguf-mtp-{version('gguf-mtp')}",
        }
        self._kind = kind
        likely = ChatLogprobs if plan.is_chat else CompletionLogprobs
        self._likely = [likely(plan.parsing.piece) for _ in range(plan.n_choices)]

    @property
    def id(self) -> str:
        return str(self._head["id"])

    def whole(self, choices: Sequence[ResponseChoice]) -> dict[str, Any]:
        ends = [choice.end for choice in choices if choice.end]
        stats = Stats()
        for end in ends:
            stats += end.stats
        return {
            **self._head,
            "object": self._kind,
            "choices": [self._choice(i, choice) for i, choice in enumerate(choices)],
            "usage": self._usage(ends),
            "timings": timings(stats),
        }

    def opening(self, index: int) -> dict[str, Any]:
        """The first chunk of a chat's choice."""
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}})

    def delta(self, index: int, delta: Delta) -> dict[str, Any]:
        ids = {"token_ids": list(delta.tokens)} if self._plan.include_ids else {}
        ids |= _source(delta)
        likely = self._logprobs(index, delta.logprobs)
        if not self._plan.is_chat:
            return self._chunk(index, {"text": delta.content, "logprobs": likely} | ids)
        shown: dict[str, Any] = {}
        if delta.reasoning:
            shown["reasoning_content"] = delta.reasoning
        if delta.content:
            shown["content"] = delta.content
        if delta.calls:
            shown["tool_calls"] = _call_deltas(delta.calls)
        return self._chunk(index, {"delta": shown, "logprobs": likely} | ids)

    def end(self, index: int, end: End) -> dict[str, Any]:
        """The chunk that closes a choice."""
        empty: dict[str, Any] = (
            {"delta": {}} if self._plan.is_chat else {"text": "", "logprobs": None}
        )
        chunk = self._chunk(index, empty, end.finish)
        return chunk | {"timings": timings(end.stats)}

    def usage(self, ends: Sequence[End]) -> dict[str, Any]:
        """The very last chunk, for those who asked for it."""
        chunk = {**self._head, "object": self._stream_kind, "choices": []}
        return chunk | {"usage": self._usage(ends)}

    @property
    def _stream_kind(self) -> str:
        return f"{self._kind}.chunk" if self._plan.is_chat else self._kind

    def _chunk(self, index: int, what: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": index, **what, "finish_reason": finish}
        # OpenAI: whoever asked for usage finds the field, empty, in all chunks but the last.
        usage = {"usage": None} if self._plan.include_usage else {}
        return {**self._head, "object": self._stream_kind, "choices": [choice], **usage}

    def _choice(self, index: int, choice: ResponseChoice) -> dict[str, Any]:
        out: dict[str, Any] = {"index": index, "logprobs": self._logprobs(index, choice.logprobs)}
        if self._plan.is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": choice.content}
            if choice.reasoning:
                message["reasoning_content"] = choice.reasoning
            if choice.calls:
                message["tool_calls"] = choice.calls
                message["content"] = choice.content or None
            out["message"] = message
        else:
            out["text"] = choice.content
        if self._plan.include_ids:
            out["token_ids"] = choice.tokens
        return out | {"finish_reason": choice.end.finish if choice.end else None}

    def _logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        return None if self._plan.options.n_logprobs is None else self._likely[index].shape(entries)

    def _usage(self, ends: Sequence[End]) -> dict[str, Any]:
        """Each prompt counts once, however many answers it had."""
        n_prompt = sum(map(len, self._plan.prompts))
        firsts = ends[:: len(self._plan.params)]
        n_answer = sum(end.n_tokens for end in ends)
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_answer,
            "total_tokens": n_prompt + n_answer,
            "prompt_tokens_details": {"cached_tokens": sum(e.stats.cached_tokens for e in firsts)},
            "completion_tokens_details": {"reasoning_tokens": sum(e.n_reasoning for e in ends)},
        }


_COMPLETION = ("cmpl", "text_completion")


def _source(delta: Delta) -> dict[str, Any]:
    """Where a stream's token came from, and what was drafted since the last one that was told."""
    if delta.source is None:
        return {}
    source, n_tokens, n_rounds, n_drafted, n_accepted = delta.source
    counts = {"tokens": n_tokens, "rounds": n_rounds}
    return {
        "token_source": source,
        "counts": counts | {"drafted": n_drafted, "accepted": n_accepted},
    }


def _call(start: CallStart) -> dict[str, Any]:
    function = {"name": start.name, "arguments": ""}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _call_deltas(events: Sequence[CallStart | CallArguments]) -> list[dict[str, Any]]:
    """One entry for each call: clients read the first of an index and no other."""
    entries: dict[int, dict[str, Any]] = {}
    for event in events:
        entry = entries.setdefault(event.number, {"index": event.number})
        if isinstance(event, CallStart):
            entry |= _call(event)
        else:
            function = entry.setdefault("function", {"arguments": ""})
            function["arguments"] += event.text
    return list(entries.values())
