"""A conversation in a terminal or a pipe: questions, answers, and commands that begin with a slash.

Knows neither models nor servers, and nothing of how a screen looks.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..errors import BadLogits, ContextFull, DecodeError, RequestError

if TYPE_CHECKING:
    from ..depth.protocol import Depth
    from ..params import SamplingParams
    from ..session import Piece
    from ..stats import Stats

__all__ = ["HELP", "ContextPolicy", "Conversation", "Screen", "Talker", "View", "interrupts"]

HELP = """/clear            forget the conversation
/undo             forget the last question and its answer
/regenerate       answer the last question again
/system [TEXT]    show or set the system prompt
/save FILE        save the conversation; /load FILE takes it up again
/think            show or hide reasoning
/stats            speed and acceptance
/exit             leave; a line that begins with // is a question that begins with /"""
_COMMAND = re.compile(r"(/[A-Za-z?]+)(?:\s+(.*))?", re.DOTALL)
_GAUGE_FROM = 0.7  # of the context
_RESERVE = 4  # a quarter of the context is kept free for an answer
Message = dict[str, str]


class ContextPolicy(str, Enum):
    """What happens when a conversation outgrows the context."""

    trim = "trim"
    stop = "stop"


class Screen(Protocol):
    """Where a conversation happens. `ask` returns None at the end of input; `say` answers a
    command, `note` tells what nobody asked for."""

    def ask(self, gauge: str) -> str | None: ...
    def write(self, text: str) -> None: ...
    def think(self, text: str) -> None: ...
    def say(self, text: str) -> None: ...
    def note(self, text: str) -> None: ...


class Talker(Protocol):
    """Whom a conversation is with: a `session.Session`, or a `server_client.RemoteSession`.

    `n_ctx` and `count` are None where the context is not known.
    """

    @property
    def engine(self) -> EngineAccount: ...
    @property
    def n_ctx(self) -> int | None: ...
    def count(self, messages: Sequence[Mapping[str, str]]) -> int | None: ...
    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        params: SamplingParams | None,
        max_tokens: int,
    ) -> Iterator[Piece]: ...


class EngineAccount(Protocol):
    """What /stats shows of an engine."""

    @property
    def totals(self) -> Stats: ...
    @property
    def depth(self) -> Depth: ...
    @property
    def stopped_drafting(self) -> str | None: ...


@dataclass(slots=True)
class View:
    """What a conversation shows beside answers: the model's reasoning, and in /stats where the
    model is placed. `system` is its system prompt; `policy` says what a full context does."""

    shows_reasoning: bool = True
    placement: str = ""
    system: str = ""
    policy: ContextPolicy = ContextPolicy.trim


class _Reply(NamedTuple):
    text: str
    stats: Stats | None
    is_cut: bool
    is_stopped: bool


class Conversation:
    """Questions and answers until the end of input or /exit. Sampling goes by `params`, and an
    answer has at most `max_tokens`."""

    def __init__(
        self,
        talker: Talker,
        screen: Screen,
        params: SamplingParams | None,
        max_tokens: int,
        view: View | None = None,
    ) -> None:
        self._talker, self._screen = talker, screen
        self._params, self._max_tokens = params, max_tokens
        self._view = view or View()
        self._history: list[Message] = []
        self._used = 0  # tokens of the conversation, as far as they were counted
        self._commands: Mapping[str, Callable[[str], None]] = {
            "/clear": self._clear,
            "/undo": self._undo,
            "/regenerate": self._regenerate,
            "/system": self._set_system,
            "/save": self._save,
            "/load": self._load,
            "/think": self._toggle_reasoning,
            "/stats": self._show_stats,
            "/help": self._help,
            "/?": self._help,
        }

    def run(self) -> None:
        while (line := self._screen.ask(self._gauge())) is not None:
            command = _COMMAND.fullmatch(line.strip())
            if not line.strip():
                continue
            if line.startswith("//"):
                self._answer(line[1:])
            elif command is None:
                self._answer(line)
            elif command[1] in ("/exit", "/quit", "/bye"):
                return
            elif command[1] in self._commands:
                self._commands[command[1]]((command[2] or "").strip())
            else:
                self._screen.say(f"{command[1]} is not a command; /help lists them")

    def _gauge(self) -> str:
        """How full the context is, once that matters."""
        n_ctx = self._talker.n_ctx
        if not n_ctx or self._used < _GAUGE_FROM * n_ctx:
            return ""
        return f"{min(self._used / n_ctx, 1):.0%} of {n_ctx:,} tokens"

    # -- answers ---------------------------------------------------------------------------------

    def _answer(self, line: str) -> None:
        """One exchange. A refused or failed request leaves the history as it was."""
        from . import stats_lines

        screen, before = self._screen, list(self._history)
        self._history.append({"role": "user", "content": line})
        n_forgotten = self._make_room()
        try:
            while True:
                try:
                    reply = self._reply()
                    break
                except ContextFull:
                    if self._view.policy is ContextPolicy.stop or not self._forget_oldest():
                        raise
                    n_forgotten += 1
        except (BadLogits, DecodeError, RequestError) as error:
            self._history = before
            hint = "; /clear starts a new conversation" if isinstance(error, ContextFull) else ""
            print(f"error: {error}{hint if before else ''}", file=sys.stderr)
            return
        screen.write("\n")
        if n_forgotten:
            screen.note(f"the context is full: {n_forgotten} earlier exchanges were left out")
        if reply.is_stopped:
            screen.note("stopped")
        elif reply.is_cut:
            screen.note(self._why_cut(reply.stats))
        if reply.stats:
            stats = reply.stats
            self._used = stats.cached_tokens + stats.prefill_tokens + stats.decode_tokens
            screen.note(stats_lines.answer_line(stats, self._talker.engine.depth))
        self._history.append({"role": "assistant", "content": reply.text})

    def _reply(self) -> _Reply:
        text, stats, is_thinking, is_cut = "", None, False, False
        try:
            pieces = self._talker.chat(self._messages(), self._params, self._max_tokens)
            with interrupts() as interrupted:
                for piece in pieces:
                    is_thinking = self._show(piece, is_thinking)
                    text += piece.text
                    stats = piece.stats or stats
                    is_cut = piece.finish_reason == "length"
                    if interrupted():
                        pieces.close()  # type: ignore[attr-defined]
                        break
        except (BadLogits, DecodeError, RequestError):
            self._screen.write("\n" if text or is_thinking else "")
            raise
        return _Reply(text, stats, is_cut, interrupted())

    def _messages(self) -> list[Message]:
        system = self._view.system
        return [*([{"role": "system", "content": system}] if system else []), *self._history]

    def _make_room(self) -> int:
        """Forgets old exchanges so that an answer has room; how many."""
        n_ctx, n_forgotten = self._talker.n_ctx, 0
        if n_ctx is None or self._view.policy is ContextPolicy.stop:
            return 0
        reserve = min(self._max_tokens, n_ctx // _RESERVE)
        while (n := self._talker.count(self._messages())) is not None and n > n_ctx - reserve:
            if not self._forget_oldest():
                break
            n_forgotten += 1
        return n_forgotten

    def _forget_oldest(self) -> bool:
        """The oldest question and its answer; not the one that is being asked."""
        if len(self._history) < 2:
            return False
        del self._history[0]
        while len(self._history) > 1 and self._history[0]["role"] != "user":
            del self._history[0]
        return True

    def _why_cut(self, stats: Stats | None) -> str:
        if stats and stats.decode_tokens >= self._max_tokens:
            return f"cut off after {stats.decode_tokens} tokens, as -n says"
        return "cut off: the context is full" if self._talker.n_ctx else "cut off"

    def _show(self, piece: Piece, is_thinking: bool) -> bool:
        """`is_thinking`: reasoning was shown and no text since; returns the same after `piece`."""
        if self._view.shows_reasoning and piece.reasoning:
            self._screen.think(piece.reasoning)
            is_thinking = True
        if piece.text and is_thinking:
            self._screen.think("\n\n")
            is_thinking = False
        self._screen.write(piece.text)
        return is_thinking

    # -- commands --------------------------------------------------------------------------------

    def _clear(self, _: str) -> None:
        self._history.clear()
        self._used = 0
        self._screen.say("conversation cleared")

    def _undo(self, _: str) -> None:
        question = self._take_back()
        self._screen.say("nothing to undo" if question is None else f"forgot: {question[:60]}")

    def _regenerate(self, _: str) -> None:
        question = self._take_back()
        if question is None:
            self._screen.say("nothing to answer again")
        else:
            self._answer(question)

    def _take_back(self) -> str | None:
        """The last question, which leaves the conversation with its answer."""
        at = [i for i, m in enumerate(self._history) if m["role"] == "user"]
        if not at:
            return None
        question = self._history[at[-1]]["content"]
        del self._history[at[-1] :]
        return question

    def _set_system(self, text: str) -> None:
        if text:
            self._view.system = text
        self._screen.say(f"system prompt: {self._view.system or 'none'}")

    def _save(self, name: str) -> None:
        if not name:
            self._screen.say("/save needs a file name")
            return
        whole = json.dumps({"messages": self._messages()}, ensure_ascii=False, indent=1)
        try:
            Path(name).write_text(f"{whole}\n", encoding="utf-8")
        except OSError as error:
            self._screen.say(f"cannot write {name}: {error.strerror}")
        else:
            self._screen.say(f"saved {len(self._history)} messages to {name}")

    def _load(self, name: str) -> None:
        if not name:
            self._screen.say("/load needs a file name")
            return
        try:
            messages = json.loads(Path(name).read_text(encoding="utf-8"))["messages"]
            found = [{"role": str(m["role"]), "content": str(m["content"])} for m in messages]
        except OSError as error:
            self._screen.say(f"cannot read {name}: {error.strerror}")
        except (ValueError, LookupError, TypeError):
            self._screen.say(f"{name} is not a conversation that /save wrote")
        else:
            self._view.system = "\n\n".join(m["content"] for m in found if m["role"] == "system")
            self._history = [m for m in found if m["role"] != "system"]
            self._screen.say(f"loaded {len(self._history)} messages from {name}")

    def _toggle_reasoning(self, _: str) -> None:
        shows = self._view.shows_reasoning = not self._view.shows_reasoning
        self._screen.say(f"reasoning is {'shown' if shows else 'hidden'}")

    def _help(self, _: str) -> None:
        self._screen.say(HELP)

    def _show_stats(self, _: str) -> None:
        from . import stats_lines

        screen, engine = self._screen, self._talker.engine
        totals = engine.totals
        lines = stats_lines.lines(totals) if totals.rounds else ["nothing has been answered yet"]
        for line in [*lines, *stats_lines.decision_lines(engine.depth)]:
            screen.say(line)
        if engine.stopped_drafting:
            screen.say(f"drafting is off: {engine.stopped_drafting}")
        if self._view.placement:
            screen.say(f"placement: {self._view.placement}")


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Within it Ctrl+C only raises a flag, so that it never tears the engine in mid-round.

    A second Ctrl+C ends the program.
    """
    hit = False

    def note(_signal: int, _frame: object) -> None:
        nonlocal hit
        if hit:
            raise KeyboardInterrupt
        hit = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: hit
    finally:
        signal.signal(signal.SIGINT, before)
