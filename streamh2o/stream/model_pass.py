"""One forward pass: whose slots it sees, and what its attention does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from streamh2o.cache.positions import Branches
from streamh2o.cache.slot_cache import SlotCache
from streamh2o.cache.slots import LayerSlots
from streamh2o.errors import UserError
from streamh2o.stream.layer_attention import attend_layer
from streamh2o.stream.model_cache import ModelCache


class Pass(ModelCache):
    """One forward pass of `count` tokens. The model is given it as its cache, and asks it for its attention.

    caches: whose slots the rows of the batch see: one cache for all rows, or one for each row.
    evict_each_token: evict after every token, within the attention of each layer. probe: leave no trace: nothing is
    kept, scored or evicted. branches: how the tokens of a probe see each other; None: each sees those before it.
    """

    tokens = 0  # masks and positions are ours; what a model makes for those before would grow with the text

    def __init__(
        self,
        caches: Sequence[SlotCache],
        count: int,
        *,
        evict_each_token: bool = False,
        probe: bool = False,
        branches: Branches | None = None,
    ) -> None:
        self.layers = []  # what a cache of transformers is made of; ours are in `caches`
        self.caches, self.count = caches, count
        self.layers_count = caches[0].layers_count
        self.evict_each_token, self.probe, self.branches = evict_each_token, probe, branches
        self._appended: list[LayerSlots] | None = None  # of the layer whose attention comes next, by cache
        self._attended = 0  # layers
        self._begun = False  # and its slots can be taken back
        self._scored = False  # scores hold what it saw, which can't be taken back
        self.left_no_trace = True  # it did not begin, or was undone to the last digit

    def begin(self) -> None:
        """Before the model is run; what `undo` goes back to."""
        self.left_no_trace = False
        for cache in self.caches:
            cache.begin(self.count)
        self._begun = True

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append un-rotated keys and values [batch, kv_heads, n, head_dim]; returned as they came."""
        rows = [(key_states, value_states)]
        if len(self.caches) > 1:
            rows = list(zip(key_states.split(1), value_states.split(1), strict=True))
        parts = zip(self.caches, rows, strict=True)
        self._appended = [cache.append(key, value, layer_idx) for cache, (key, value) in parts]
        return key_states, value_states

    def attend(self, query: Tensor, scaling: float, window: int | None, softcap: float | None) -> Tensor:
        """The attention [batch, heads, n, head_dim] of the layer that was last updated.

        query: un-rotated, [batch, heads, n, head_dim]. window, softcap: the model's own, None where it has none.
        """
        layers, self._appended = self._appended, None
        if layers is None:
            raise UserError("A layer of this model attends without giving its keys to the cache; it can't be streamed.")
        self._attended += 1
        sums = self.caches[0].policy.scored or any(layer.newest is not None for layer in layers)
        self._scored = self._scored or (sums and not self.probe) or self.evict_each_token
        queries = [query] if len(layers) == 1 else query.split(1)
        outputs = [
            attend_layer(
                *part,
                scaling,
                window,
                softcap,
                evict_each_token=self.evict_each_token,
                probe=self.probe,
                branches=self.branches,
            )
            for part in zip(self.caches, layers, queries, strict=True)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def finish(self) -> None:
        """The model has come to its end: let each cache evict. Raises UserError where a layer never asked for us."""
        if self._attended != self.layers_count:
            raise UserError(f"The attention of {self.layers_count - self._attended} layers can't be chosen.")
        if self.probe:
            return self.undo()
        self._begun = False
        for cache in self.caches:
            cache.finish(self.count, evicted=self.evict_each_token)

    def undo(self) -> None:
        """The model has not come to its end: take the pass's slots back, unless they are being evicted."""
        if self._begun:
            for cache in self.caches:
                cache.undo()
            self.left_no_trace = not self._scored
