"""The matcher alone, against the definition in http-api section 5."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_serve.text.stops import StopMatcher, compile_stops

WORDS = st.text(alphabet="ab", min_size=1, max_size=4)


def definition(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Smallest end; on a tie the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


def held(text: str, stops: list[str]) -> int:
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


@settings(max_examples=300, deadline=None)
@given(st.lists(WORDS, max_size=4), st.lists(st.text(alphabet="abc", max_size=4), max_size=8))
def test_first_match_and_hold_back_do_not_depend_on_the_pieces(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(compile_stops(tuple(stops)))
    text = ""
    for piece in pieces:
        match = matcher.feed(piece)
        expected = definition(text + piece, stops)
        found = None if match is None else (len(text) + match.end, match.text)
        assert found == expected
        if match is not None:
            return
        text += piece
        assert matcher.held == held(text, stops)


def test_work_is_linear_for_a_stop_string_that_nearly_matches_everywhere() -> None:
    matcher = StopMatcher(compile_stops(("a" * 1023 + "b",)))
    for _ in range(50):
        assert matcher.feed("a" * 1000) is None
    assert matcher.held == 1023
    match = matcher.feed("b")
    assert match is not None and match.end == 1


def test_code_points_are_compared_without_normalisation() -> None:
    assert StopMatcher(compile_stops(("é",))).feed("e\u0301") is None
