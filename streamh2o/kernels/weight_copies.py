"""Weights laid out anew for the products of a CPU, beside the model's own and for as long as those stay the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from streamh2o.machine import whole_bytes

SHARE = 8  # of a machine's memory, the part that second copies of weights may take
NUMBERS = 64  # of a weight, that are looked at to see whether it has changed


def spare(size: int) -> bool:
    """Whether this machine has room for `size` bytes of weights a second time.

    What happens to be free does not count: sums over another layout may round otherwise, and a run that is resumed is
    to have the same digits.
    """
    whole = whole_bytes()
    return whole is not None and whole >= SHARE * size


class WeightCopy:
    """The weights of `layer` as `make` lays them out, made again where they have changed."""

    def __init__(self, layer: nn.Linear, make: Callable[[Tensor], Tensor]) -> None:
        self._layer, self._make = weakref.ref(layer), make
        # the mark of the weights, some of their numbers, and what was made of them
        self._made: tuple[tuple[int, int], Tensor, Tensor] | None = None

    def _own(self) -> Tensor:
        layer = self._layer()
        assert layer is not None
        return layer.weight.detach()

    @property
    def weight(self) -> Tensor:
        own, made = self._own(), self._made
        if made is None or made[0] != _mark(own):
            self._made = made = _mark(own), _some(own), self._make(own)
        return made[2]

    def look_again(self) -> None:
        """Look at some of the numbers: what is written through `weight.data`, or in inference mode, counts nothing."""
        own, made = self._own(), self._made
        if made is not None and made[0] == _mark(own) and not torch.equal(made[1], _some(own)):
            self._made = None


def _mark(weight: Tensor) -> tuple[int, int]:
    """Where it lies, and how often it was written to; those made in inference mode count nothing."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def _some(weight: Tensor) -> Tensor:
    flat = weight.flatten()
    return flat[:: max(1, len(flat) // NUMBERS) | 1].clone()  # an odd step comes past all columns
