"""`GGUFFile`: typed access to the metadata and tensors of one GGUF file.

Owns the border to the `gguf` package: whatever a damaged file makes it raise becomes a ModelLoadError that names file and key.
Knows no architecture and no tokenizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from gguf import GGUFReader, ReaderTensor

from overlap_serve.errors import ModelLoadError

T = TypeVar("T")
D = TypeVar("D")


class GGUFFile:
    """tensors: by name, in the order of the file; their data is mapped, not read.

    Raises ModelLoadError when the file is damaged, big-endian or one of several parts.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Everything, because numpy makes of garbage what it likes: IndexError, ValueError, OverflowError, MemoryError.
        try:
            reader = GGUFReader(path)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ModelLoadError(f"{path}: damaged or not a GGUF file ({reason}); fetch it again") from None
        self._fields = reader.fields
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}
        if reader.byte_order == "S":
            raise ModelLoadError(f"{path}: has the byte order of another kind of machine; fetch the little-endian file")
        parts = self.get("split.count", int, 1)
        if parts > 1:
            raise ModelLoadError(
                f"{path}: split.count is {parts}, this is one of several files; join them with `llama-gguf-split --merge`"
            )

    def need(self, key: str, kind: type[T]) -> T:
        """Value of a metadata key. Raises ModelLoadError when it is missing or of another type."""
        if key not in self._fields:
            raise ModelLoadError(f"{self.path}: {key} is missing from the metadata; fetch the file again")
        try:
            value: Any = self._fields[key].contents()
        except (ValueError, IndexError) as error:
            raise ModelLoadError(f"{self.path}: {key} cannot be read ({error}); fetch the file again") from None
        if kind is int and isinstance(value, list) and len(set(value)) == 1:
            value = value[0]  # one number for each layer, all the same
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            raise ModelLoadError(f"{self.path}: {key}: {error}") from None

    def get(self, key: str, kind: type[T], default: D) -> T | D:
        """As `need`, with a default for a key that is not there."""
        return self.need(key, kind) if key in self._fields else default

    def number(self, key: str, default: float | None = None) -> float:
        """A float32 as the shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
        value = self.need(key, float) if default is None else self.get(key, float, default)
        return float(str(np.float32(value)))
