"""The HTTP side: OpenAI's endpoints over a worker, and those of other dialects.

Blocking work (templates, tokenising) runs in threads; the engine is the worker's alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from gguf_mtp.answers.detokenizer import Detokenizer
from gguf_mtp.server import error_responses
from gguf_mtp.server.access import Access, AccessGuard
from gguf_mtp.server.access_log import AccessLog, Write, entry_of
from gguf_mtp.server.dialects.endpoints import add_dialects, error_shape
from gguf_mtp.server.engine_thread import EngineThread
from gguf_mtp.server.envelope import Envelope
from gguf_mtp.server.error_responses import Problem, problem_of, respond
from gguf_mtp.server.page import add_page
from gguf_mtp.server.plan import AnswerPlan, Served, check_ids, plan_chat, plan_completion
from gguf_mtp.server.responses import Responses
from gguf_mtp.server.schemas import ChatRequest, CompletionRequest, Detokenize, Tokenize
from gguf_mtp.server.stream import RequestStream, collect_unless_gone, stream
from gguf_mtp.telemetry.metrics import CONTENT_TYPE, Metrics, Now

__all__ = ["ServerOptions", "create_app"]

NOT_HERE = ("embeddings", "images/generations", "audio/speech", "moderations")
"""Endpoints of OpenAI's that clients know and this server will not answer. Not 501: clients try
that again."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """`comment_s`: a comment goes into a stream that was silent for so many seconds; 0: never.
    `metrics` should watch the worker's engine; `write` gets a record of every request, and
    `n_lost_lines` says how many records were lost."""

    access: Access = field(default_factory=Access)
    comment_s: float = 10.0
    metrics: Metrics = field(default_factory=Metrics)
    write: Write = lambda _: None
    n_lost_lines: Callable[[], int] = lambda: 0


def create_app(worker: EngineThread, served: Served, options: ServerOptions) -> ASGIApp:
    """An ASGI application; `worker` runs, and is the caller's to stop."""
    app = FastAPI(title="gguf-mtp", docs_url=None, redoc_url=None, openapi_url=None)
    error_responses.install(app, error_shape)
    _add_answers(app, worker, served, options)
    add_dialects(app, worker, served, options.comment_s)
    _add_facts(app, worker, served)
    _add_metrics(app, worker, served, options)
    add_page(app)
    guarded: ASGIApp = AccessGuard(app, options.access)
    if options.access.origins:
        guarded = CORSMiddleware(
            guarded, options.access.origins, allow_methods=("*",), allow_headers=("*",)
        )
    return AccessLog(Envelope(guarded), options.metrics, options.write)


def _add_answers(
    app: FastAPI, worker: EngineThread, served: Served, options: ServerOptions
) -> None:
    @app.post("/chat/completions")
    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await answer(lambda: plan_chat(served, body), request)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await answer(lambda: plan_completion(served, body), request)

    async def answer(make_plan: Callable[[], AnswerPlan], request: Request) -> Response:
        try:
            return await _answer(await run_in_threadpool(make_plan), request)
        except Exception as error:
            problem = problem_of(error)
            entry_of(request.scope).fail(problem.message)
            return respond(problem)

    async def _answer(plan: AnswerPlan, request: Request) -> Response:
        shapes = Responses(plan, served.name, int(time.time()))
        entry = entry_of(request.scope)
        entry.name(shapes.id)
        exchange = RequestStream(worker, plan, entry)
        if plan.stream:
            events = stream(exchange, plan, shapes, options.comment_s)
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return StreamingResponse(
                events,
                headers=headers,
                media_type="text/event-stream",
                background=BackgroundTask(exchange.close),  # runs when the client leaves, too
            )
        with exchange:
            choices = await collect_unless_gone(exchange, request)
        return JSONResponse(shapes.whole(choices)) if choices else Response(status_code=499)


def _add_metrics(
    app: FastAPI, worker: EngineThread, served: Served, options: ServerOptions
) -> None:
    @app.get("/metrics")
    def metrics() -> Response:
        now = Now(
            n_running=worker.n_running,
            n_waiting=worker.n_unfinished - worker.n_running,
            n_cells=served.model.limits.n_ctx * served.model.limits.n_seq,
            n_lost_lines=options.n_lost_lines(),
        )
        return Response(options.metrics.text(now), media_type=CONTENT_TYPE)


def _add_facts(app: FastAPI, worker: EngineThread, served: Served) -> None:
    model = {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "gguf-mtp",
        "max_model_len": served.model.limits.n_ctx,
    }

    @app.get("/health")
    async def health() -> Response:
        if not worker.is_alive:
            return respond(Problem(503, "the engine has stopped", code="unavailable"))
        return JSONResponse({"status": "ok", "unfinished": worker.n_unfinished})

    @app.get("/models")
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        if name != served.name:
            message = f"this server has no model {name!r}"
            return respond(Problem(404, message, code="model_not_found"))
        return JSONResponse(model)

    @app.post("/tokenize")
    def tokenize(body: Tokenize) -> dict[str, Any]:
        parse_special = body.parse_special is not False
        tokens = served.model.vocab.tokenize(body.content, bool(body.add_special), parse_special)
        return {"tokens": tokens}

    @app.post("/detokenize")
    def detokenize(body: Detokenize) -> dict[str, Any]:
        check_ids(served, body.tokens)
        detokenizer = Detokenizer(served.model.vocab.piece)
        return {"content": detokenizer.add(body.tokens) + detokenizer.finish()}

    async def not_here(request: Request) -> Response:
        return respond(Problem(404, f"this server has no {request.url.path}"))

    for name in NOT_HERE:
        app.add_api_route(f"/v1/{name}", not_here, methods=["GET", "POST"])
