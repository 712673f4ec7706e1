"""What is wrong with a request body: pydantic's findings and our own -> one error with the codes of http-api section 13.

Owns codes, paths and wording; knows no field. Validators raise `fault(...)` with a code of ours; pydantic's own checks
(types, bounds, lengths) are translated by kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from overlap_serve.errors import InvalidRequest, NotFound

MAX_LISTED = 5
MAX_SHOWN = 40

_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
_BELOW = {"greater_than_equal": ("ge", "at least"), "greater_than": ("gt", "above")}
_ABOVE = {"less_than_equal": ("le", "at most"), "less_than": ("lt", "below")}


@dataclass(frozen=True)
class Problem:
    """field: top-level key, for the order of reports. param: dotted path. message: names the path."""

    field: str
    param: str
    code: str
    message: str


def fault(code: str, text: str, at: str = "") -> PydanticCustomError:
    """What a validator raises: a code of section 13 and a sentence without subject. at: path below the field, `[2].type`."""
    return PydanticCustomError(code, "{text}", {"text": text, "at": at, "ours": True})


def unknown_parameter(path: str, field: str) -> Problem:
    """A name that means nothing here, where unknown ones are refused."""
    param = path[:64]
    return Problem(field, param, "unknown_parameter", f"{param} is not a known field; leave it out")


def wrong_type(expected: str, value: object, at: str = "") -> PydanticCustomError:
    return fault("invalid_type", f"must be {expected}, got {json_type(value)}", at)


def json_type(value: object) -> str:
    """The JSON name of a value's type, with its article."""
    if value is None:
        return "null"
    names: tuple[tuple[type, str], ...] = (
        (bool, "a boolean"),
        (int, "an integer"),
        (float, "a number with a fraction"),
        (str, "a string"),
        (list, "an array"),
        (dict, "an object"),
    )
    return next((name for kind, name in names if isinstance(value, kind)), "an unknown type")


def shown(value: object) -> str:
    """A client's value in a message: short, on one line."""
    if isinstance(value, int) and value.bit_length() > 4 * MAX_SHOWN:
        return "a huge number"  # str() of it is slow, and refused by Python beyond 4,300 digits
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def problems_of(error: ValidationError, hints: Mapping[str, str]) -> list[Problem]:
    """One Problem for each finding. hints: what to do instead, for fields below their minimum."""
    return [_problem(item, hints) for item in error.errors(include_url=False)]


def refusal(problems: Iterable[Problem], body: Mapping[str, object]) -> InvalidRequest:
    """The error to raise: code and param of the first problem in the order of the body, the message lists up to five.

    A missing field has no place in the body and comes last.
    """
    place = {name: position for position, name in enumerate(body)}
    ordered = sorted(problems, key=lambda problem: place.get(problem.field, len(place)))
    first = ordered[0]
    message = "; ".join(problem.message for problem in ordered[:MAX_LISTED])
    if len(ordered) > MAX_LISTED:
        message += f"; and {len(ordered) - MAX_LISTED} more"
    kind = NotFound if first.code == "model_not_found" else InvalidRequest
    return kind(message, code=first.code, param=first.param)


def _problem(item: ErrorDetails, hints: Mapping[str, str]) -> Problem:
    code, text, at = _translate(item)
    field = str(item["loc"][0])
    param = _path(item["loc"]) + at
    if code.endswith("_below_min_value") and field in hints:
        text += f"; {hints[field]}"
    return Problem(field, param, code, f"{param} {text}")


def _path(loc: tuple[int | str, ...]) -> str:
    """("messages", 2, "content") -> messages[2].content"""
    path = str(loc[0])
    for part in loc[1:]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path


def _translate(item: ErrorDetails) -> tuple[str, str, str]:
    """(code, sentence without subject, path below the field) of one finding."""
    kind, value, context = item["type"], item.get("input"), item.get("ctx", {})
    if "ours" in context:
        return kind, str(context["text"]), str(context["at"])
    if kind == "missing":
        return "missing_required_parameter", "is required", ""
    if kind in _BELOW or kind in _ABOVE:
        return *_out_of_range(kind, value, context), ""
    if kind == "finite_number" or (kind == "float_type" and type(value) is int):
        return *_not_finite(value), ""
    if kind in _EXPECTED:
        return "invalid_type", f"must be {_EXPECTED[kind]}, got {json_type(value)}", ""
    if kind == "literal_error" and not isinstance(value, str):
        return "invalid_type", f"must be a string, got {json_type(value)}", ""
    if kind == "literal_error":
        return "invalid_value", f"is {shown(value)}, allowed are {context['expected']}", ""
    if kind == "string_too_short":
        return "invalid_value", f"must have at least {context['min_length']} characters", ""
    if kind == "string_too_long":
        return "string_above_max_length", f"must have at most {context['max_length']} characters", ""
    return "invalid_value", f"is not valid: {item['msg']}", ""


def _out_of_range(kind: str, value: object, context: Mapping[str, object]) -> tuple[str, str]:
    side, (key, words) = ("below_min", _BELOW[kind]) if kind in _BELOW else ("above_max", _ABOVE[kind])
    bound = context[key]
    number = "integer" if isinstance(bound, int) else "decimal"
    return f"{number}_{side}_value", f"is {shown(value)}, must be {words} {bound}"


def _not_finite(value: object) -> tuple[str, str]:
    """1e400 and integers beyond the floats are numbers, only too large ones."""
    if isinstance(value, (int, float)) and not math.isnan(value if isinstance(value, float) else 0.0):
        return ("decimal_above_max_value", "is too large") if value > 0 else ("decimal_below_min_value", "is too small")
    return "invalid_value", "must be a finite number"
