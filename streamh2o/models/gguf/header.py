"""The header of a GGUF file, read with every count checked against the file's size.

The readers of other libraries trust the counts they find; this one runs first, so that a damaged or hostile file is
refused in a sentence before they see it. Format: ggml's docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from streamh2o.errors import UserError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4


class _BadHeader(Exception):
    """Says what in the header cannot be."""


@dataclass
class GgufHeader:
    """metadata: the scalars and strings, and the tokenizer's lists (other lists are skipped).

    tensors: name to (shape, ggml type, offset in bytes).
    """

    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[tuple[int, ...], int, int]] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "unknown"))


def read_header(path: Path) -> GgufHeader:
    """The header of the GGUF file `path`; time and memory are bounded by the file's size.

    Raises UserError where the file cannot be read, is not GGUF, is damaged or ends before its last tensor.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            return _Reader(file, size).header()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    except _BadHeader as error:
        raise UserError(f"{path} is not a whole GGUF file ({error}); get it again.") from error


class _Reader:
    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.size = file, size

    def take(self, count: int) -> bytes:
        if count > self.size - self.file.tell():
            raise _BadHeader("it ends inside its header")
        return self.file.read(count)

    def scalar(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("<Q")).decode("utf-8", "replace")

    def array(self, depth: int = 0) -> list[Any]:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind in _SCALARS:
            code = _SCALARS[kind]
            data = self.take(struct.calcsize(code) * self.bounded(count, struct.calcsize(code)))
            return [value for (value,) in struct.iter_unpack(code, data)]
        if kind == _STRING:
            return [self.string() for _ in range(self.bounded(count, 8))]
        if kind == _ARRAY and depth < _MOST_DIMENSIONS:
            return [self.array(depth + 1) for _ in range(self.bounded(count, 12))]
        raise _BadHeader(f"value type {kind} is unknown")

    def bounded(self, count: int, least: int) -> int:
        """`count` items of at least `least` bytes each must fit in what is left of the file."""
        if count * least > self.size - self.file.tell():
            raise _BadHeader("a count is larger than the file")
        return count

    def header(self) -> GgufHeader:
        header = GgufHeader()
        if self.size < 24 or self.take(4) != b"GGUF":
            raise _BadHeader("it does not begin with GGUF")
        version = self.scalar("<I")
        if version not in (2, 3):
            raise _BadHeader(f"version {version} is unknown")
        tensors, entries = self.scalar("<Q"), self.scalar("<Q")
        for _ in range(self.bounded(entries, 13)):
            key, kind = self.string(), self.scalar("<I")
            if kind in _SCALARS:
                header.metadata[key] = self.scalar(_SCALARS[kind])
            elif kind == _STRING:
                header.metadata[key] = self.string()
            elif kind == _ARRAY:
                values = self.array()
                if key.startswith("tokenizer."):
                    header.metadata[key] = values
            else:
                raise _BadHeader(f"value type {kind} is unknown")
        for _ in range(self.bounded(tensors, 24)):
            name, dimensions = self.string(), self.scalar("<I")
            if dimensions > _MOST_DIMENSIONS:
                raise _BadHeader(f"a tensor has {dimensions} dimensions")
            shape = tuple(self.scalar("<Q") for _ in range(dimensions))
            header.tensors[name] = (shape, self.scalar("<I"), self.scalar("<Q"))
        self.check_tensors(header)
        return header

    def check_tensors(self, header: GgufHeader) -> None:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        alignment = header.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise _BadHeader("its alignment makes no sense")
        start = -(-self.file.tell() // alignment) * alignment
        for name, (shape, kind, offset) in header.tensors.items():
            try:
                block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            except (ValueError, KeyError):
                raise _BadHeader(f"tensor {name} has the unknown type {kind}") from None
            elements = 1
            for length in shape:
                elements *= length
            if start + offset + elements // block * block_bytes > self.size:
                raise _BadHeader(f"tensor {name} lies beyond its end")
