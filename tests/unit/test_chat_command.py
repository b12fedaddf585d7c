"""The conversation, on a scripted session and a screen that is a list."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from gguf_mtp.cli.conversation import HELP, ContextPolicy, Conversation, View
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
        self.n_ctx: int | None = None
        self.asked: list[list[dict[str, str]]] = []
        self.closed = 0
        self._replies = iter(replies)

    def count(self, messages: Sequence[Mapping[str, str]]) -> int | None:
        """A token for every letter."""
        return sum(len(m["content"]) for m in messages) if self.n_ctx else None

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
        self.gauges: list[str] = []

    def ask(self, gauge: str) -> str | None:
        self.gauges.append(gauge)
        return next(self._lines, None)

    def write(self, text: str) -> None:
        self.said += text

    def think(self, text: str) -> None:
        self.thoughts += text

    def note(self, text: str) -> None:
        self.notes.append(text)

    say = note


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
    assert talk(session, "/nonsense").notes == ["/nonsense is not a command; /help lists them"]


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


# -- commands ------------------------------------------------------------------------------------


def test_what_looks_like_a_command_is_never_sent() -> None:
    """Unless a second slash says that it is a question."""
    session = Scripted(["fine"])
    paper = talk(session, "/savee x", "/sys you are kind", "//save your soul", "/quit now", "more")
    assert session.asked == [[user("/save your soul")]]
    assert len([n for n in paper.notes if "is not a command" in n]) == 2
    assert talk(Scripted(), "/help").notes == [HELP]


def test_undo_and_regenerate() -> None:
    session = Scripted(["one"], ["two"], ["two again"], ["three"])
    paper = talk(session, "/undo", "/regenerate", "a", "b", "/regenerate", "/undo", "c")
    assert paper.notes[:2] == ["nothing to undo", "nothing to answer again"]
    assert session.asked[2] == session.asked[1] == [user("a"), assistant("one"), user("b")]
    assert session.asked[3] == [user("a"), assistant("one"), user("c")]


def test_a_conversation_is_saved_and_taken_up_again(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    system = {"role": "system", "content": "Be kind."}
    first = Scripted(["one"])
    notes = talk(first, "/system Be kind.", "/system", "a", f"/save {file}").notes
    assert notes == ["system prompt: Be kind."] * 2 + [f"saved 2 messages to {file}"]
    second = Scripted(["two"])
    talk(second, f"/load {file}", "b")
    assert second.asked == [[system, user("a"), assistant("one"), user("b")]]
    (tmp_path / "odd").write_text("[]")
    notes = talk(
        Scripted(), "/load", f"/load {tmp_path}/no", f"/load {tmp_path}/odd", f"/save {tmp_path}"
    ).notes
    assert notes[0] == "/load needs a file name"
    assert notes[1].endswith("No such file or directory")
    assert notes[2].endswith("is not a conversation that /save wrote")
    assert notes[3].startswith(f"cannot write {tmp_path}")


# -- a full context ------------------------------------------------------------------------------


def view(policy: ContextPolicy, system: str = "") -> View:
    return View(system=system, policy=policy)


def test_old_exchanges_make_room_and_the_system_prompt_stays() -> None:
    """A quarter of the context is kept for the answer."""
    session = Scripted(["A" * 20], ["B" * 20], ["C" * 20])
    session.n_ctx = 100
    paper = Paper("a" * 20, "b" * 20, "c" * 20)
    Conversation(session, paper, None, 1000, view(ContextPolicy.trim, "S" * 10)).run()
    system = {"role": "system", "content": "S" * 10}
    assert session.asked[1] == [system, user("a" * 20), assistant("A" * 20), user("b" * 20)]
    assert session.asked[2] == [system, user("b" * 20), assistant("B" * 20), user("c" * 20)]
    assert paper.notes == ["the context is full: 1 earlier exchanges were left out"]


def test_a_server_that_is_full_is_asked_again_with_less() -> None:
    session = Scripted(["one"], ContextFull(900, 512), ["two"])
    paper = talk(session, "a", "b")
    assert session.asked[2] == [user("b")]
    assert paper.said == "one\ntwo\n"


def test_with_stop_a_full_context_is_said_with_the_way_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    session = Scripted(["one"], ContextFull(900, 512), ["two"])
    paper = Paper("a", "b", "/clear", "c")
    Conversation(session, paper, None, 9, view(ContextPolicy.stop)).run()
    assert capsys.readouterr().err.rstrip().endswith("; /clear starts a new conversation")
    assert session.asked[2] == [user("c")]


def test_a_question_that_is_too_long_alone_loses_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = ContextFull(900, 512)
    session = Scripted(["one"], full, full, ["two"])
    talk(session, "a", "much too long", "b")
    assert "error: the prompt has 900 tokens" in capsys.readouterr().err
    assert session.asked[3] == [user("a"), assistant("one"), user("b")]


class Counted(Scripted):
    """Answers that say how they ended."""

    def _pieces(self, reply: list[str]) -> Iterator[Piece]:
        for text in reply:
            yield Piece(text)
        stats = Stats(prefill_tokens=60, decode_tokens=20, decode_s=1.0, rounds=20)
        yield Piece(finish_reason="length", stats=stats)


def test_a_full_context_shows_and_a_cut_answer_says_why() -> None:
    session = Counted(["one"], ["two"], ["three"])
    session.n_ctx = 100
    paper = Paper("a", "b")
    Conversation(session, paper, None, 20).run()
    assert paper.gauges == ["", "80% of 100 tokens", "80% of 100 tokens"]
    assert paper.notes[0] == "cut off after 20 tokens, as -n says"
    paper = Paper("a")
    Conversation(session, paper, None, 1000).run()
    assert paper.notes[0] == "cut off: the context is full"
