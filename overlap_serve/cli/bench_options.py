"""What the measuring commands share: numbers from a command line, and files that results go to."""

from __future__ import annotations

import argparse
from pathlib import Path

from overlap_serve.errors import ConfigError


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 (given: {text})")
    return value


def seconds_of_ms(text: str) -> float:
    value = float(text)
    if not 0 <= value < 3600e3:
        raise argparse.ArgumentTypeError(f"must be milliseconds, at least 0 (given: {text})")
    return value / 1e3


def write_text(file: Path, text: str) -> None:
    """Raises ConfigError if the file cannot be written."""
    try:
        file.write_text(text)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error}") from None
