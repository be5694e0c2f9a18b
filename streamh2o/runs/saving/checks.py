"""Whether a saved state can be what was saved: kinds and sizes, before anything uses them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from streamh2o.errors import UserError

_READER = ("tokens", "words", "bytes")


@contextmanager
def naming_damage(name: str) -> Iterator[None]:
    """Whatever a state with wrong contents raises in the block becomes one sentence, a UserError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError, MemoryError) as error:
        raise UserError(f"{name}: the saved state is damaged ({type(error).__name__}); start anew.") from error


def require_sound(tensors: dict[str, torch.Tensor], counts: dict[str, Any], hidden_size: int) -> None:
    """Raise ValueError, TypeError or KeyError where what `PerplexityRun.state` gave has a count that is no count, or a
    tensor of another shape."""
    for number in counts["stream"].values():
        require_count(number)
    require_reader(counts["reader"])
    if "last_hidden" in tensors and tensors["last_hidden"].shape != (1, 1, hidden_size):
        raise ValueError
    if "tail" in tensors and (tensors["tail"].dim() != 2 or tensors["tail"].dtype != torch.int64):
        raise ValueError
    if counts["stream"]["tokens"] and "last_hidden" not in tensors:
        raise KeyError


def require_reader(reader: dict[str, Any]) -> None:
    """The same for what `TokenReader.state` gave."""
    for name in _READER:
        require_count(reader[name])
    if type(reader["sha256"]) is not str or type(reader["bos_added"]) is not bool:
        raise TypeError
    place = reader["place"]
    if place is None:
        if reader["tokens"]:
            raise ValueError
        return
    byte, after_space, length, skip = place
    for number in (byte, length, skip):
        require_count(number)
    if type(after_space) is not bool or byte > reader["bytes"]:
        raise ValueError


def require_count(number: Any) -> None:
    """Raise ValueError where `number` is not a whole one from 0 up."""
    if type(number) is not int or number < 0:
        raise ValueError
