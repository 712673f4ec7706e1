"""The HTTP API around a `Frontend`: thin routes. What a request means is decided below; here it gets its status line.

No Ray. `build_http_app` is called inside the ingress replica, and by tests.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.responses import Response

from deployments.asgi import (
    CLIENT_CLOSED,
    ClientGone,
    EventStream,
    Gate,
    JsonResponse,
    Keys,
    check_media_type,
    disconnected,
    error_response,
    ignored_header,
    read_body,
    request_id,
    set_request_id,
    until,
)
from deployments.control import CONTROL_BODIES, CONTROL_PATHS, add_control_routes
from overlap_serve import __version__
from overlap_serve.config import ServeConfig
from overlap_serve.errors import (
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    RequestError,
)
from overlap_serve.openai.fields import JsonObject
from overlap_serve.openai.protocol import ChatRequest, CompletionRequest, parse_timeout_ms
from overlap_serve.openai.tokenization import DetokenizeRequest, TokenizeChat, TokenizeText
from overlap_serve.runtime.frontend import Call, Frontend
from overlap_serve.runtime.prepare import Answered, Body
from overlap_serve.runtime.reply import Reply

HEALTH_PATHS = ("/health", "/health/ready", "/health/live", "/health/startup")
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Kind = Literal["chat", "completion"]
SCHEMA_REF = "#/components/schemas/{model}"
BODIES: tuple[type[JsonObject], ...] = (
    ChatRequest,
    CompletionRequest,
    TokenizeText,
    TokenizeChat,
    DetokenizeRequest,
    *CONTROL_BODIES,
)


def build_http_app(frontend: Frontend, *, host_labels: bool = False) -> FastAPI:
    """All routes of this server (docs/http.md) around a started frontend. host_labels: see `asgi.Gate`."""
    app = _Api(
        title="overlap_serve",
        version=__version__,
        description="An LLM inference server with an OpenAI-compatible API.",
        redirect_slashes=False,
    )
    routes = _Routes(frontend)
    app.add_api_route("/v1/chat/completions", routes.chat, methods=["POST"], openapi_extra=_body_of(ChatRequest))
    app.add_api_route("/v1/completions", routes.completion, methods=["POST"], openapi_extra=_body_of(CompletionRequest))
    app.add_api_route("/v1/models", routes.models, methods=["GET"])
    app.add_api_route("/v1/models/{model:path}", routes.model, methods=["GET"])
    for prefix in ("/v1", ""):
        app.add_api_route(
            f"{prefix}/tokenize", routes.tokenize, methods=["POST"], openapi_extra=_body_of(TokenizeText, TokenizeChat)
        )
        app.add_api_route(
            f"{prefix}/detokenize", routes.detokenize, methods=["POST"], openapi_extra=_body_of(DetokenizeRequest)
        )
    app.add_api_route("/v1/embeddings", routes.embeddings, methods=["POST"])
    add_control_routes(app, frontend, _body_of)
    for path in HEALTH_PATHS:
        handler = {"/health/live": routes.live, "/health/startup": routes.startup}.get(path, routes.ready)
        app.add_api_route(path, handler, methods=["GET", "HEAD"], include_in_schema=False)
        app.add_api_route(path, handler, methods=["GET"])  # for the schema only: one route, one operation
    app.add_api_route("/health/generate", routes.generate, methods=["GET", "HEAD"], include_in_schema=False)
    app.add_api_route("/version", routes.version, methods=["GET"])
    app.add_api_route("/load", routes.load, methods=["GET"])
    app.add_api_route("/metrics", routes.metrics, methods=["GET"])
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, functools.partial(_on_http_exception, frontend))
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_middleware(Gate, keys=_keys(frontend.config), refused=frontend.reject, host_labels=host_labels)
    return app


def _keys(config: ServeConfig) -> Keys:
    open_paths = HEALTH_PATHS if config.protect_metrics else (*HEALTH_PATHS, "/metrics", "/version")
    return Keys(config.api_keys, config.admin_api_keys, open_paths, CONTROL_PATHS)


class _Routes:
    """The handlers; each waits for the frontend and for nothing else."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._config = frontend.config

    async def chat(self, request: Request) -> Response:
        """Chat completion, streamed or not."""
        return await self._generate(request, "chat")

    async def completion(self, request: Request) -> Response:
        """Text completion, streamed or not."""
        return await self._generate(request, "completion")

    async def models(self) -> Response:
        """The models of this server; also while they load."""
        return JsonResponse(self._frontend.models())

    async def model(self, model: str) -> Response:
        """One model; its name may hold slashes."""
        return JsonResponse(self._frontend.model(model))

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a prompt, of several, or of messages, as a generation would use them."""
        return _answered(await self._frontend.tokenize(await self._body(request, self._config.max_body_bytes)))

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids."""
        return _answered(await self._frontend.detokenize(await self._body(request, self._config.max_body_bytes)))

    async def embeddings(self, request: Request) -> Response:
        """Always refused: the model generates."""
        self._frontend.embed(await self._body(request, self._config.max_body_bytes))

    async def ready(self) -> Response:
        """200 while this server would take a request."""
        return _health(*self._frontend.health_ready())

    async def live(self) -> Response:
        """200 while this process works; for restart decisions."""
        return _health(*self._frontend.health_live())

    async def startup(self) -> Response:
        """200 once this server has been ready."""
        return _health(*self._frontend.health_startup())

    async def generate(self) -> Response:
        """200 when the engine makes a token in time."""
        return _health(*await self._frontend.health_generate())

    async def load(self) -> Response:
        """How busy the engines are."""
        return JsonResponse(self._frontend.load(), headers={"cache-control": "no-store"})

    async def version(self) -> Response:
        """Version of the server."""
        return JsonResponse({"version": __version__, "commit": None})

    async def metrics(self) -> Response:
        """Prometheus metrics of the whole application."""
        return Response(await self._frontend.metrics(), headers={"content-type": METRICS_TYPE})

    async def _generate(self, request: Request, kind: Kind) -> Response:
        started: list[Reply] = []
        try:
            call, body = await self._read(request, kind)
            return await until(self._respond(request, body, call, started), disconnected(request.receive))
        except BaseException:
            for reply in started:
                reply.close()
            raise

    async def _read(self, request: Request, kind: Kind) -> tuple[Call, Body]:
        try:
            timeout = request.headers.get("x-request-timeout-ms")
            timeout_s = None if timeout is None else parse_timeout_ms(timeout, self._config)
            data = await self._body(request, self._config.max_body_bytes)
        except RequestError as error:
            self._frontend.reject(error)
            raise
        return Call(request_id(request), timeout_s), Body(kind, data)

    async def _respond(self, request: Request, body: Body, call: Call, started: list[Reply]) -> Response:
        """started: takes the reply as soon as there is one, so that it is closed whatever happens to this coroutine."""
        reply = await self._frontend.submit(body, call)
        started.append(reply)
        set_request_id(request, reply.label)
        await reply.first()
        headers = ignored_header(reply.request.ignored_fields)
        if not reply.request.stream:
            return JsonResponse(await reply.body(), headers=headers)
        events = reply.events(self._config.sse_ping_s)
        return EventStream(events, reply.close, self._config.slow_client_timeout, headers)

    async def _body(self, request: Request, limit: int) -> bytes:
        check_media_type(request)
        return await read_body(request, limit)


def _answered(answered: Answered) -> Response:
    return Response(answered.body, headers=ignored_header(answered.ignored_fields), media_type="application/json")


def _health(status: int, body: Mapping[str, object]) -> Response:
    headers = {"cache-control": "no-store"}
    if status == 503:
        headers["retry-after"] = "1"
    return JsonResponse(body, status, headers)


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


async def _on_http_exception(frontend: Frontend, request: Request, error: Exception) -> Response:
    """What the router found: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    refused: RequestError
    if error.status_code == 404:
        refused, headers = NotFound("there is no such route; /docs lists them", code="unknown_url"), {}
    elif error.status_code == 405:
        methods = next((value for name, value in headers.items() if name.lower() == "allow"), "")
        refused = MethodNotAllowed(f"this route takes {methods}, not {request.method}")
    else:
        refused = InvalidRequest(str(error.detail)) if error.status_code < 500 else InternalError("the server failed")
        refused.http_status = error.status_code
    frontend.reject(refused)
    return error_response(refused, headers)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(InvalidRequest("a parameter in the path or the query is not valid"))


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)


class _Api(FastAPI):
    """Adds the request models to the schema: the routes take raw bodies, because a wrong body has an envelope of its own."""

    def openapi(self) -> dict[str, Any]:
        first = self.openapi_schema is None
        schema = super().openapi()
        if first:
            _, definitions = models_json_schema([(model, "validation") for model in BODIES], ref_template=SCHEMA_REF)
            schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        return schema


def _body_of(*models: type[JsonObject]) -> dict[str, Any]:
    references: list[dict[str, Any]] = [{"$ref": SCHEMA_REF.format(model=model.__name__)} for model in models]
    schema = references[0] if len(references) == 1 else {"anyOf": references}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
