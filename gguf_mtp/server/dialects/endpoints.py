"""The addresses of the other dialects, and one way through all of them: body, chat request, plan,
exchange, answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool

from gguf_mtp.errors import RequestError
from gguf_mtp.server.access_log import entry_of
from gguf_mtp.server.dialects import (
    anthropic_answer,
    anthropic_request,
    ollama_answer,
    ollama_request,
    responses_request,
)
from gguf_mtp.server.dialects.anthropic_request import CountTokens, MessagesRequest
from gguf_mtp.server.dialects.exchange import DialectAnswer, dialect_stream
from gguf_mtp.server.dialects.ollama_request import OllamaChat, OllamaGenerate
from gguf_mtp.server.dialects.responses_answer import ResponsesAnswer
from gguf_mtp.server.dialects.responses_request import ResponsesRequest
from gguf_mtp.server.dialects.stored import ResponseStore
from gguf_mtp.server.engine_thread import EngineThread
from gguf_mtp.server.error_responses import Problem, Shape, problem_of, respond
from gguf_mtp.server.plan import AnswerPlan, Served, plan_chat, plan_completion
from gguf_mtp.server.schemas import ChatRequest
from gguf_mtp.server.stream import RequestStream, collect_unless_gone

__all__ = ["add_dialects", "error_shape"]

Translated = tuple[AnswerPlan, DialectAnswer]


@dataclass(frozen=True, slots=True)
class _Dialects:
    worker: EngineThread
    served: Served
    comment_s: float
    stored: ResponseStore

    def messages(self, body: MessagesRequest) -> Translated:
        plan = plan_chat(self.served, anthropic_request.chat_request(body))
        return plan, anthropic_answer.AnthropicAnswer(plan, self.served.name)

    def responses(self, body: ResponsesRequest) -> Translated:
        before = self.stored.find(body.previous_response_id) if body.previous_response_id else None
        messages = [*(before.messages if before else ()), *responses_request.input_messages(body)]
        plan = plan_chat(self.served, responses_request.chat_request(body, messages))

        def keep(response: Mapping[str, Any]) -> None:
            if body.store is not False:
                said = responses_request.messages_of(response["output"], "output")
                self.stored.add(response, [*messages, *said])

        return plan, ResponsesAnswer(plan, self.served.name, int(time.time()), body, keep)

    def ollama_chat(self, body: OllamaChat) -> Translated:
        plan = plan_chat(self.served, ollama_request.chat_request(body))
        return plan, self._ollama(plan, is_chat=True)

    def ollama_generate(self, body: OllamaGenerate) -> Translated:
        asked = ollama_request.generate_request(body)
        if isinstance(asked, ChatRequest):
            plan = plan_chat(self.served, asked)
        else:
            plan = plan_completion(self.served, asked)
        return plan, self._ollama(plan, is_chat=False)

    def _ollama(self, plan: AnswerPlan, is_chat: bool) -> ollama_answer.OllamaAnswer:
        return ollama_answer.OllamaAnswer(len(plan.prompts[0]), self.served.name, is_chat)

    async def answer(self, request: Request, translate: Callable[[], Translated]) -> Response:
        """Translating tokenises, so it runs in a thread."""
        try:
            plan, answer = await run_in_threadpool(translate)
            entry = entry_of(request.scope)
            entry.name(answer.id)
            exchange = RequestStream(self.worker, plan, entry)
        except Exception as error:
            return _refusal(request, error)
        if plan.stream:
            return StreamingResponse(
                dialect_stream(exchange, answer, self.comment_s),
                headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
                media_type=answer.media_type,
                background=BackgroundTask(exchange.close),  # runs when the client leaves, too
            )
        try:
            with exchange:
                choices = await collect_unless_gone(exchange, request)
        except Exception as error:
            return _refusal(request, error)
        return JSONResponse(answer.whole(choices[0])) if choices else Response(status_code=499)

    async def count(self, request: Request, translate: Callable[[], ChatRequest]) -> int | Response:
        """How many tokens the prompt of a chat request has."""
        try:
            plan = await run_in_threadpool(lambda: plan_chat(self.served, translate()))
        except Exception as error:
            return _refusal(request, error)
        return len(plan.prompts[0])


def error_shape(path: str) -> Shape:
    """How errors look at a path."""
    if path.startswith("/api/"):
        return ollama_answer.error_body
    return anthropic_answer.error_body if path.startswith("/v1/messages") else Problem.body


def _refusal(request: Request, error: Exception) -> Response:
    problem = problem_of(error)
    entry_of(request.scope).fail(problem.message)
    return respond(problem, error_shape(request.url.path))


def add_dialects(app: FastAPI, worker: EngineThread, served: Served, comment_s: float) -> None:
    """Makes `app` answer Anthropic's Messages, OpenAI's Responses, and Ollama's clients."""
    dialects = _Dialects(worker, served, comment_s, ResponseStore())
    _add_messages(app, dialects)
    _add_responses(app, dialects)
    _add_ollama(app, dialects)


def _add_messages(app: FastAPI, dialects: _Dialects) -> None:
    @app.post("/v1/messages")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        return await dialects.answer(request, lambda: dialects.messages(body))

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokens, request: Request) -> Response:
        n = await dialects.count(request, lambda: anthropic_request.chat_request(body))
        return n if isinstance(n, Response) else JSONResponse({"input_tokens": n})


def _add_responses(app: FastAPI, dialects: _Dialects) -> None:
    @app.post("/responses")
    @app.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        return await dialects.answer(request, lambda: dialects.responses(body))

    @app.post("/v1/chat/completions/input_tokens")
    async def input_tokens(body: ChatRequest, request: Request) -> Response:
        n = await dialects.count(request, lambda: body)
        return n if isinstance(n, Response) else JSONResponse({"input_tokens": n})

    @app.get("/v1/responses/{id_}")
    async def one_response(id_: str) -> Response:
        try:
            return JSONResponse(dialects.stored.find(id_).response)
        except RequestError as error:
            return respond(Problem(404, str(error)))

    @app.delete("/v1/responses/{id_}")
    async def delete(id_: str) -> Response:
        try:
            dialects.stored.delete(id_)
        except RequestError as error:
            return respond(Problem(404, str(error)))
        return JSONResponse({"id": id_, "object": "response.deleted", "deleted": True})


def _add_ollama(app: FastAPI, dialects: _Dialects) -> None:
    name = dialects.served.name
    model = {"name": name, "model": name, "details": {"format": "gguf"}}
    model["modified_at"] = ollama_answer.moment(dialects.served.created)

    @app.post("/api/chat")
    async def chat(body: OllamaChat, request: Request) -> Response:
        if not body.messages:
            return JSONResponse(ollama_answer.loaded(name, is_chat=True))
        return await dialects.answer(request, lambda: dialects.ollama_chat(body))

    @app.post("/api/generate")
    async def generate(body: OllamaGenerate, request: Request) -> Response:
        if not body.prompt:
            return JSONResponse(ollama_answer.loaded(name, is_chat=False))
        return await dialects.answer(request, lambda: dialects.ollama_generate(body))

    @app.get("/api/tags")
    @app.get("/api/ps")
    async def tags() -> dict[str, Any]:
        return {"models": [model]}

    @app.post("/api/show")
    async def show() -> dict[str, Any]:
        served = dialects.served
        can = ["completion", "tools", *(["thinking"] if served.model.template.can_think else [])]
        length = {"general.architecture": served.architecture or "unknown"}
        return {
            "details": model["details"],
            "modified_at": model["modified_at"],
            "capabilities": can,
            "model_info": length
            | {f"{length['general.architecture']}.context_length": served.model.limits.n_ctx},
        }

    @app.get("/api/version")
    async def version_() -> dict[str, str]:
        return {"version": version("gguf-mtp")}
