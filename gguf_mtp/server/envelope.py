"""What is around a request and its answer: a body is JSON whatever it calls itself, and an answer
carries the request's id.

`curl -d` names no JSON. That a body's type is not looked at lets no other web page in: `access`
asks where a request comes from.
"""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Envelope"]

_ID = re.compile(r"[!-~]{1,128}")
HEADER = "x-request-id"


class Envelope:
    """An ASGI application around another."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        id_ = given if _ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        if scope["method"] == "POST":
            headers = [pair for pair in scope["headers"] if pair[0] != b"content-type"]
            scope = {**scope, "headers": [*headers, (b"content-type", b"application/json")]}

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault(HEADER, id_)
            await send(message)

        await self._app(scope, receive, named)
