"""One thread that owns the engine, and a bounded queue in front of it.

Requests come from any thread; what happens to them is told to their `Receiver` on the worker's own.
Between two rounds, so also between two pieces of a prompt, requests are taken in and cancelled.
Knows no text and no HTTP.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gguf_mtp.errors import DecodeError, GgufMtpError, RequestError, Unavailable
from gguf_mtp.params import PLAIN, RequestOptions, SamplingParams
from gguf_mtp.stats import Stats
from gguf_mtp.types import Chunk

log = logging.getLogger(__name__)

__all__ = ["AnswerJob", "EngineLike", "EngineThread", "Receiver", "Ticket"]


class EngineLike(Protocol):
    """What the worker needs of an `engine.Engine`."""

    @property
    def is_idle(self) -> bool: ...
    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        max_tokens: int,
        options: RequestOptions = ...,
    ) -> int: ...
    def step(self) -> list[Chunk]: ...
    def cancel(self, id_: int) -> Chunk | None: ...


class Receiver(Protocol):
    """Who asked. Called on the worker's thread, so it must not block.

    `receive` gets every chunk of the answer and says whether it wants more; after False it still
    gets the last one, "cancelled". `fail` comes instead of a last chunk.
    """

    def receive(self, chunk: Chunk) -> bool: ...
    def fail(self, error: Exception) -> None: ...


@dataclass(frozen=True, slots=True)
class AnswerJob:
    """One answer to make; the fields are those of `Engine.submit`."""

    receiver: Receiver
    prompt: Sequence[int]
    params: SamplingParams
    max_tokens: int
    options: RequestOptions = PLAIN


@dataclass(eq=False, slots=True)
class Ticket:
    """A job's place. Only the worker's thread changes it.

    `id` is the engine's, 0 while it has none. `followers` have the same prompt and wait until it
    is read, to copy it.
    """

    job: AnswerJob
    id: int = 0
    is_over: bool = False
    followers: list[Ticket] = field(default_factory=list)


class EngineThread:
    """Runs jobs on `engine`, of which at most `n_slots + n_queue` may be unfinished."""

    def __init__(self, engine: EngineLike, n_slots: int, n_queue: int) -> None:
        self._engine = engine
        self._n_slots, self._n_room = n_slots, n_slots + n_queue
        self._changed = threading.Condition()
        self._inbox: list[Ticket] = []  # these three under the lock
        self._cancelled: list[Ticket] = []
        self._n_unfinished = 0
        self._stop_reason: str | None = None
        self._running: dict[int, Ticket] = {}
        self._has_failed = False  # the last step
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def n_unfinished(self) -> int:
        """Jobs that run or wait."""
        return self._n_unfinished

    @property
    def n_running(self) -> int:
        """Of those, the ones that have a slot."""
        return min(self._n_unfinished, self._n_slots)

    def start(self) -> None:
        self._thread.start()

    def submit(self, jobs: Sequence[AnswerJob]) -> list[Ticket]:
        """Queues all of `jobs` or none. Those with the same prompt object read it once.

        Raises `Unavailable` when the queue is full, or the worker has stopped; `RequestError` for
        more jobs than there will ever be room for.
        """
        if len(jobs) > self._n_room:
            raise RequestError(
                f"the request asks for {len(jobs)} answers, but this server takes at most "
                f"{self._n_room}"
            )
        tickets = [Ticket(job) for job in jobs]
        with self._changed:
            if not self.is_alive or self._stop_reason:
                raise Unavailable(self._stop_reason or "the engine has stopped")
            if self._n_unfinished + len(jobs) > self._n_room:
                raise Unavailable(
                    f"the server is busy: {self._n_unfinished} of at most {self._n_room} answers "
                    "are running or waiting"
                )
            self._n_unfinished += len(jobs)
            self._inbox += _leaders(tickets)
            self._changed.notify()
        return tickets

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """Ends jobs early, wherever they are; those that are over stay as they are."""
        with self._changed:
            self._cancelled += tickets
            self._changed.notify()

    def stop(self, reason: str, timeout: float) -> bool:
        """Fails what is unfinished with `reason`; whether the thread ended within `timeout` s."""
        with self._changed:
            self._stop_reason = self._stop_reason or reason
            self._changed.notify()
        self._thread.join(timeout)
        return not self.is_alive

    # -- on the worker's thread ----------------------------------------------------------------

    def _run(self) -> None:
        reason: str | None = None
        try:
            while (reason := self._take_in()) is None:
                self._step()
        except BaseException:
            log.exception("the engine's thread failed")
        with self._changed:
            self._stop_reason = self._stop_reason or reason or "the engine has failed"
            leaders = [*self._running.values(), *self._inbox]
        for leader in leaders:
            followers, leader.followers = leader.followers, []
            for ticket in (leader, *followers):
                if not ticket.is_over:
                    self._fail(ticket, Unavailable(self._stop_reason))

    def _take_in(self) -> str | None:
        """Waits for work and takes it; a reason once there will be none."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._inbox or self._cancelled or self._stop_reason or not self._engine.is_idle
                )
            )
            if self._stop_reason:
                return self._stop_reason
            inbox, self._inbox = self._inbox, []
            cancelled, self._cancelled = self._cancelled, []
        for ticket in inbox:
            self._begin(ticket)
        for ticket in cancelled:
            self._cancel(ticket)
        return None

    def _begin(self, ticket: Ticket) -> None:
        if ticket.is_over:
            return
        job = ticket.job
        try:
            ticket.id = self._engine.submit(job.prompt, job.params, job.max_tokens, job.options)
        except GgufMtpError as error:
            self._fail(ticket, error)
        else:
            self._running[ticket.id] = ticket

    def _step(self) -> None:
        try:
            chunks = self._engine.step()
        except DecodeError as error:
            self._give_up_one(error)
            return
        except Exception:
            # Not foreseen, so nobody knows in whose request it was; the engine stays usable, as a
            # slot is cut back to what is certain when the next request takes it.
            log.exception("a decoding round failed; its requests are aborted")
            for ticket in list(self._running.values())[: self._n_slots]:
                self._give_up(ticket, GgufMtpError("the request failed inside the server"))
            return
        self._has_failed = False
        for chunk in chunks:
            if chunk.seq in self._running:
                self._deliver(self._running[chunk.seq], chunk)

    def _give_up_one(self, error: DecodeError) -> None:
        """After a failed decode nothing has moved: try again, then without the newest request, so
        that the others go on."""
        log.warning("%s", error)
        if not self._has_failed:
            self._has_failed = True
            return
        in_slots = sorted(self._running)[: self._n_slots]  # the engine admits them in this order
        self._give_up(self._running[in_slots[-1]], error)

    def _deliver(self, ticket: Ticket, chunk: Chunk) -> None:
        if chunk.error is not None:
            log.error("request %d failed: %s", ticket.id, chunk.error)
            if chunk.tokens:
                sound = chunk._replace(finish_reason=None, error=None)
                ticket.job.receiver.receive(sound)
            self._fail(ticket, chunk.error)
            return
        if chunk.finish_reason:  # before the client knows, who may look at /metrics next
            self._end(ticket)
        try:
            wants_more = ticket.job.receiver.receive(chunk)
        except Exception as error:
            log.exception("an answer could not be delivered")
            self._give_up(ticket, error)
            return
        if chunk.tokens or chunk.finish_reason:
            self._lead(ticket)
        if not chunk.finish_reason and not wants_more:
            self._cancel(ticket)

    def _cancel(self, ticket: Ticket) -> None:
        if ticket.is_over:
            return
        last = self._engine.cancel(ticket.id) if ticket.id else None
        self._deliver(ticket, last or Chunk(ticket.id, [], 0, "cancelled", Stats()))

    def _give_up(self, ticket: Ticket, error: Exception) -> None:
        self._engine.cancel(ticket.id)
        self._fail(ticket, error)

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        self._end(ticket)
        try:
            ticket.job.receiver.fail(error)
        except Exception:
            log.exception("an error could not be delivered")
        self._lead(ticket)

    def _end(self, ticket: Ticket) -> None:
        if ticket.is_over:
            return
        ticket.is_over = True
        self._running.pop(ticket.id, None)
        with self._changed:
            self._n_unfinished -= 1

    def _lead(self, ticket: Ticket) -> None:
        """The ticket's prompt is read, or never will be: those that waited for it begin."""
        followers, ticket.followers = ticket.followers, []
        for follower in followers:
            self._begin(follower)


def _leaders(tickets: Sequence[Ticket]) -> list[Ticket]:
    """The first ticket of each prompt; the others become its followers."""
    leaders: list[Ticket] = []
    for ticket in tickets:
        for leader in leaders:
            if leader.job.prompt is ticket.job.prompt:
                leader.followers.append(ticket)
                break
        else:
            leaders.append(ticket)
    return leaders
