"""Bodies of the control routes (http-api section 12). As everywhere, a field acts, is refused, or is reported as ignored."""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError

from overlap_serve.config import ServeConfig
from overlap_serve.errors import InvalidRequest
from overlap_serve.openai.body import parse_json
from overlap_serve.openai.fields import JsonObject
from overlap_serve.openai.ignored import reported
from overlap_serve.openai.problems import Problem, problems_of, refusal, unknown_parameter


class Nothing(JsonObject):
    """Body of POST /resume, /start_profile and /stop_profile: no fields."""


class FlushRequest(JsonObject):
    """Body of POST /flush_cache. force: end open requests first, with abort."""

    force: bool = False


class PauseRequest(JsonObject):
    """Body of POST /pause. abort: end open requests too."""

    abort: bool = False


class AbortBody(JsonObject):
    """Body of POST /v1/abort: one of the two."""

    request_id: str | None = None
    all: bool = False

    @property
    def label(self) -> str | None:
        """None: all requests. Raises InvalidRequest for neither or both."""
        if (self.request_id is None) != self.all:
            raise InvalidRequest(
                'send either {"request_id": "..."} or {"all": true}',
                code="missing_required_parameter",
                param="request_id",
            )
        return self.request_id


B = TypeVar("B", bound=JsonObject)


def parse_control(kind: type[B], body: bytes, config: ServeConfig) -> tuple[B, tuple[str, ...]]:
    """The checked body, b"" being an empty one, and the names to report. Raises InvalidRequest with code and param."""
    fields = parse_json(body) if body else {}
    unknown = [name for name, value in fields.items() if value is not None and name not in kind.model_fields]
    names = reported(unknown)
    problems: list[Problem] = []
    if config.strict_fields:
        problems += [unknown_parameter(name, name) for name in unknown]
    try:
        request = kind.model_validate(fields)
    except ValidationError as error:
        problems += problems_of(error, {})
    if problems:
        raise refusal(problems, fields) from None
    return request, names
