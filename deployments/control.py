"""Control routes: what administrators may do. Thin; what an order means is `runtime.control`'s."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from deployments.asgi import JsonResponse, check_media_type, ignored_header, read_body
from overlap_serve.openai.control import AbortBody, B, FlushRequest, Nothing, PauseRequest, parse_control
from overlap_serve.openai.fields import JsonObject
from overlap_serve.runtime.frontend import Frontend

CONTROL_PATHS = ("/v1/abort", "/flush_cache", "/pause", "/resume", "/start_profile", "/stop_profile")
CONTROL_BODIES: tuple[type[JsonObject], ...] = (AbortBody, FlushRequest, PauseRequest)
CONTROL_BODY_BYTES = 64 * 1024


class ControlRoutes:
    """The handlers. All need an admin key as soon as any key is configured (`asgi.Keys`)."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._control = frontend.control

    async def abort(self, request: Request) -> Response:
        """Abort requests, wherever they run: `{"request_id": "..."}`, or `{"all": true}`. Needs an admin key if there are keys."""
        body, headers = await self._read(request, AbortBody, required=True)
        return JsonResponse({"aborted": await self._frontend.abort_everywhere(body.label)}, headers=headers)

    async def flush(self, request: Request) -> Response:
        """Drop the prefix caches of all schedulers. 409 while requests are open, unless `{"force": true}` ends them first."""
        body, headers = await self._read(request, FlushRequest)
        return JsonResponse(await self._control.flush(body.force), headers=headers)

    async def pause(self, request: Request) -> Response:
        """Refuse new requests with 503 until /resume; open ones go on, or end with `{"abort": true}`. Idempotent."""
        body, headers = await self._read(request, PauseRequest)
        return JsonResponse(await self._control.pause(body.abort), headers=headers)

    async def resume(self, request: Request) -> Response:
        """Take requests again. Idempotent."""
        return await self._without_fields(request, self._control.resume)

    async def start_profile(self, request: Request) -> Response:
        """Record what the engines do, until /stop_profile or for `limit_s` seconds."""
        return await self._without_fields(request, self._control.start_profile)

    async def stop_profile(self, request: Request) -> Response:
        """End the recording; names of the files below `profile_dir` on the schedulers' nodes."""
        return await self._without_fields(request, self._control.stop_profile)

    async def _without_fields(self, request: Request, act: Callable[[], Awaitable[dict[str, object]]]) -> Response:
        _, headers = await self._read(request, Nothing)
        return JsonResponse(await act(), headers=headers)

    async def _read(self, request: Request, kind: type[B], *, required: bool = False) -> tuple[B, Mapping[str, str]]:
        """The body, which may be left out altogether unless it is required, and the headers that report its other fields."""
        data = await read_body(request, CONTROL_BODY_BYTES)
        if data or required:
            check_media_type(request)
        body, ignored = parse_control(kind, data, self._frontend.config)
        return body, ignored_header(ignored)


def add_control_routes(app: FastAPI, frontend: Frontend, schema_of: Callable[..., dict[str, Any]]) -> None:
    """schema_of: the part of the schema that describes a body."""
    routes = ControlRoutes(frontend)
    abort, flush, pause = schema_of(AbortBody), schema_of(FlushRequest), schema_of(PauseRequest)
    app.add_api_route("/v1/abort", routes.abort, methods=["POST"], openapi_extra=abort)
    app.add_api_route("/flush_cache", routes.flush, methods=["POST"], openapi_extra=flush)
    app.add_api_route("/pause", routes.pause, methods=["POST"], openapi_extra=pause)
    app.add_api_route("/resume", routes.resume, methods=["POST"])
    app.add_api_route("/start_profile", routes.start_profile, methods=["POST"])
    app.add_api_route("/stop_profile", routes.stop_profile, methods=["POST"])
