"""The KV cache of fixed size that a model is given: its layers' slots, the eviction at the end of a pass, saving."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from streamh2o.cache.rotary import Rotary
from streamh2o.cache.slots import LayerSlots, highest
from streamh2o.errors import UserError
from streamh2o.policies.base import Middle, Policy, alike

_appended = threading.local()


Owners = list[tuple["SlotCache", LayerSlots]]


def tell_appended(owners: Owners) -> None:
    """Name the caches and layers to which the attention that follows in this thread belongs, in the order of rows."""
    _appended.owners = owners


def take_appended() -> Owners:
    """The caches and layers of the `update` that has just run in this thread; the attention that follows is theirs."""
    owners: Owners | None = getattr(_appended, "owners", None)
    if owners is None:
        raise UserError("The model is attached to streamh2o but was called without its cache; detach it first.")
    _appended.owners = None
    return owners


class FixedCache(Cache):
    """What models of `transformers` ask any cache of ours, be it for a stream or for `generate`.

    tokens: columns of the batch that went through so far (not slots). layers_count: the model's layers.
    """

    tokens: int
    layers_count: int

    @property
    def told(self) -> int:
        """Of how many tokens before those at hand a model is told: of none, for masks and positions are ours.

        What some models make for so many tokens, which is never used, would grow with the text.
        """
        return 0

    def get_seq_length(self, layer_idx: int = 0, **kwargs: Any) -> int:
        return self.told

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[int, int]:
        if isinstance(query_length, Tensor):  # as older releases of transformers give it: the positions
            query_length = query_length.shape[0] if query_length.dim() else int(query_length)
        return query_length + self.told, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.told

    def get_max_cache_shape(self, *args: Any, **kwargs: Any) -> int:
        return -1

    get_max_length = get_max_cache_shape

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * self.layers_count

    is_linear = is_dummy = is_sliding

    @property
    def is_compileable(self) -> bool:
        return False

    def __len__(self) -> int:
        return self.layers_count


class SlotCache(FixedCache):
    """The KV cache that a model of `transformers` is given: fixed size, whatever the length of the stream.

    policy: who survives an eviction. rotary: the model's angles. chunk: most tokens of one pass.
    layers_count: how many layers the model has; after the attention of the last one the cache evicts.
    group: store each key and value so many times, to keep slots and scores for each query head instead of each KV
        head (the H2O authors' code); 1 stores them once.
    """

    keeps_rotated = False  # True: it has rotated keys at hand, which `rotate_new` gives

    def __init__(self, policy: Policy, rotary: Rotary, layers_count: int, chunk: int = 256, group: int = 1) -> None:
        self.policy, self.rotary, self.chunk = policy, rotary, chunk
        self.layers_count = layers_count
        self.group = group
        self.make_layer: Callable[[Tensor, Tensor, int], LayerSlots] = LayerSlots  # keys, values, room
        self.layers = []  # what a cache of transformers is made of; ours are `slots`
        self.slots: list[LayerSlots] = []
        self.tokens = 0  # tokens of the stream before the running pass
        self.evictions = 0
        self.max_slots = 0
        self.probe: Callable[[LayerSlots, Tensor], None] | None = None  # sees the probabilities, instead of scoring
        # attends, and evicts after every token, instead of once per pass: cache, layer, queries, scaling to the output
        self.evicting: Callable[[SlotCache, LayerSlots, Tensor, float], Tensor] | None = None

    def rotate_new(self, layer: LayerSlots, query: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """Rotated queries times `scaling`, and all rotated keys of the layer, of which only the newest are computed."""
        raise NotImplementedError

    def kept_positions(self, layer: LayerSlots, chunk: int) -> tuple[int, list[tuple[int, int, Any]]]:
        """What `in_cache_positions` returns, of keys that keep the position they got at the last eviction."""
        raise NotImplementedError

    # What `transformers` calls

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append un-rotated keys and values; returns all valid ones of the layer, keys still un-rotated."""
        if self.group > 1:
            key_states = key_states.repeat_interleave(self.group, dim=1)
            value_states = value_states.repeat_interleave(self.group, dim=1)
        if layer_idx == len(self.slots):
            room = self.policy.cache if self.policy.evicts else 0
            self.slots.append(self.make_layer(key_states, value_states, room + max(self.chunk, key_states.shape[2])))
            self.slots[-1].table = self.rotary.table(layer_idx, key_states.device)
        layer = self.slots[layer_idx]
        layer.append(key_states, value_states, self.tokens)
        tell_appended([(self, layer)])
        return layer.valid()

    # Eviction

    def layer_done(self, layer: LayerSlots, new_tokens: int) -> None:
        """Called after a layer's attention; after the last one the pass ends and the cache evicts."""
        if len(self.slots) < self.layers_count or layer is not self.slots[-1]:
            return
        if self.probe is not None:
            for each in self.slots:
                each.used -= new_tokens
            return
        self.tokens += new_tokens
        if self.evicting is not None:
            self.evictions = max(0, self.tokens - self.policy.cache)
        elif self.policy.evicts and self.slots[0].used > self.policy.cache:
            self._evict()
        for each in self.slots:
            each.leave_window(self.policy.sinks, self.policy.recent)
        self.max_slots = max(self.max_slots, self.slots[0].used)

    def _evict(self) -> None:
        policy = self.policy
        ages = [self._middle(layer).source_index for layer in self.slots]
        chosen: list[Tensor] = []
        for layers in alike(self.priorities(), ages):
            priority = torch.cat([each for each, _ in layers])
            if policy.positions == "distance":
                priority = self.lower_lost(priority, torch.cat([age for _, age in layers]), self.tokens, self.chunk)
            chosen += (highest(priority, policy.hitters) + policy.sinks).chunk(len(layers))
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
        return self.policy.priorities([self._middle(layer) for layer in self.slots], self.tokens)

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
                layer = self.make_layer(parts["keys"], parts["values"], max(room + self.chunk, used))
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
