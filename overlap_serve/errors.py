"""The tree of errors that a user can see.

    OverlapServeError
      ConfigError             a configuration that cannot work (start-up; process exit 2)
      ModelLoadError          a checkpoint that cannot be loaded (start-up)
      RequestError            one request cannot be served; becomes the HTTP envelope
        InvalidRequest        400 invalid_request_error, any code
          ContextLengthExceeded
        NotFound              404
        NotAuthenticated      401
        PermissionDenied      403
        DeadlineExceeded      408, before any output
        RequestAborted        409, aborted by id before any output
        Conflict              409, a control route that cannot act now
        RequestTooLarge       413
        UnsupportedMediaType  415
        QueueFull             429 + Retry-After
        ServerUnavailable     503 + Retry-After: loading, draining, paused, engine failed
        InternalError         500, never retried by clients

A message says what was given, what is allowed and what to do. `assert` is for our own mistakes.
"""

from __future__ import annotations


class OverlapServeError(Exception):
    """Root of all errors raised on purpose by this package."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ConfigError(OverlapServeError):
    """The configuration cannot work; the message names the field."""


class ModelLoadError(OverlapServeError):
    """A model folder or checkpoint is missing, damaged or of an unknown kind; the message names file and key."""


class RequestError(OverlapServeError):
    """A request ends without (further) output. Carries all that the HTTP envelope needs.

    http_status: status line when nothing was sent yet.
    type, code, param: fields of the envelope; `param` is a dotted path, never a client's value.
    retry_after_s: sent as `Retry-After` when set.
    should_retry: sent as `x-should-retry` when not None.
    """

    http_status: int = 500
    type: str = "server_error"
    code: str = "internal_error"
    should_retry: bool | None = None

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def envelope(self) -> dict[str, dict[str, str | None]]:
        """Body of http-api section 13."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequest(RequestError):
    """The client's mistake; repeating the request unchanged cannot help."""

    http_status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class ContextLengthExceeded(InvalidRequest):
    """Prompt, or prompt plus limit, does not fit the model or the KV cache."""

    code = "context_length_exceeded"


class NotFound(InvalidRequest):
    """Unknown model, adapter or route."""

    http_status = 404
    code = "model_not_found"


class MethodNotAllowed(InvalidRequest):
    """Known route, wrong method."""

    http_status = 405
    code = "method_not_allowed"


class NotAuthenticated(RequestError):
    """A key is configured, and the request brought none or a wrong one."""

    http_status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class PermissionDenied(RequestError):
    """A valid key that may not do this: control routes need an admin key."""

    http_status = 403
    type = "permission_error"
    code = "insufficient_permissions"


class DeadlineExceeded(RequestError):
    """The request's own deadline passed before any output."""

    http_status = 408
    type = "timeout_error"
    code = "deadline_exceeded"
    should_retry = False


class RequestAborted(RequestError):
    """Aborted by id before any output."""

    http_status = 409
    type = "aborted_error"
    code = "request_aborted"
    should_retry = False


class Conflict(RequestError):
    """What a control route was asked for cannot be done in the state that the server is in."""

    http_status = 409
    type = "conflict_error"
    code = "busy"


class RequestTooLarge(InvalidRequest):
    """The body is larger than `max_body_bytes`."""

    http_status = 413
    code = "request_too_large"


class UnsupportedMediaType(InvalidRequest):
    """The body is not declared as application/json."""

    http_status = 415
    code = "unsupported_media_type"


class QueueFull(RequestError):
    """Admission refused; the client should come back later."""

    http_status = 429
    type = "rate_limit_error"
    code = "queue_full"


class ServerUnavailable(RequestError):
    """Loading, draining, paused, or the engine died with the request (code says which)."""

    http_status = 503
    code = "engine_failed"


class InternalError(RequestError):
    """A bug on this input; a retry would meet it again."""

    http_status = 500
    code = "internal_error"
    should_retry = False
