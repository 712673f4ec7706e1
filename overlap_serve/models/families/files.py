"""JSON files of a model folder; every error names file and key."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from overlap_serve.errors import ModelLoadError

T = TypeVar("T")


def read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ModelLoadError(
            f"{file}: {error.strerror or error}; a model folder needs config.json, tokenizer.json and safetensors files"
        ) from None


def decode(raw: bytes, kind: type[T], file: Path) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise ModelLoadError(f"{file}: {error}") from None


def decode_optional(file: Path, kind: type[T]) -> T:
    """A file that is not there reads as {}."""
    return decode(file.read_bytes() if file.exists() else b"{}", kind, file)


def convert(value: object, kind: type[T], where: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.MsgspecError as error:
        raise ModelLoadError(f"{where}: {error}") from None
