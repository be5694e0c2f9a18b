"""Whether what `PerplexityRun.state` is said to have given can be that: kinds and sizes, before anything uses them."""

from __future__ import annotations

from typing import Any

import torch

_READER = ("tokens", "words", "bytes")


def require_sound(tensors: dict[str, torch.Tensor], counts: dict[str, Any], hidden_size: int) -> None:
    """Raise ValueError, TypeError or KeyError where a count is no count or a tensor has another shape."""
    reader = counts["reader"]
    for number in (*counts["stream"].values(), *(reader[name] for name in _READER)):
        _count(number)
    if type(reader["sha256"]) is not str or type(reader["bos_added"]) is not bool:
        raise TypeError
    place = reader["place"]
    if place is None:
        if reader["tokens"]:
            raise ValueError
    else:
        byte, after_space, length, skip = place
        for number in (byte, length, skip):
            _count(number)
        if type(after_space) is not bool or byte > reader["bytes"]:
            raise ValueError
    if "last_hidden" in tensors and tensors["last_hidden"].shape != (1, 1, hidden_size):
        raise ValueError
    if "tail" in tensors and (tensors["tail"].dim() != 2 or tensors["tail"].dtype != torch.int64):
        raise ValueError
    if counts["stream"]["tokens"] and "last_hidden" not in tensors:
        raise KeyError


def _count(number: Any) -> None:
    if type(number) is not int or number < 0:
        raise ValueError
