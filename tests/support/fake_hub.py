"""A hub on loopback: repositories in memory, and faults on order."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """`repos` maps owner/name to files. `faults[file]` are answers that come first, one each: a
    status, "drop" (the connection closes half way), "refuse" (it closes at once), "whole" (the
    range asked for is ignored).

    `sent` counts the bytes of each file, `asked` the requests that wanted its bytes.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.faults: defaultdict[str, list[int | str]] = defaultdict(list)
        self.sent: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self.tokens: set[str | None] = set()
        self.private: set[str] = set()
        self.endpoint = ""


@contextmanager
def serving() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    state: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(False)

    def do_GET(self) -> None:
        self._answer(True)

    def _answer(self, with_body: bool) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        token = self.headers.get("authorization")
        self.state.tokens.add(token)
        is_api = parts[:2] == ["api", "models"]
        owner, name, *rest = parts[2:] if is_api else parts
        repo, revision = f"{owner}/{name}", rest[1] if len(rest) > 1 else "main"
        file = "" if is_api else "/".join(rest[2:])
        fault = self._fault(file, with_body or is_api)
        if isinstance(fault, int):
            return self._fail(fault)
        if fault == "refuse":
            self.close_connection = True
            return None
        if repo not in self.state.repos or (repo in self.state.private and not token):
            return self._fail(401, "RepoNotFound")
        if revision not in ("main", "v1", COMMIT):
            return self._fail(404, "RevisionNotFound")
        files = self.state.repos[repo]
        if is_api:
            tree = [
                {
                    "type": "file",
                    "path": f,
                    "size": len(body),
                    "oid": hashlib.sha1(body).hexdigest(),
                }
                for f, body in files.items()
            ]
            return self._send(json.dumps(tree).encode())
        if file not in files:
            return self._fail(404, "EntryNotFound")
        if fault == "whole":
            del self.headers["range"]
        return self._file(file, files[file], with_body, fault == "drop")

    def _fault(self, file: str, counts: bool) -> int | str | None:
        faults = self.state.faults[file]
        if not counts and faults and isinstance(faults[0], str):
            return None  # broken transfers are for those that want bytes
        return faults.pop(0) if faults else None

    def _fail(self, status: int, code: str = "") -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, file: str, body: bytes, with_body: bool, drop: bool) -> None:
        begin, end = 0, len(body)
        wanted = self.headers.get("range")
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last) + 1, end) if last else end
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(body)}")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        if with_body:
            part = body[begin : begin + (end - begin) // 2] if drop else body[begin:end]
            self.wfile.write(part)
            self.state.sent[file] += len(part)
            self.state.asked[file] += 1
            self.close_connection = drop
