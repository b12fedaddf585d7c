"""The thread that owns the engine: queue, cancellation, failures that stay with one request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from gguf_mtp.errors import ContextFull, DecodeError, RequestError, Unavailable
from gguf_mtp.params import RequestOptions, SamplingParams
from gguf_mtp.server.engine_thread import AnswerJob, EngineThread
from gguf_mtp.types import Chunk
from tests.support.scripted import Answer, ByteVocab, ScriptedEngine
from tests.support.waiting import wait_for

GREEDY = SamplingParams(temperature=0)


class Notes:
    """A receiver that writes everything down. `wants(text)` says whether more is wanted."""

    def __init__(self, wants: Callable[[str], bool] = lambda _: True) -> None:
        self.chunks: list[Chunk] = []
        self.error: Exception | None = None
        self.over = threading.Event()
        self.thread: int | None = None
        self._wants = wants

    @property
    def text(self) -> str:
        return bytes(t for chunk in self.chunks for t in chunk.tokens).decode()

    @property
    def finish(self) -> str | None:
        return self.chunks[-1].finish_reason if self.chunks else None

    def receive(self, chunk: Chunk) -> bool:
        assert not self.over.is_set(), "something came after the end"
        self.thread = threading.get_ident()
        self.chunks.append(chunk)
        if chunk.finish_reason:
            self.over.set()
        return self._wants(self.text)

    def fail(self, error: Exception) -> None:
        assert not self.over.is_set(), "something came after the end"
        self.error = error
        self.over.set()

    def wait(self) -> Notes:
        assert self.over.wait(10), "nothing came"
        return self


class Broken(Notes):
    """A receiver with a bug."""

    def receive(self, chunk: Chunk) -> bool:
        raise RuntimeError(f"a bug at {chunk.seq}")


def job(notes: Notes, prompt: str | list[int] = "hi", **options) -> AnswerJob:
    tokens = ByteVocab().tokenize(prompt, False) if isinstance(prompt, str) else prompt
    return AnswerJob(notes, tokens, GREEDY, options.pop("max_tokens", 100), **options)


@contextmanager
def running(engine: ScriptedEngine, n_queue: int = 10) -> Iterator[EngineThread]:
    worker = EngineThread(engine, engine.limits.n_seq, n_queue)
    worker.start()
    try:
        yield worker
    finally:
        if engine.steps:
            engine.steps.release(1000)
        assert worker.stop("the test is over", 10)


def echo(prompt: str, _: int) -> Answer:
    return Answer(f"You said {prompt}.")


def held(script: Callable[[str, int], Answer] = echo, **options) -> ScriptedEngine:
    """An engine that makes a step only when the test lets it."""
    engine = ScriptedEngine(script, **options)
    engine.steps = threading.Semaphore(0)
    return engine


def test_answers_several_at_once_on_its_own_thread() -> None:
    notes = [Notes() for _ in range(5)]
    engine = ScriptedEngine(echo)
    with running(engine) as worker:
        for i, note in enumerate(notes):
            worker.submit([job(note, f"number {i}", options=RequestOptions(draft_max=i))])
        assert [n.wait().text for n in notes] == [f"You said number {i}." for i in range(5)]
        wait_for(lambda: worker.n_unfinished == 0)
    assert {n.finish for n in notes} == {"stop"}
    assert len({n.thread for n in notes}) == 1
    assert notes[0].thread != threading.get_ident()
    assert [r.options.draft_max for r in engine.requests] == [0, 1, 2, 3, 4]


def test_a_full_queue_refuses_all_of_a_request_and_takes_one_again_later() -> None:
    engine = held()
    with running(engine, n_queue=1) as worker:  # two slots and one that waits
        first = [Notes() for _ in range(3)]
        worker.submit([job(n) for n in first[:2]])
        with pytest.raises(Unavailable, match="busy: 2 of at most 3 answers are running"):
            worker.submit([job(Notes()), job(Notes())])
        with pytest.raises(RequestError, match="4 answers, but this server takes at most 3"):
            worker.submit([job(Notes()) for _ in range(4)])  # coming again would not help
        worker.submit([job(first[2])])
        with pytest.raises(Unavailable):
            worker.submit([job(Notes())])
        engine.steps.release(1000)
        assert all(n.wait().finish == "stop" for n in first)
        wait_for(lambda: worker.n_unfinished == 0)
        worker.submit([job(late := Notes())])
        assert late.wait().finish == "stop"
    assert len(engine.requests) == 4  # what was refused never reached the engine


@pytest.mark.parametrize("n_steps", [0, 1, 3])  # before its prompt, in the middle of it, later
def test_a_running_answer_is_cancelled_between_two_steps(n_steps: int) -> None:
    engine = held(lambda *_: Answer("a long answer", chunk=1, n_prefill=2))
    with running(engine) as worker:
        note, other = Notes(), Notes()
        [ticket] = worker.submit([job(note, "one")])
        worker.submit([job(other, "two")])
        for _ in range(n_steps):
            engine.steps.release()
        wait_for(lambda: engine.n_steps == n_steps)
        worker.cancel([ticket])
        engine.steps.release()  # for the step that may have begun
        assert note.wait().finish == "cancelled"
        engine.steps.release(1000)
        assert other.wait().text == "a long answer"
        worker.cancel([ticket])  # over: nothing happens
    assert engine.cancelled == [1]


def test_a_waiting_answer_is_cancelled_in_the_queue() -> None:
    engine = held(n_seq=1)
    with running(engine) as worker:
        first, second, third = Notes(), Notes(), Notes()
        worker.submit([job(first)])
        tickets = worker.submit([job(second, "b"), job(third, "c")])
        worker.cancel(tickets[:1])
        engine.steps.release(1)
        assert second.wait().finish == "cancelled"
        assert not first.over.is_set()
        engine.steps.release(1000)
        assert third.wait().text == "You said c."
    assert second.text == ""


def test_who_wants_no_more_gets_the_last_chunk_and_the_slot_is_free() -> None:
    engine = ScriptedEngine(echo, n_seq=1)
    with running(engine) as worker:
        note, later = Notes(wants=lambda text: "said" not in text), Notes()
        worker.submit([job(note)])
        worker.submit([job(later)])
        assert note.wait().finish == "cancelled"
        assert note.text == "You said "
        assert note.chunks[-1].stats is not None
        assert later.wait().text == "You said hi."


def test_the_same_prompt_is_read_once_and_then_shared() -> None:
    """The others wait until the first one's prompt is read, so that they can copy it."""
    engine = held(n_seq=4)
    prompt = ByteVocab().tokenize("hi", False)
    with running(engine) as worker:
        notes = [Notes() for _ in range(4)]
        worker.submit([job(n, prompt) for n in notes[:3]] + [job(notes[3], "other")])
        engine.steps.release(1)
        wait_for(lambda: engine.n_steps == 1)
        assert len(engine.requests) == 2
        engine.steps.release(1)
        wait_for(lambda: len(engine.requests) == 4)
        engine.steps.release(1000)
        assert [n.wait().text for n in notes[:3]] == ["You said hi."] * 3


def test_followers_go_on_when_the_first_fails_or_is_cancelled() -> None:
    engine = held(n_seq=1)
    prompt = ByteVocab().tokenize("hi", False)
    with running(engine) as worker:
        notes = [Notes(), Notes(), Notes()]
        tickets = worker.submit([job(n, prompt) for n in notes])
        worker.cancel([tickets[2], tickets[0]])
        engine.steps.release(1)
        assert notes[2].wait().finish == "cancelled"
        assert notes[0].wait().finish == "cancelled"
        engine.steps.release(1000)
        assert notes[1].wait().text == "You said hi."
        too_long = [Notes(), Notes()]
        worker.submit([job(n, long) for n, long in zip(too_long, [[1] * 2000] * 2, strict=True)])
        assert all(isinstance(n.wait().error, ContextFull) for n in too_long)


def test_one_request_that_cannot_be_submitted_harms_no_other() -> None:
    with running(ScriptedEngine(echo)) as worker:
        good, bad = Notes(), Notes()
        worker.submit([job(bad, max_tokens=0), job(good, "x")])
        assert "max_tokens is 0" in str(bad.wait().error)
        assert good.wait().text == "You said x."


def test_a_failed_decode_is_tried_again_first() -> None:
    error = DecodeError(1, "decoding failed")
    with running(ScriptedEngine(echo, failures={2: error, 4: error})) as worker:
        worker.submit([job(note := Notes())])
        assert note.wait().text == "You said hi."


def test_a_decode_that_goes_on_failing_costs_the_newest_request_only() -> None:
    error = DecodeError(-3, "decoding failed")
    engine = ScriptedEngine(echo, failures={3: error, 4: error})
    engine.steps = threading.Semaphore(0)
    with running(engine) as worker:
        old, new, waiting = Notes(), Notes(), Notes()
        worker.submit([job(old, "a"), job(new, "b"), job(waiting, "c")])
        engine.steps.release(1000)
        assert new.wait().error is error
        assert (old.wait().text, waiting.wait().text) == ("You said a.", "You said c.")


def test_a_round_that_breaks_costs_the_requests_in_it(caplog) -> None:
    engine = ScriptedEngine(echo, failures={2: ZeroDivisionError("a bug")}, n_seq=1)
    with running(engine) as worker:
        worker.submit([job(first := Notes()), job(second := Notes(), "x")])
        assert "inside the server" in str(first.wait().error)
        assert second.wait().text == "You said x."
        assert worker.is_alive
    assert "a bug" in caplog.text


def test_a_receiver_that_breaks_harms_no_other(caplog) -> None:
    engine = ScriptedEngine(echo)
    with running(engine) as worker:
        worker.submit([job(broken := Broken(), "a"), job(good := Notes(), "b")])
        assert isinstance(broken.wait().error, RuntimeError)
        assert good.wait().text == "You said b."
    assert engine.cancelled == [1]
    assert "a bug at 1" in caplog.text


def test_stopping_fails_what_is_unfinished_and_refuses_more() -> None:
    engine = held(lambda *_: Answer("never", n_prefill=10), n_seq=1)
    prompt = ByteVocab().tokenize("hi", False)
    worker = EngineThread(engine, 1, 10)
    with pytest.raises(Unavailable, match="stopped"):
        worker.submit([job(Notes())])  # not started
    worker.start()
    notes = [Notes() for _ in range(4)]
    worker.submit([job(n, prompt) for n in notes[:3]])
    worker.submit([job(notes[3])])
    engine.steps.release(1)
    wait_for(lambda: engine.n_steps == 1)
    assert not worker.stop("the server is shutting down", 0)
    engine.steps.release(1000)
    assert worker.stop("another reason", 10)
    assert {str(n.wait().error) for n in notes} == {"the server is shutting down"}
    assert (worker.is_alive, worker.n_unfinished) == (False, 0)
    with pytest.raises(Unavailable, match="shutting down"):
        worker.submit([job(Notes())])


def test_an_engine_that_dies_fails_everything_and_is_seen(caplog) -> None:
    engine = ScriptedEngine(echo, failures={2: SystemExit()})
    worker = EngineThread(engine, 2, 10)
    worker.start()
    worker.submit([job(note := Notes())])
    assert "the engine has failed" in str(note.wait().error)
    wait_for(lambda: not worker.is_alive)
    with pytest.raises(Unavailable, match="the engine has failed"):
        worker.submit([job(Notes())])
    assert "SystemExit" in caplog.text
