"""The KV cache of fixed size: the slots of all layers, the eviction at the end of a pass, saving."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from streamh2o.cache.rotary import Rotary
from streamh2o.cache.slots import LayerSlots, MakeLayer, highest
from streamh2o.errors import UserError
from streamh2o.kernels.select import TORCH, Kernel
from streamh2o.policies.base import Middle, Policy, alike, checked_priorities


class SlotCache:
    """The slots of all layers: fixed size, whatever the length of the stream.

    A pass calls `begin`, `append` for each layer, and `finish`, which evicts; or `undo`.
    policy: who survives an eviction. rotary: the model's angles. layers_count: how many layers the model has. chunk:
    most tokens of one pass. group: store each key and value so many times, to keep slots and scores for each query head
        instead of each KV head (the H2O authors' code); 1 stores them once. make_layer: makes the slots of a layer.
    kernel: what computes.
    """

    keeps_rotated = False  # True: it has rotated keys at hand, which `rotate_new` gives

    def __init__(
        self,
        policy: Policy,
        rotary: Rotary,
        layers_count: int,
        chunk: int = 256,
        group: int = 1,
        make_layer: MakeLayer = LayerSlots,
        kernel: Kernel = TORCH,
    ) -> None:
        self.policy, self.rotary, self.chunk = policy, rotary, chunk
        self.layers_count, self.group, self.kernel = layers_count, group, kernel
        self._make_layer = make_layer
        self.slots: list[LayerSlots] = []
        self.tokens = 0  # tokens of the stream before the running pass
        self.evictions = 0
        self.max_slots = 0
        self._begun = 0  # slots before the running pass

    def rotate_new(self, layer: LayerSlots, query: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """Rotated queries times `scaling`, and all rotated keys of the layer, of which only the newest are computed."""
        raise NotImplementedError

    def kept_positions(self, layer: LayerSlots, chunk: int) -> tuple[int, list[tuple[int, int, Any]]]:
        """What `in_cache_positions` returns, of keys that keep the position they got at the last eviction."""
        raise NotImplementedError

    # A pass

    def begin(self, count: int) -> None:
        """Before a pass of `count` tokens."""
        self._begun = self.used

    def append(self, key: Tensor, value: Tensor, number: int) -> LayerSlots:
        """Put the pass's un-rotated keys and values [batch, kv_heads, n, head_dim] into layer `number`."""
        if self.group > 1:
            key, value = (part.repeat_interleave(self.group, dim=1) for part in (key, value))
        if number == len(self.slots):
            room = self.policy.cache if self.policy.evicts else 0
            layer = self._make_layer(key, value, room + max(self.chunk, key.shape[2]), self.kernel)
            layer.table = self.rotary.table(number, key.device)
            self.slots.append(layer)
        layer = self.slots[number]
        layer.append(key, value, self.tokens)
        return layer

    def finish(self, count: int, evicted: bool = False) -> None:
        """After a pass of `count` tokens, evict. evicted: its attention has evicted after every token."""
        self.tokens += count
        if evicted:
            self.evictions = max(0, self.tokens - self.policy.cache)
        elif self.policy.evicts and self.used > self.policy.cache:
            self._evict()
        for layer in self.slots:
            layer.leave_window(self.policy.sinks, self.policy.recent)
        self.max_slots = max(self.max_slots, self.used)

    def undo(self) -> None:
        """Take back the slots of a pass that probed, or did not come to its end; its scores in others stay."""
        for layer in self.slots:
            layer.set_back(self._begun)

    def _evict(self) -> None:
        policy = self.policy
        ages = [self._middle(layer).source_index for layer in self.slots]
        chosen: list[Tensor] = []
        for layers in alike(self.priorities(), ages):
            priority = torch.cat([each for each, _ in layers])
            if policy.positions == "distance":
                priority = self.lower_lost(priority, torch.cat([age for _, age in layers]), self.tokens, self.chunk)
            chosen += (highest(priority, policy.hitters, self.kernel) + policy.sinks).chunk(len(layers))
        for layer, kept in zip(self.slots, chosen, strict=True):
            layer.compact(policy.sinks, policy.recent, kept)
            if layer.used != policy.cache:
                raise AssertionError(f"{layer.used} slots after an eviction, the budget is {policy.cache}")
        self.evictions += 1

    def lower_lost(self, priority: Tensor, source_index: Tensor, seen: int, ahead: int) -> Tensor:
        """`priority` with what the next `ahead` tokens could only look at from a distance that is not theirs last."""
        lowest = -math.inf if priority.is_floating_point() else torch.iinfo(priority.dtype).min
        return priority.masked_fill(source_index < seen + ahead - self.rotary.positions, lowest)

    def priorities(self) -> Sequence[Tensor]:
        """What the policy makes of the middle slots now, by layer: [batch, kv_heads, middle], the highest stay."""
        return checked_priorities(self.policy, [self._middle(layer) for layer in self.slots], self.tokens)

    def _middle(self, layer: LayerSlots) -> Middle:
        middle = slice(self.policy.sinks, layer.used - self.policy.recent)
        newest = None if layer.newest is None else layer.newest[:, :, middle]
        return Middle(layer.scores[:, :, middle], layer.source_index[:, :, middle], newest)

    def reset(self) -> None:
        """Empty the cache, keep the buffers."""
        for layer in self.slots:
            layer.used = 0
        self.tokens = 0

    # What it holds

    @property
    def used(self) -> int:
        """Slots per layer and KV head now."""
        return self.slots[0].used if self.slots else 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of the most slots held after a pass."""
        return sum(layer.kv_bytes(self.max_slots) for layer in self.slots)

    def composition(self) -> dict[str, int]:
        """Slots per layer and head now, by what keeps them there."""
        sinks = min(self.policy.sinks, self.used)
        recent = min(self.policy.recent, self.used - sinks)
        return {"sinks": sinks, "hitters": self.used - sinks - recent, "recent": recent}

    # Saving

    def state(self) -> dict[str, Tensor]:
        """The valid slots as tensors, to go on later with the same digits."""
        tensors: dict[str, Tensor] = {}
        for number, layer in enumerate(self.slots):
            tensors.update({f"layer{number}.{name}": tensor for name, tensor in layer.state().items()})
        return tensors

    def load_state(self, tensors: dict[str, Tensor], tokens: int, evictions: int, max_slots: int) -> None:
        """Put back what `state` gave. Raises UserError where a tensor is missing or of another shape."""
        self.slots = []
        self.tokens, self.evictions, self.max_slots = tokens, evictions, max_slots
        number = 0
        while f"layer{number}.keys" in tensors:
            head = f"layer{number}."
            parts = {name.removeprefix(head): part for name, part in tensors.items() if name.startswith(head)}
            try:
                used = parts["source_index"].shape[2]
                room = self.policy.cache if self.policy.evicts else used
                layer = self._make_layer(parts["keys"], parts["values"], max(room + self.chunk, used), self.kernel)
                layer.load(parts)
            except KeyError as missing:
                raise UserError(f"The saved cache lacks {head}{missing.args[0]}; it is damaged.") from None
            except (ValueError, IndexError):
                raise UserError(
                    f"The saved cache's layer {number} has tensors of other shapes; it is damaged."
                ) from None
            self.slots.append(layer)
            number += 1
        if tokens and number != self.layers_count:
            raise UserError(f"The saved cache holds {number} layers, the model has {self.layers_count}.")
        for number, layer in enumerate(self.slots):
            layer.table = self.rotary.table(number, layer.keys.device)
