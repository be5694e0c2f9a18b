"""Weights laid out anew for the products of a CPU, beside the model's own and for as long as those stay the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor, nn

from streamh2o.machine import whole_bytes

SHARE = 8  # of a machine's memory, the part that second copies of weights may take


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
        self._seen: tuple[int, int] | None = None

    @property
    def weight(self) -> Tensor:
        layer = self._layer()
        assert layer is not None
        own = layer.weight
        seen = own.data_ptr(), 0 if own.is_inference() else own._version  # those made in inference mode count nothing
        if seen != self._seen:
            self._seen, self._laid_out = seen, self._make(own.detach())
        return self._laid_out
