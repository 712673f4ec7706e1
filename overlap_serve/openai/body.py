"""Bytes of a request body -> a JSON object, or one clear refusal (http-api section 1).

Owns what JSON is acceptable at all; knows no field. Stricter than `json.loads`: no NaN or Infinity, no text that cannot be
encoded again, no nesting that would exhaust the stack of whoever walks the value later.
"""

from __future__ import annotations

import json
import re
from typing import NoReturn

from overlap_serve.errors import InvalidRequest

MAX_DEPTH = 128  # a tool's JSON schema may be 64 deep (section 2.5) and sits a few levels down

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(body: bytes) -> dict[str, object]:
    """The object in a body. Raises InvalidRequest `invalid_json`; nothing else, whatever the bytes are."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise _refusal("it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _refusal(f"{error.msg} at character {error.pos}") from None
    except RecursionError:
        raise _refusal(f"it is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError:  # Python's limit on the digits of an integer
        raise _refusal("a number in it is too long") from None
    if not isinstance(value, dict):
        raise _refusal("it must be an object")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _check_depth(value)
    # UTF-8 cannot hold a surrogate, so only an escape can bring one in.
    if _SURROGATE_ESCAPE.search(body):
        _check_encodable(value)
    return value


def _check_depth(root: dict[str, object]) -> None:
    """Walks level by level, so that its own stack does not grow."""
    level: list[dict[str, object] | list[object]] = [root]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise _refusal(f"it is nested deeper than {MAX_DEPTH} levels")


def _check_encodable(value: dict[str, object]) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise _refusal("a string in it holds half of a surrogate pair") from None


def _refuse_constant(name: str) -> NoReturn:
    raise _refusal(f"{name} is not JSON")


def _refusal(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the request body is not valid JSON: {reason}; send one JSON object", code="invalid_json")
