"""Weights laid out anew for the products of a CPU, beside the model's own and for as long as those stay the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor, nn

from streamh2o.machine import available_bytes

SPARE = 4  # times what a second copy of the weights takes has to be free


def spare(size: int) -> bool:
    """Whether memory is plentiful enough for `size` bytes more than a model needs."""
    free = available_bytes()
    return free is not None and free >= SPARE * size


class Packed:
    """The weights of `layer` as `make` lays them out, made again where they have changed."""

    def __init__(self, layer: nn.Linear, make: Callable[[Tensor], Tensor]) -> None:
        self._layer, self._make = weakref.ref(layer), make
        self._seen: tuple[int, int] | None = None

    @property
    def weight(self) -> Tensor:
        layer = self._layer()
        assert layer is not None
        own = layer.weight
        seen = own.data_ptr(), own._version
        if seen != self._seen:
            self._seen, self._laid_out = seen, self._make(own.detach())
        return self._laid_out
