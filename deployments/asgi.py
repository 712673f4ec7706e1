"""Plain ASGI pieces below the routes: envelope and request id of every response, keys, bodies with a limit, disconnects, event streams.

Knows no route and no request field. No BaseHTTPMiddleware: it copies every chunk through a queue (RAY.md B3: 25 -> 69 us per token).
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from overlap_serve.errors import (
    InternalError,
    NotAuthenticated,
    PermissionDenied,
    RequestError,
    RequestTooLarge,
    UnsupportedMediaType,
)
from overlap_serve.openai.protocol import is_request_id

log = logging.getLogger(__name__)

RETRY_S = 1.0
CLIENT_CLOSED = 499  # in logs only: nobody is there to read it

T = TypeVar("T")


class ClientGone(Exception):
    """The client has left, or takes nothing any more; nobody reads what is returned from here on."""


class JsonResponse(Response):
    media_type = "application/json"

    def __init__(self, content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(
            json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")), status, headers
        )


def error_response(error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    """The envelope of http-api section 13, with what clients need for their retries."""
    headers = dict(headers or {})
    if error.http_status in (429, 503):
        headers["retry-after"] = str(math.ceil(error.retry_after_s or RETRY_S))
    if error.should_retry is not None:
        headers["x-should-retry"] = str(error.should_retry).lower()
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    return JsonResponse(error.envelope(), error.http_status, headers)


def request_id(request: Request) -> str:
    """The label of this request; on every response as `x-request-id`."""
    label: str = request.scope["state"]["request_id"]
    return label


def set_request_id(request: Request, label: str) -> None:
    """A better label has been found in the body."""
    request.scope["state"]["request_id"] = label


class Keys:
    """Who may ask what. user: API keys; none: everybody may use the model. admin: keys that may do everything.

    open_paths: what needs no key; everything else does when user keys are configured, so that no new route is open by accident.
    admin_paths: control routes; they need an admin key as soon as any key is configured, so with user keys alone nobody may use
    them. Without any keys all routes are open.
    """

    def __init__(
        self, user: Sequence[str], admin: Sequence[str], open_paths: Collection[str], admin_paths: Collection[str]
    ) -> None:
        self._user = [key.encode() for key in user]
        self._admin = [key.encode() for key in admin]
        self._open_paths = frozenset(open_paths)
        self._admin_paths = frozenset(admin_paths)

    def check(self, path: str, headers: Headers) -> None:
        """Raises NotAuthenticated, PermissionDenied."""
        control = path in self._admin_paths
        needed = self._user or (control and self._admin)
        if not needed or path in self._open_paths:
            return
        given = given_keys(headers)
        is_admin, is_user = matches(self._admin, given), matches(self._user, given)
        if not (is_admin or is_user):
            raise NotAuthenticated("a valid API key is needed: send it as `Authorization: Bearer KEY`")
        if control and not is_admin:
            raise PermissionDenied("this route needs an admin key (`admin_api_keys` of the server's configuration)")


def given_keys(headers: Headers) -> list[bytes]:
    """What the client sent as a key, in any of three headers."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = [headers.get("api-key", ""), headers.get("x-api-key", "")]
    if scheme.lower() == "bearer":
        given.append(token.strip())
    return [key.encode("latin-1") for key in given]


def matches(keys: Sequence[bytes], given: Sequence[bytes]) -> bool:
    # Every pair is compared, each in constant time: the answer's time tells nothing.
    return sum(hmac.compare_digest(key, mine) for key in keys for mine in given) > 0


class Gate:
    """Outermost middleware: request id on every response, keys, and an envelope for what nobody caught.

    keys: see `Keys`. refused: counts what it turns away.
    host_labels: the server around us appends the request's own `x-request-id` to every response, as Ray Serve does; a second one
    with the same value would reach the client as "id, id".
    """

    def __init__(self, app: ASGIApp, keys: Keys, refused: Callable[[RequestError], None], host_labels: bool) -> None:
        self._app = app
        self._refused = refused
        self._host_labels = host_labels
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        state = scope.setdefault("state", {})
        given = headers.get("x-request-id", "")
        state["request_id"] = given if is_request_id(given) else f"req-{uuid.uuid4().hex}"
        started = False

        async def send_labelled(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if not (self._host_labels and state["request_id"] == given):
                    MutableHeaders(scope=message)["x-request-id"] = state["request_id"]
            await send(message)

        try:
            self._keys.check(scope["path"].removeprefix(scope.get("root_path", "")), headers)
            await self._app(scope, receive, send_labelled)
        except (NotAuthenticated, PermissionDenied) as error:
            self._refused(error)
            await error_response(error)(scope, receive, send_labelled)
        except Exception:
            if started:
                raise  # too late for a status; the server closes the connection
            log.exception("request %s: %s %s failed", state["request_id"], scope["method"], scope["path"])
            bug = InternalError("the server failed on this request; its log has the reason under the request id")
            await error_response(bug)(scope, receive, send_labelled)


def check_media_type(request: Request) -> None:
    """Raises UnsupportedMediaType unless the body is declared as JSON."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMediaType("the body must be JSON, declared as content-type: application/json")


def ignored_header(fields: Sequence[str]) -> dict[str, str]:
    """Names of fields that had no effect, for the response."""
    return {"x-ignored-fields": ",".join(fields)} if fields else {}


async def read_body(request: Request, limit: int) -> bytes:
    """The body, read no further than `limit` bytes. Raises RequestTooLarge, ClientGone."""
    too_large = RequestTooLarge(f"the request body is larger than {limit} bytes, the limit of this server")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    parts: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise too_large
        if not message.get("more_body", False):
            return b"".join(parts)


async def disconnected(receive: Receive) -> None:
    """Returns when the client has left. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until(work: Coroutine[object, object, T], *ends: Coroutine[object, object, None]) -> T:
    """Result of `work`, which is cancelled when one of `ends` returns first: then raises ClientGone."""
    job = asyncio.create_task(work)
    watchers = [asyncio.create_task(end) for end in ends]
    try:
        await asyncio.wait({job, *watchers}, return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise ClientGone
        return job.result()
    finally:
        for task in (job, *watchers):
            task.cancel()
        await asyncio.gather(job, *watchers, return_exceptions=True)


class EventStream(Response):
    """Server-sent events. close: called once, however the stream ends. stall_s: a send that takes longer ends it."""

    media_type = "text/event-stream"
    charset = "utf-8"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], None],
        stall_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._events = events
        self._close = close
        self._stall_s = stall_s
        self._sending_since_s: float | None = None
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGone):
                await until(self._pump(send), disconnected(receive), self._stalled())
        finally:
            self._close()

    async def _pump(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for data in events:
                self._sending_since_s = loop.time()
                await send({"type": "http.response.body", "body": data, "more_body": True})
                self._sending_since_s = None
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stalled(self) -> None:
        """Returns when one send has taken longer than stall_s: the client reads nothing, and the buffers are full."""
        loop = asyncio.get_running_loop()
        while self._sending_since_s is None or loop.time() - self._sending_since_s < self._stall_s:
            await asyncio.sleep(self._stall_s / 4)
