"""Token by token: slots whose keys stay rotated from one eviction to the next."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from streamh2o.cache.positions import in_cache_positions
from streamh2o.cache.rotary import Rotary, RotaryTable
from streamh2o.cache.slot_cache import SlotCache
from streamh2o.cache.slots import LayerSlots
from streamh2o.kernels.select import TORCH, Kernel
from streamh2o.policies.base import Policy


class RotatedSlots(LayerSlots):
    """Slots with a rotated copy of the keys beside them: `rotated` [batch, kv_heads, capacity, head_dim + extra].

    The copy is made from the un-rotated keys, so that nothing drifts. `source_index` of the newest slots is written
    when it is needed, by the cache. `runs`: the positions that the last eviction gave, as of `in_cache_positions`.
    extra: components that a rotated key has more than a key (`Rotary.extra`).
    """

    def __init__(self, key: Tensor, value: Tensor, capacity: int, kernel: Kernel, extra: int) -> None:
        with torch.inference_mode(False):  # what is made in inference mode could not be written outside it later
            super().__init__(key, value, capacity, kernel)
            self.rotated = self.keys.new_empty(*self.keys.shape[:3], self.keys.shape[3] + extra)
        self.runs: list[tuple[int, int, Any]] = []

    def append(self, key: Tensor, value: Tensor, first: int) -> None:
        start, end = self.used, self.used + key.shape[2]
        if end > self.capacity:
            self._grow(end)
        self.keys.narrow(2, start, end - start).copy_(key)
        self.values.narrow(2, start, end - start).copy_(value)
        self.used = end

    def _grow(self, needed: int) -> None:
        old = self.rotated
        with torch.inference_mode(False):
            super()._grow(needed)
            self.rotated = old.new_empty(*self.keys.shape[:3], old.shape[3])
        self.rotated[:, :, : self.used] = old[:, :, : self.used]

    def state(self) -> dict[str, Tensor]:
        """With the rotated keys, for rotating them anew could round otherwise, and the positions they have."""
        runs = [(start, end, at if isinstance(at, int) else -1) for start, end, at in self.runs]
        kept = {f"run{number}": at for number, (_, _, at) in enumerate(self.runs) if isinstance(at, Tensor)}
        kept["runs"] = torch.tensor(runs, dtype=torch.int64).view(-1, 3)
        kept["rotated"] = self.rotated[:, :, : self.used].contiguous()
        return super().state() | kept | ({} if self.newest is None else {"newest": self.newest})

    def load(self, parts: dict[str, Tensor]) -> None:
        super().load(parts)
        if parts["rotated"].shape != (*parts["keys"].shape[:3], self.rotated.shape[3]):
            raise ValueError
        self.rotated[:, :, : self.used] = parts["rotated"]
        self.newest = parts.get("newest")
        self.runs = [
            (start, end, parts[f"run{number}"] if position < 0 else position)
            for number, (start, end, position) in enumerate(parts["runs"].tolist())
        ]

    def rows(self, index: Tensor) -> RotatedSlots:
        """A copy of the rows `index` [n] of the batch."""
        copy = object.__new__(RotatedSlots)
        copy.__dict__.update(self.__dict__)
        with torch.inference_mode(False):
            for name in ("keys", "values", "rotated", "scores", "source_index"):
                setattr(copy, name, getattr(self, name).index_select(0, index.to(self.keys.device)))
        copy.runs = [
            (start, end, at if isinstance(at, int) else at.index_select(0, index.to(at.device)))
            for start, end, at in self.runs
        ]
        if self.newest is not None:
            copy.newest = self.newest.index_select(0, index.to(self.newest.device))
        return copy


class DecodingCache(SlotCache):
    """A SlotCache for decoding: it evicts every `evict_every` steps, and rotates old keys only when it has evicted.

    From one eviction to the next every slot keeps the position it got after the first of them, and the tokens that come
    count on from there: what a chunk of as many tokens would see. A pass of several tokens evicts at its end.
    At most policy.cache + chunk slots are held; the room above the budget is what the steps between evictions fill.
    """

    keeps_rotated = True
    slots: list[RotatedSlots]  # type: ignore[assignment]

    def __init__(
        self,
        policy: Policy,
        rotary: Rotary,
        layers_count: int,
        chunk: int,
        evict_every: int,
        kernel: Kernel = TORCH,
    ) -> None:
        make_layer = partial(RotatedSlots, extra=rotary.extra)
        super().__init__(policy, rotary, layers_count, chunk, make_layer=make_layer, kernel=kernel)
        self.evict_every = min(evict_every, chunk)
        self._start()

    def _start(self) -> None:
        self._first = 0  # position of the first token after the last eviction
        self._mark = 0  # slots then
        self._mark_tokens = 0  # tokens of the stream then
        self._shared: tuple[tuple[int, slice, int, float], Tensor, Tensor] | None = (
            None  # the angles of the pass at hand
        )

    def begin(self, count: int) -> None:
        """Before a pass of `count` tokens, make room for them."""
        if self.policy.evicts and self.used + count > self.policy.cache + self.chunk:
            self._evict()
        super().begin(count)

    def undo(self) -> None:
        super().undo()
        for layer in self.slots:
            layer.scores[:, :, layer.used :] = 0

    def finish(self, count: int, evicted: bool = False) -> None:
        """After a pass of `count` tokens, evict where it is time to."""
        self.tokens += count
        self.max_slots = max(self.max_slots, self.used)
        over = self.used - self.policy.cache
        if self.policy.evicts and (over >= self.evict_every or (over > 0 and count > 1)):
            self._evict()

    def settle(self) -> None:
        """Write the source indices of the slots that have come since the last eviction."""
        for layer in self.slots:
            count = layer.used - self._mark
            newest = torch.arange(self._mark_tokens, self._mark_tokens + count, device=layer.keys.device)
            layer.source_index[:, :, self._mark : layer.used] = newest

    def _evict(self) -> None:
        self.settle()
        super()._evict()
        self._mark, self._mark_tokens = self.policy.cache, self.tokens
        for layer in self.slots:
            layer.scores[:, :, layer.used :] = 0
            self._first, layer.runs = in_cache_positions(self, layer, 0, self.chunk)
            table = layer.table
            if table is None:
                continue
            for start, end, position in layer.runs:
                where = slice(position, position + end - start) if isinstance(position, int) else position
                layer.rotated[:, :, start:end] = table.place_keys(layer.keys[:, :, start:end], where)

    def rotate_new(self, layer: LayerSlots, query: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        assert isinstance(layer, RotatedSlots)
        table = layer.table
        if table is None:
            return query * scaling, layer.keys.narrow(2, 0, layer.used)
        start, end = layer.used - query.shape[2], layer.used
        where = slice(self._first + start - self._mark, self._first + end - self._mark)
        one = query.shape[2] == 1
        if one and isinstance(table, RotaryTable) and table.style == "half" and table.rotary_dim == query.shape[3]:
            return self._rotate_one(layer, table, query, scaling, where)
        layer.rotated[:, :, start:end] = table.place_keys(layer.keys[:, :, start:end], where)
        return table.place_queries(query, where, scaling), layer.rotated[:, :, :end]

    def kept_positions(self, layer: LayerSlots, chunk: int) -> tuple[int, list[tuple[int, int, Any]]]:
        assert isinstance(layer, RotatedSlots)
        first = self._first + layer.used - chunk - self._mark
        return first, [*layer.runs, (self._mark, layer.used, self._first)]

    def _rotate_one(
        self, layer: RotatedSlots, table: RotaryTable, query: Tensor, scaling: float, where: slice
    ) -> tuple[Tensor, Tensor]:
        """`rotate_new` of one token in few operations: query and key together, angles that all layers share."""
        heads, newest = query.shape[1], layer.used - 1
        cos, sin = self._angles(table, heads, layer.keys.shape[1], scaling, where)
        both = torch.cat([query, layer.keys.narrow(2, newest, 1)], dim=1)
        turned = torch.addcmul(both * cos, both.roll(both.shape[3] // 2, 3), sin)
        layer.rotated.narrow(2, newest, 1).copy_(turned.narrow(1, heads, turned.shape[1] - heads))
        return turned.narrow(1, 0, heads).to(query.dtype), layer.rotated.narrow(2, 0, layer.used)

    def _angles(
        self, table: RotaryTable, heads: int, kv_heads: int, scaling: float, where: slice
    ) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [heads + kv_heads, 1, head_dim] of one position, the queries' times `scaling`."""
        key = id(table), where, heads, scaling
        if self._shared is None or self._shared[0] != key:
            cos, sin = table.cos[where], table.sin[where]
            scale = cos.new_ones(heads + kv_heads, 1, 1)
            scale[:heads] = scaling
            self._shared = key, torch.cat([cos, cos], 1) * scale, torch.cat([-sin, sin], 1) * scale
        return self._shared[1:]

    def counts(self) -> dict[str, int]:
        """What `load` takes beside the tensors of `state`."""
        return {
            "tokens": self.tokens,
            "evictions": self.evictions,
            "max_slots": self.max_slots,
            "first": self._first,
            "mark": self._mark,
            "mark_tokens": self._mark_tokens,
        }

    def state(self) -> dict[str, Tensor]:
        self.settle()
        return super().state()

    def load(self, tensors: dict[str, Tensor], counts: dict[str, int]) -> None:
        """Go on from what `state` and `counts` gave. Raises UserError, KeyError where it does not fit this model."""
        self.load_state(tensors, counts["tokens"], counts["evictions"], counts["max_slots"])
        self._first, self._mark, self._mark_tokens = counts["first"], counts["mark"], counts["mark_tokens"]

    @property
    def rows_count(self) -> int:
        """Rows of the batch; 0 before the first pass."""
        return self.slots[0].keys.shape[0] if self.slots else 0

    def rows(self, index: Tensor) -> DecodingCache:
        """A copy of the rows `index` [n] of the batch."""
        copy = object.__new__(DecodingCache)
        copy.__dict__.update(self.__dict__)
        copy.slots = [layer.rows(index) for layer in self.slots]
        return copy

    def reset(self) -> None:
        super().reset()
        for layer in self.slots:
            layer.scores.zero_()
            layer.runs = []
        self.evictions = self.max_slots = 0
        self._start()
