"""A model's input as passes: pieces of a chunk at most, without padding, and their hidden states as one output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamh2o.cache.decoding_cache import DecodingCache
from streamh2o.errors import UserError


@dataclass(frozen=True)
class PromptPiece:
    """A part of an input that is one pass: columns `start` to `end` of one row, or of all where `row` is None.

    groups: whose slots it sees.
    """

    groups: Sequence[DecodingCache]
    row: int | None
    start: int
    end: int

    @property
    def rows(self) -> slice:
        return slice(None) if self.row is None else slice(self.row, self.row + 1)

    def of(self, inputs: Tensor) -> Tensor:
        return inputs[self.rows, self.start : self.end]


def cut_input(groups: Sequence[DecodingCache], start: Sequence[int], columns: int, chunk: int) -> list[PromptPiece]:
    """An input of so many columns as passes of at most `chunk` tokens. start: of each row, its first column."""
    if len(groups) == 1 or columns == 1:
        return _cut(groups, None, start[0], columns, chunk)
    return [piece for row, group in enumerate(groups) for piece in _cut([group], row, start[row], columns, chunk)]


def _cut(groups: Sequence[DecodingCache], row: int | None, start: int, end: int, chunk: int) -> list[PromptPiece]:
    return [PromptPiece(groups, row, first, min(first + chunk, end)) for first in range(start, end, chunk)]


def first_columns(mask: Tensor | None, rows: int, begun: bool) -> list[int]:
    """How many columns of padding each row begins with. mask: [batch, columns], False for padding.

    Raises UserError where padding stands anywhere but before a row's first token. begun: a text has begun already.
    """
    if mask is None or bool(mask.all()):
        return [0] * rows
    start = (~mask).sum(dim=1)
    if begun or not torch.equal(mask, torch.arange(mask.shape[1], device=mask.device) >= start[:, None]):
        raise UserError(
            "A StreamCache takes padding before the first token of a text only; set padding_side='left', and leave "
            "padding out of what continues a text."
        )
    if int(start.max()) == mask.shape[1]:
        raise UserError(f"Row {int(start.argmax())} of the batch is padding only; leave it out.")
    counts: list[int] = start.tolist()
    return counts


class PieceStates:
    """The hidden states of an input's pieces, put together.

    wanted: newest columns whose states are wanted; 0 for all.
    """

    def __init__(self, inputs: Tensor, wanted: int) -> None:
        self._shape = inputs.shape[:2]
        self._first = max(0, inputs.shape[1] - wanted) if wanted else 0
        self._states: Tensor | None = None  # [batch, columns from `_first` on, hidden_size]

    def add(self, piece: PromptPiece, output: Any) -> None:
        states: Tensor = output[0] if isinstance(output, tuple) else output.last_hidden_state
        rows, columns = self._shape
        if self._states is None:
            self._states = states.new_zeros(rows, columns - self._first, states.shape[-1])
        start = max(piece.start, self._first)
        if start < piece.end:
            target = slice(start - self._first, piece.end - self._first)
            self._states[piece.rows, target] = states[:, start - piece.start :]

    def in_place_of(self, output: Any) -> Any:
        """`output`, of the last piece, with the states of all."""
        if isinstance(output, tuple):
            return (self._states, *output[1:])
        output.last_hidden_state = self._states
        return output
