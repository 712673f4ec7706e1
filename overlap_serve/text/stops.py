"""Stop strings: the first match in a text that arrives in pieces, and how much of its end must be held back.

Implements http-api section 5 exactly: of all matches the one with the smallest end, on a tie the longest; hold back the longest
suffix that a stop string could begin with, nothing more. Knows no tokens. One Knuth-Morris-Pratt automaton per stop string: the
work is linear in the text and does not depend on the pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopString:
    """text, and for each n the length of the longest proper border of text[:n] (the KMP failure function; index 0 unused)."""

    text: str
    borders: tuple[int, ...]


def compile_stops(stops: tuple[str, ...]) -> tuple[StopString, ...]:
    """Automata of non-empty stop strings; immutable, so choices can share them."""
    return tuple(StopString(text, _borders(text)) for text in stops)


def _borders(text: str) -> tuple[int, ...]:
    borders = [0, 0]
    length = 0
    for char in text[1:]:
        while length and text[length] != char:
            length = borders[length]
        length += text[length] == char
        borders.append(length)
    return tuple(borders)


@dataclass(frozen=True)
class StopMatch:
    """A stop string whose last character is piece[end - 1]; its start may lie in earlier pieces."""

    end: int
    text: str


class StopMatcher:
    """Where one text stands. `held`: characters at the end of the text so far that may still become part of a match."""

    def __init__(self, stops: Sequence[StopString]) -> None:
        self._stops = stops
        self._first_chars = frozenset(stop.text[0] for stop in stops)
        self._matched = [0] * len(stops)  # per stop: length of its longest prefix that ends the text
        self.held = 0

    def feed(self, piece: str) -> StopMatch | None:
        """Look at the next piece. After a match the matcher is spent."""
        if not self.held and self._first_chars.isdisjoint(piece):
            return None
        for index, char in enumerate(piece):
            complete = ""
            for which, stop in enumerate(self._stops):
                length = self._matched[which]
                while length and stop.text[length] != char:
                    length = stop.borders[length]
                length += stop.text[length] == char
                self._matched[which] = length
                if length == len(stop.text) > len(complete):
                    complete = stop.text
            if complete:
                return StopMatch(index + 1, complete)
        self.held = max(self._matched, default=0)
        return None
