"""Slots: preallocated buffers of un-rotated keys, values, scores and source indices; append and compact."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from streamh2o.cache.rotary import Table
from streamh2o.kernels import compiled
from streamh2o.kernels.select import TORCH, Kernel


class LayerSlots:
    """The slots of one layer, in the order of the stream: sinks, hitters, recent.

    key, value: [batch, kv_heads, n, head_dim], what the slots will hold. capacity: how many there are at first. kernel:
    what moves them. Tensors of `used` valid slots, the rest being room for the next chunk:
    keys, values    [batch, kv_heads, capacity, head_dim], the model's type, keys without rotation
    scores          [batch, kv_heads, capacity], float32
    source_index    [batch, kv_heads, capacity], int64: the token's index in the stream
    """

    buffers: ClassVar[tuple[str, ...]] = ("keys", "values", "scores", "source_index")  # what has a row for every slot

    def __init__(self, key: Tensor, value: Tensor, capacity: int, kernel: Kernel = TORCH) -> None:
        batch, heads, _, head_dim = key.shape
        self.keys = key.new_empty(batch, heads, capacity, head_dim)
        self.values = value.new_empty(batch, heads, capacity, value.shape[-1])
        self.scores = torch.zeros(batch, heads, capacity, dtype=torch.float32, device=key.device)
        self.source_index = torch.zeros(batch, heads, capacity, dtype=torch.int64, device=key.device)
        self.table: Table | None = None  # how the layer rotates; None where it does not
        self.newest: Tensor | None = None  # [batch, kv_heads, used] of the last pass alone, where the policy asks
        self.kernel = kernel
        self.used = 0

    @property
    def capacity(self) -> int:
        return self.scores.shape[2]

    def valid(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the used slots, [batch, kv_heads, used, head_dim]; to read, until the next layer's."""
        return self.keys.narrow(2, 0, self.used), self.values.narrow(2, 0, self.used)

    def leave_window(self, sinks: int, recent: int) -> None:
        """A pass has ended: what is neither among the `sinks` first slots nor the `recent` last is in the middle."""

    def kv_bytes(self, slots: int) -> int:
        """Bytes of the keys and values of so many slots."""
        batch, heads, _, key_dim = self.keys.shape
        return batch * heads * slots * (key_dim + self.values.shape[-1]) * self.keys.element_size()

    def append(self, key: Tensor, value: Tensor, first: int) -> None:
        """Add `key`, `value` [batch, kv_heads, n, head_dim], the first of which is token `first` of the stream."""
        start, end = self.used, self.used + key.shape[2]
        if end > self.capacity:
            self._grow(end)
        self.used = end
        if self.kernel.takes_slots(self.keys):
            return compiled.append(self.keys, self.values, self.scores, self.source_index, key, value, start, first)
        self.keys[:, :, start:end] = key
        self.values[:, :, start:end] = value
        self.scores[:, :, start:end] = 0
        self.source_index[:, :, start:end] = torch.arange(first, first + end - start, device=key.device)

    def set_back(self, used: int) -> None:
        """Forget the slots after the first `used`."""
        self.used = used

    def take_back(self, count: int) -> tuple[Tensor, Tensor]:
        """Remove the newest `count` slots; returns their keys and values [batch, kv_heads, count, head_dim]."""
        newest = slice(self.used - count, self.used)
        self.used -= count
        return self.keys[:, :, newest].clone(), self.values[:, :, newest].clone()

    def _grow(self, needed: int) -> None:
        """Double the buffers; only a policy that evicts nothing comes here."""
        capacity = max(needed, 2 * self.capacity)
        for name in self.buffers:
            old: Tensor = getattr(self, name)
            new = old.new_zeros(*old.shape[:2], capacity, *old.shape[3:])
            new[:, :, : self.used] = old[:, :, : self.used]
            setattr(self, name, new)

    def compact(self, sinks: int, recent: int, chosen: Tensor) -> None:
        """Keep `sinks` first slots, the middle slots `chosen` and the `recent` last slots.

        chosen: [batch, kv_heads, hitters], slot numbers in ascending order.
        """
        used, self.used = self.used, sinks + chosen.shape[-1] + recent
        buffers = [getattr(self, name) for name in self.buffers]
        if self.kernel.takes_slots(chosen):
            compiled.keep(buffers, chosen, sinks, recent, used)
        else:
            for buffer in buffers:
                keep(buffer, chosen, sinks, recent, used)
        if self.newest is not None:
            parts = self.newest[:, :, :sinks], self.newest.gather(2, chosen), self.newest[:, :, used - recent : used]
            self.newest = torch.cat(parts, dim=2)

    def state(self) -> dict[str, Tensor]:
        """The used slots by name, to give to `load` later."""
        return {name: getattr(self, name)[:, :, : self.used].contiguous() for name in self.buffers}

    def load(self, parts: dict[str, Tensor]) -> None:
        """Put back what `state` gave. Raises KeyError where a tensor is missing, ValueError where shapes differ."""
        used = parts["source_index"].shape[2]
        for name in self.buffers:
            buffer: Tensor = getattr(self, name)
            if parts[name].shape != (*buffer.shape[:2], used, *buffer.shape[3:]):
                raise ValueError
            buffer[:, :, :used] = parts[name]
        self.used = used


MakeLayer = Callable[[Tensor, Tensor, int, Kernel], LayerSlots]  # arguments as of LayerSlots


def highest(priority: Tensor, n: int, kernel: Kernel = TORCH) -> Tensor:
    """The slots [..., n], ascending, of the n highest priorities [..., slots]."""
    if priority.dtype == torch.float32 and kernel.takes_slots(priority):
        return compiled.highest(priority.flatten(0, -2).contiguous(), n).view(*priority.shape[:-1], n)
    return priority.topk(n, dim=-1).indices.sort(dim=-1).values


def keep(buffer: Tensor, chosen: Tensor, sinks: int, recent: int, used: int) -> None:
    """`LayerSlots.compact` of one buffer [batch, kv_heads, capacity, ...], of which `used` rows are slots."""
    batch, kv_heads, hitters = chosen.shape
    heads = torch.arange(batch * kv_heads, device=chosen.device).view(batch, kv_heads, 1)
    newest = buffer[:, :, used - recent : used].clone()
    survivors = buffer.flatten(0, 2).index_select(0, (chosen + heads * buffer.shape[2]).flatten())
    buffer[:, :, sinks : sinks + hitters] = survivors.view(*chosen.shape, *buffer.shape[3:])
    buffer[:, :, sinks + hitters : sinks + hitters + recent] = newest
