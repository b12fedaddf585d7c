"""The web page at `/`: a few files of this package, sent with a policy that lets nothing else in.

The page needs no key to be loaded, for a browser cannot send one with an address; what it asks the
server for does. Knows nothing of models.
"""

from __future__ import annotations

from importlib import resources

from fastapi import FastAPI
from fastapi.responses import Response

__all__ = ["add_page", "is_page"]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


def is_page(path: str) -> bool:
    """Whether `path` belongs to the page itself."""
    return path == "/" or path.startswith("/web/")


def add_page(app: FastAPI) -> None:
    """Makes `app` answer the page's paths."""
    for file in resources.files("gguf_mtp.server").joinpath("web").iterdir():
        _, dot, ending = file.name.rpartition(".")
        kind = _TYPES.get(dot + ending)
        if kind:
            path = "/" if file.name == "index.html" else f"/web/{file.name}"
            _add_file(app, path, file.read_bytes(), kind)


def _add_file(app: FastAPI, path: str, content: bytes, kind: str) -> None:
    @app.api_route(path, methods=["GET", "HEAD"])
    async def file() -> Response:
        return Response(content, media_type=kind, headers=HEADERS)
