"""How long a connection may take to say what it wants.

uvicorn closes connections that are idle between two requests, and waits for ever for the first one,
and for the rest of each that has begun. A body's time is limited where it is read (`access`).
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from gguf_mtp.server.error_responses import Problem, respond

__all__ = ["HeaderTimeoutProtocol"]


class HeaderTimeoutProtocol(H11Protocol):
    """Closes a connection when a request's header is not whole `LIMIT_S` seconds after the
    connection was made, or after the first byte of a later request came. The same holds for the
    rest of a request that was answered before it was whole: nobody reads it.

    It inherits because a class is what uvicorn lets itself be given here (`Config(http=)`). It
    looks at nothing but h11's states, in which it is the client's turn: IDLE before a request, and
    DONE when the response was quicker than the request.
    """

    LIMIT_S = 30.0

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def _watch(self) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.DONE):
            self._forget()
        elif self._deadline is None:  # more bytes give no more time
            self._deadline = self.loop.call_later(self.LIMIT_S, self._give_up)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        if self.transport.is_closing():
            return
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            self._say_why()
        self.transport.close()

    def _say_why(self) -> None:
        said = f"the request header did not arrive within {self.LIMIT_S:g} s"
        answer = respond(Problem(408, said, headers={"Connection": "close"}))
        for event in (
            h11.Response(status_code=408, headers=answer.raw_headers, reason=b"Request Timeout"),
            h11.Data(data=bytes(answer.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
