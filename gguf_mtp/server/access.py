"""Who may ask, and how much: checked before a request is read.

An ASGI application around the server's own. With a key everything but `/health` and the server's
own page needs it. Without one, other pages in somebody's browser are kept out by their Origin
header, for they can reach a server on loopback that nobody else can; and by the Host header, for
they can make a name of their own point here (DNS rebinding), and are of one origin with it then.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
import socket
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gguf_mtp.errors import RequestError
from gguf_mtp.server.error_responses import Problem, respond
from gguf_mtp.server.page import is_page

__all__ = ["Access", "AccessGuard", "is_private", "origin_of"]


_PRIVATE = (
    ".localhost", ".local", ".internal", ".lan", ".home", ".home.arpa", ".corp", ".test",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Access:
    """`api_key`: None where everybody may ask. `origins`: web pages that may ask from a browser;
    "*" for all. `hosts`: names this server may be called by, beside those that are nobody's on the
    internet; "*" for all. `max_body`: bytes of a request; `body_s`: seconds that its body may take,
    and one more for every `body_rate` bytes of it."""

    api_key: str | None = None
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    max_body: int = 16 << 20
    body_s: float = 60.0
    body_rate: int = 16 << 10

    def __repr__(self) -> str:
        key = "'***'" if self.api_key else None
        return f"Access(api_key={key}, origins={self.origins}, max_body={self.max_body})"


def origin_of(page: str) -> str:
    """The origin of a web page as browsers send it; "*" and "null" as they are.

    Raises `RequestError` for what none would ever send.
    """
    if page in ("*", "null"):
        return page
    try:
        parts = urlsplit(page)
        is_origin = bool(parts.scheme and parts.hostname) and parts.path in ("", "/")
        is_origin = is_origin and (parts.port is None or parts.port >= 0)
    except ValueError:
        is_origin = False
    if not is_origin or parts.query or parts.fragment or "@" in parts.netloc:
        raise RequestError(f"{page!r} is not a web origin, such as http://localhost:3000")
    return f"{parts.scheme}://{parts.netloc.lower()}"


class AccessGuard:
    """`app` for those whom `access` lets in."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access
        self._own_names = {socket.gethostname().lower(), *map(host_name, access.hosts)}
        self._own_names |= {urlsplit(o).hostname or "" for o in access.origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        problem = self._refusal(scope["path"], Headers(scope=scope))
        if problem:
            await respond(problem)(scope, receive, send)
        else:
            await self._app(scope, _limited(receive, self._access), send)

    def _refusal(self, path: str, headers: Headers) -> Problem | None:
        access = self._access
        origin = headers.get("origin")
        if (
            access.api_key is None
            and origin is not None
            and not {origin, "*"} & set(access.origins)
            and not _is_own(origin, headers.get("host", ""))
        ):
            return Problem(
                403, "web pages from this origin are not allowed; --cors-origin allows an origin"
            )
        if access.api_key is None and path != "/health" and not self._is_called_well(headers):
            return Problem(
                403,
                f"this server is not called by the name {headers.get('host', '')!r:.80}; "
                "--allowed-host allows a name",
            )
        is_open = path == "/health" or is_page(path)
        if access.api_key is not None and not is_open and not self._knows_key(headers):
            return Problem(
                401,
                "a valid API key is needed; send it as the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        n_bytes = headers.get("content-length", "")
        if n_bytes.isdigit() and int(n_bytes) > access.max_body:
            return Problem(413, _too_large(access.max_body))
        return None

    def _is_called_well(self, headers: Headers) -> bool:
        host = host_name(headers.get("host", ""))
        if {"*", host} & {*self._access.hosts, *self._access.origins}:
            return True
        return is_private(host) or host in self._own_names

    def _knows_key(self, headers: Headers) -> bool:
        """As OpenAI's clients send it, or as Anthropic's do."""
        given = headers.get("authorization", "").encode("latin-1")  # the bytes that were sent
        scheme, _, key = given.partition(b" ")
        if scheme.lower() != b"bearer":
            key = headers.get("x-api-key", "").encode("latin-1")
        known = os.fsencode(self._access.api_key or "")  # the bytes of the command line
        # In constant time, so that nobody learns the key from how long an answer takes.
        return hmac.compare_digest(key.strip(), known)


def host_name(host: str) -> str:
    """The name in a Host header, in small letters; empty for what is none."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def is_private(host: str) -> bool:
    """Whether a name can be no web page's on the internet: an address, a name without a dot, or one
    below a domain that nobody can register."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return bool(host) and ("." not in host or host.endswith(_PRIVATE))
    return True


def _is_own(origin: str, host: str) -> bool:
    """Whether `origin` is this server, called by an address.

    Under a name it could be any page whose name was made to point here (DNS rebinding): such a one
    needs to be allowed by name.
    """
    if origin not in (f"http://{host}", f"https://{host}"):
        return False
    name = urlsplit(origin).hostname or ""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost"
    return True


def _limited(receive: Receive, access: Access) -> Receive:
    """`receive` that ends the request when its body is too large, or comes too slowly."""
    n_bytes, is_whole = 0, False
    begin: float | None = None

    async def limited() -> Message:
        nonlocal n_bytes, is_whole, begin
        now = time.monotonic()
        begin = now if begin is None else begin
        allowed = access.body_s + n_bytes // access.body_rate
        try:
            # After the body only the client's leaving is waited for, as long as it takes.
            message = await asyncio.wait_for(receive(), None if is_whole else begin + allowed - now)
        except asyncio.TimeoutError:  # in Python 3.10 it is no TimeoutError
            said = f"the rest of the request did not arrive within {allowed:g} s"
            raise HTTPException(408, said, {"Connection": "close"}) from None
        if message["type"] == "http.request":
            n_bytes += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if n_bytes > access.max_body:
                raise HTTPException(413, _too_large(access.max_body))
        return message

    return limited


def _too_large(max_body: int) -> str:
    return f"the request is larger than {max_body} bytes"
