"""Every error as OpenAI's clients expect it: `{"error": {message, type, param, code}}`.

A message never holds more than the request itself and what the server was asked to say: paths,
tracebacks and the messages of foreign exceptions stay in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from gguf_mtp.errors import (
    BadLogits,
    ContextFull,
    GgufMtpError,
    RequestError,
    Unavailable,
    UnknownModel,
)

log = logging.getLogger(__name__)

__all__ = ["Problem", "Shape", "install", "problem_of", "respond"]

RETRY_AFTER_S = 2
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "invalid_request_error",
}


class Problem(NamedTuple):
    """An HTTP status and what is said with it."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = {}

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def problem_of(error: Exception) -> Problem:
    """What is told to a client of `error`; what is not meant for clients is logged."""
    if isinstance(error, ContextFull):
        # OpenAI's own words: clients know an over-long prompt by them.
        n_prompt = f"at least {error.n_prompt}" if error.is_least else error.n_prompt
        message = (
            f"This model's maximum context length is {error.n_ctx} tokens, but the prompt has "
            f"{n_prompt}; shorten it, or start the server with a larger --ctx"
        )
        return Problem(400, message, code="context_length_exceeded")
    if isinstance(error, UnknownModel):
        return Problem(404, str(error), code="model_not_found")
    if isinstance(error, RequestError):
        return Problem(400, str(error))
    if isinstance(error, BadLogits):
        return Problem(500, str(error))
    if isinstance(error, Unavailable):
        retry = {"Retry-After": str(RETRY_AFTER_S)}
        return Problem(503, str(error), code="unavailable", headers=retry)
    if isinstance(error, RequestValidationError | ValidationError):
        return _invalid(error.errors())
    if isinstance(error, HTTPException):
        return Problem(error.status_code, str(error.detail), headers=error.headers or {})
    log.error("a request failed: %s", error, exc_info=error)
    return Problem(500, "the request failed inside the server; see the server log")


Shape = Callable[[Problem], dict[str, Any]]


def respond(problem: Problem, shape: Shape = Problem.body) -> JSONResponse:
    return JSONResponse(shape(problem), problem.status, dict(problem.headers))


WITH_VERSION = ("/completions",)
"""Paths that clients ask for whose base URL lacks `/v1`."""


def install(app: FastAPI, shape_of: Callable[[str], Shape]) -> None:
    """Makes `app` answer every error so, or as `shape_of` says of a path."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        problem, path = problem_of(error), request.url.path
        if problem.status in (404, 405):
            hint = f"; did you mean /v1{path}?" if path in WITH_VERSION else ""
            message = f"there is no {request.method} {path} on this server{hint}"
            problem = problem._replace(message=message)
        return respond(problem, shape_of(path))

    for kind in (RequestValidationError, HTTPException, GgufMtpError, Exception):
        app.add_exception_handler(kind, handle)


def _invalid(errors: Sequence[Any]) -> Problem:
    """The first thing that is wrong with a body, and where."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return Problem(400, f"the body is not JSON: {first['ctx']['error']}")
    param = _field(first["loc"])
    if not param:
        return Problem(400, "the body must be a JSON object")
    return Problem(400, f"{param}: {first['msg']}", param)


def _field(place: Sequence[int | str]) -> str:
    """`messages[0].content`; pydantic also names the branch of a union, which nobody asked for."""
    path = ""
    for part in place:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part.islower() and part not in _NOT_FIELDS:
            path += f".{part}" if path else part
    return path


_NOT_FIELDS = ("body", "str", "int", "float", "bool", "list", "dict")
