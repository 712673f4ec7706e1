from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_serve.errors import InvalidRequest
from overlap_serve.openai.body import MAX_DEPTH, parse_json


def nested(depth: int) -> bytes:
    return b'{"a":' * (depth - 1) + b"{}" + b"}" * (depth - 1)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        b"[]",
        b'"text"',
        b"null",
        b"{} {}",
        b'{"a":1,}',
        b'{"temperature":NaN}',
        b'{"temperature":Infinity}',
        b'{"temperature":-Infinity}',
        b'{"a":"\xff"}',
        b'{"a":"\xed\xa0\x80"}',
        b'\xef\xbb\xbf{"a":1}',
        rb'{"a":"\ud800"}',
        rb'{"a":["x","\uDFFF tail"]}',
        rb'{"\ud800":1}',
        b'{"a":' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        nested(MAX_DEPTH + 1),
    ],
    ids=range(21),
)
def test_what_is_not_one_json_object_is_refused_as_invalid_json(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_json(body)
    assert (caught.value.http_status, caught.value.code, caught.value.param) == (400, "invalid_json", None)


def test_surrogate_pairs_and_escaped_backslashes_are_text() -> None:
    assert parse_json(rb'{"a":"\ud83d\ude00","b":"\\ud800"}') == {"a": "😀", "b": "\\ud800"}


def test_many_brackets_that_are_not_deep_pass() -> None:
    body: dict[str, object] = {"messages": [{"role": "user", "content": "[{" * 50}] * 200}
    assert parse_json(json.dumps(body).encode()) == body
    assert parse_json(nested(MAX_DEPTH)) is not None


@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_raise_anything_else(body: bytes) -> None:
    try:
        assert isinstance(parse_json(body), dict)
    except InvalidRequest as error:
        assert error.code == "invalid_json"
