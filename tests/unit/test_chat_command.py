"""The conversation, on a scripted session and a screen that is a list."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator, Mapping, Sequence

import pytest

from gguf_mtp.cli.chat import Conversation, View
from gguf_mtp.cli.dimmed import write_dimmed
from gguf_mtp.depth import FixedDepth
from gguf_mtp.errors import ContextFull
from gguf_mtp.params import SamplingParams
from gguf_mtp.session import Piece
from gguf_mtp.stats import Stats


class Engine:
    def __init__(self) -> None:
        self.totals = Stats()
        self.depth = FixedDepth(2)
        self.stopped_drafting: str | None = None


class Scripted:
    """A session that answers from a list and remembers what it was asked."""

    def __init__(self, *replies: list[str] | Exception) -> None:
        self.engine = Engine()
        self.asked: list[list[dict[str, str]]] = []
        self.closed = 0
        self._replies = iter(replies)

    def chat(
        self, messages: Sequence[Mapping[str, str]], _params: SamplingParams, _n: int
    ) -> Iterator[Piece]:
        self.asked.append([dict(m) for m in messages])
        reply = next(self._replies)
        if isinstance(reply, Exception):
            raise reply
        return self._pieces(reply)

    def _pieces(self, reply: list[str]) -> Iterator[Piece]:
        try:
            for text in reply:
                if text == "<ctrl-c>":
                    os.kill(os.getpid(), signal.SIGINT)
                    text = ""
                yield Piece(text)
        finally:
            self.closed += 1


class Paper:
    """A screen on which everything stays, in order."""

    def __init__(self, *lines: str) -> None:
        self._lines = iter(lines)
        self.said = self.thoughts = ""
        self.notes: list[str] = []

    def ask(self) -> str | None:
        return next(self._lines, None)

    def write(self, text: str) -> None:
        self.said += text

    def think(self, text: str) -> None:
        self.thoughts += text

    def note(self, text: str) -> None:
        self.notes.append(text)


def talk(session: Scripted, *lines: str) -> Paper:
    paper = Paper(*lines)
    Conversation(session, paper, SamplingParams(), 100).run()  # type: ignore[arg-type]
    return paper


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_the_conversation_is_remembered() -> None:
    session = Scripted(["Hel", "lo!"], ["Paris."])
    paper = talk(session, "hi", "", "and France?")
    assert paper.said == "Hello!\nParis.\n"
    assert session.asked == [[user("hi")], [user("hi"), assistant("Hello!"), user("and France?")]]


def test_clear_forgets_and_exit_leaves() -> None:
    session = Scripted(["one"], ["two"], ["three"])
    paper = talk(session, "hi", "/clear", "again", "/exit", "never read")
    assert session.asked[1] == [user("again")]
    assert paper.said == "one\ntwo\n"


def test_ctrl_c_stops_the_answer_and_keeps_the_chat() -> None:
    session = Scripted(["par", "<ctrl-c>", "never shown"], ["next"])
    paper = talk(session, "hi", "go on")
    assert paper.said == "par\nnext\n"
    assert paper.notes == ["stopped"]
    assert session.closed == 2
    assert session.asked[1] == [user("hi"), assistant("par"), user("go on")]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_ends_the_program() -> None:
    class Deaf(Scripted):
        def _pieces(self, reply: list[str]) -> Iterator[Piece]:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            yield from super()._pieces(reply)

    with pytest.raises(KeyboardInterrupt):
        talk(Deaf(["a"]), "hi")


def test_a_refused_question_is_not_remembered(capsys: pytest.CaptureFixture[str]) -> None:
    session = Scripted(ContextFull(900, 512), ["fine"])
    paper = talk(session, "much too long", "short")
    assert session.asked[1] == [user("short")]
    assert paper.said == "fine\n"
    assert capsys.readouterr().err.startswith("error: the prompt has 900 tokens")


def test_stats_and_unknown_commands() -> None:
    session = Scripted()
    assert talk(session, "/stats").notes == ["nothing has been answered yet"]
    session.engine.totals = Stats(
        prefill_tokens=10,
        prefill_s=0.5,
        decode_tokens=30,
        decode_s=2.0,
        rounds=12,
        drafted=24,
        judged_per_position=[12, 9],
        accepted_per_position=[9, 6],
    )
    session.engine.stopped_drafting = "the drafter failed"
    notes = talk(session, "/stats").notes
    assert notes == [
        "prompt  10 tokens read at 20.0 tokens/s, 0 already in the cache",
        "answer  30 tokens in 2.00 s, 15.0 tokens/s",
        "drafts  accepted 15 / drafted 24 = 62 %, 2.50 tokens per round",
        "        by position 75 % 67 %",
        "drafting is off: the drafter failed",
    ]
    assert talk(session, "/nonsense").notes[0].startswith("/nonsense is not a command.")


def test_a_path_or_a_slash_in_a_sentence_is_no_command() -> None:
    session = Scripted(["ok"])
    talk(session, "/etc/passwd holds what?")
    assert session.asked == [[user("/etc/passwd holds what?")]]


def test_stats_say_where_the_model_lies() -> None:
    paper = Paper("/stats")
    where = "CUDA0 3.0 GiB (7 layers, output), CPU 1.0 GiB"
    Conversation(Scripted(), paper, SamplingParams(), 100, View(placement=where)).run()  # type: ignore[arg-type]
    assert paper.notes == ["nothing has been answered yet", f"placement: {where}"]


class Thinking(Scripted):
    """Answers with reasoning."""

    def _pieces(self, reply: list[str]) -> Iterator[Piece]:
        for text in reply:
            yield Piece(reasoning=text.upper())
        for text in reply:
            yield Piece(text)


def test_reasoning_is_shown_apart_hidden_on_request_and_not_sent_back() -> None:
    session = Thinking(["a", "b"], ["c"], ["d"])
    paper = talk(session, "one", "/think", "two", "/think", "three")
    assert paper.thoughts == "AB\n\nD\n\n"
    assert paper.said == "ab\nc\nd\n"
    assert [n for n in paper.notes if "reasoning" in n] == [
        "reasoning is hidden",
        "reasoning is shown",
    ]
    assert session.asked[2][1] == {"role": "assistant", "content": "ab"}
    hidden = Paper("one")
    view = View(shows_reasoning=False)
    Conversation(Thinking(["x"]), hidden, SamplingParams(), 9, view).run()  # type: ignore[arg-type]
    assert (hidden.thoughts, hidden.said) == ("", "x\n")


def test_reasoning_that_never_ended_leaves_no_mark_on_the_next_answer() -> None:
    class Silent(Thinking):
        def _pieces(self, reply: list[str]) -> Iterator[Piece]:
            for text in reply:
                yield Piece(reasoning=text) if text.startswith("(") else Piece(text)

    paper = talk(Silent(["(hm"], ["hi"]), "one", "two")
    assert (paper.thoughts, paper.said) == ("(hm", "\nhi\n")


def test_dimmed_text_is_written_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tty(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    screen, pipe = Tty(), io.StringIO()
    for file in (screen, pipe):
        write_dimmed(":fire:\t[b]z", file)
    assert screen.getvalue() == "\x1b[2m:fire:\t[b]z\x1b[22m"
    assert pipe.getvalue() == ":fire:\t[b]z"
