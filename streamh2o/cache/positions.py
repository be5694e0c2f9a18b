"""Where queries and slots stand inside the cache, and the rotation that says so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamh2o.cache.rotary import RotaryTable
from streamh2o.cache.slot_cache import SlotCache
from streamh2o.cache.slots import LayerSlots
from streamh2o.kernels import compiled


def in_cache_positions(
    cache: SlotCache, layer: LayerSlots, chunk: int, room: int | None = None
) -> tuple[int, list[tuple[int, int, Any]]]:
    """Where the policy puts queries and slots before the rotation.

    chunk: how many of the layer's last slots are the queries' own. room: how many queries these positions have to
    serve, where there are more to come than the chunk's.
    Returns the position of the chunk's first query, and runs `(start, end, position)` that cover the slots: an int is
    the position of the run's first slot, the others following; a tensor [batch, kv_heads, end - start] gives each
    slot its own. All lie in 0 .. trained length - 1.
    """
    if cache.keeps_rotated and room is None:
        return cache.kept_positions(layer, chunk)
    policy, n = cache.policy, layer.used - chunk
    if policy.positions == "rolled" or cache.evictions == 0:
        return n, [(0, layer.used, 0)]
    base = min(cache.tokens, cache.rotary.positions - (chunk if room is None else room))
    sinks = min(policy.sinks, n)
    middle = max(sinks, n - policy.recent)
    runs: list[tuple[int, int, Any]] = []
    if sinks:
        runs.append((0, sinks, max(0, base - policy.recent - policy.sinks)))
    if middle > sinks:
        own = layer.source_index[:, :, sinks:middle]
        runs.append((sinks, middle, (own - (cache.tokens - base)).clamp_(min=0)))
    runs.append((middle, layer.used, base - (n - middle)))
    return base, runs


@dataclass(frozen=True)
class Branches:
    """Several continuations of the text in one pass, none of which sees another.

    offsets: [n], where each token of the pass stands after the text's last one. mask: [n, n], 0 where a token sees
    another one of the pass, else minus infinity; it is added to the logits.
    """

    offsets: Tensor
    mask: Tensor

    @property
    def longest(self) -> int:
        """Tokens of the longest continuation."""
        return int(self.offsets.max()) + 1 if self.offsets.numel() else 0


def _spread(layer: LayerSlots, runs: Sequence[tuple[int, int, Any]]) -> Tensor:
    """The position of every slot, [batch or 1, kv_heads or 1, used], from runs as of `in_cache_positions`."""
    parts = []
    for start, end, at in runs:
        if isinstance(at, int):
            at = torch.arange(at, at + end - start, device=layer.source_index.device)
        parts.append(at if at.dim() == 3 else at.view(1, 1, -1))
    if len(parts) == 1:
        return parts[0]
    rows = max((part.shape[:2] for part in parts), key=math.prod)
    return torch.cat([part.expand(*rows, -1) for part in parts], dim=2)


def rotated(
    cache: SlotCache, layer: LayerSlots, query: Tensor, scaling: float, branches: Branches | None = None
) -> tuple[Tensor, Tensor]:
    """Rotated copies: queries [batch, heads, C, head_dim] times `scaling`, and all keys of the layer.

    Both have `table.extra` components more where slopes stand for a rotation (ALiBi).
    """
    if cache.keeps_rotated:
        return cache.rotate_new(layer, query, scaling)
    table, chunk = layer.table, query.shape[2]
    if table is None:
        return query * scaling, layer.valid()[0]
    first, runs = in_cache_positions(cache, layer, chunk)
    newest: Any = slice(first, first + chunk)
    if branches is not None:
        newest = (first + branches.offsets).view(1, 1, -1)
        start, end, position = runs[-1]
        runs[-1:] = [(start, end - chunk, position), (end - chunk, end, newest)]
    if cache.kernel.takes(query) and isinstance(table, RotaryTable):
        own = [(0, chunk, first if branches is None else newest)]
        style = table.style == "interleaved"
        queries = compiled.rotate(query, own, table.cos, table.sin, scaling, style)
        return queries, compiled.rotate(layer.valid()[0], runs, table.cos, table.sin, 1.0, style)
    queries = table.place_queries(query, newest, scaling)
    parts, keys = [], layer.valid()[0]
    for start, end, position in runs:
        if isinstance(position, int):
            position = slice(position, position + end - start)
        parts.append(table.place_keys(keys[:, :, start:end], position))
    return queries, parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def beyond_window(
    cache: SlotCache, layer: LayerSlots, chunk: int, window: int | None, branches: Branches | None = None
) -> Tensor | None:
    """True where a layer that looks back over `window` tokens cannot see: [batch or 1, kv_heads or 1, 1, C, n + C].

    Distances are those inside the cache, as the rotation has them: what the model sees is a text made of the kept
    tokens. So a layer whose window is larger than the cache sees all of it, sinks too. None where nothing is hidden.
    """
    if window is None:
        return None
    first, runs = in_cache_positions(cache, layer, chunk)
    if first + chunk <= window:
        return None
    device = layer.source_index.device
    queries = first + (torch.arange(chunk, device=device) if branches is None else branches.offsets)
    places = _spread(layer, runs).expand(*layer.source_index.shape[:2], -1).clone()
    places[:, :, layer.used - chunk :] = queries
    return (queries[:, None] - places[:, :, None, None, :]) >= window
