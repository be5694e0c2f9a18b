"""Eviction after every token at the speed of whole chunks: the losses of chunks of one token, without their passes.

What a query sees depends, within its layer, only on which slots that layer has evicted before it. So the linear layers
take the whole chunk, and a layer's attention follows its own evictions, token by token, before the next layer begins.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from streamh2o.cache.positions import rotated
from streamh2o.cache.rotary import RotaryTable
from streamh2o.cache.slot_cache import SlotCache
from streamh2o.cache.slots import LayerSlots
from streamh2o.errors import UsageError
from streamh2o.kernels.attention import attend_and_sum
from streamh2o.kernels.plain import column_sums
from streamh2o.policies.base import Policy
from streamh2o.stream.token_scan import attend_scan, products, scan_rows

BAND_ROWS = 64  # queries at a time where the evictions are known beforehand


def require_token_eviction(policy: Policy) -> None:
    """Raise UsageError where `policy` cannot evict layer by layer."""
    if policy.across_layers:
        raise UsageError(
            f"--evict token goes layer by layer, and --policy {policy.name} looks at all layers at once; use --chunk 1."
        )
    if policy.recomputes:
        raise UsageError(f"--policy {policy.name} reads its window anew and has nothing to evict; leave --evict out.")


def attend_and_evict(cache: SlotCache, layer: LayerSlots, query: Tensor, scaling: float) -> Tensor:
    """Attention of the C queries of a pass, each over the slots that are left after the tokens before it.

    query: [batch, heads, C, head_dim], not rotated; the keys of the same tokens are the last of `layer`. Returns
    [batch, heads, C, head_dim]; `layer` then holds what is left after the last token.
    """
    policy, chunk = cache.policy, query.shape[2]
    free = policy.cache - (layer.used - chunk)
    if chunk <= free:
        return _attend_filling(cache, layer, query, scaling)
    keys, values = layer.take_back(chunk)
    if not policy.hitters:
        rows, attend = chunk, _attend_band
    else:
        rows, attend = scan_rows(cache, query), attend_scan
    starts = [0, free] if free else [0]
    if policy.positions == "distance" and cache.tokens + starts[-1] == policy.cache:
        starts.append(starts[-1] + 1)  # alone: the query before the first eviction sees everything at its own position
    starts += range(starts[-1] + rows, chunk, rows)
    outputs = []
    for start, end in pairwise([*(start for start in starts if start < chunk), chunk]):
        seen = cache.tokens + start
        layer.append(keys[:, :, start:end], values[:, :, start:end], seen)
        part = query[:, :, start:end]
        if end <= free:
            outputs.append(_attend_filling(cache, layer, part, scaling))
        else:
            outputs.append(attend(cache, layer, part, scaling, seen))
    return torch.cat(outputs, dim=2)


def _attend_filling(cache: SlotCache, layer: LayerSlots, query: Tensor, scaling: float) -> Tensor:
    """While the cache fills: nothing is evicted, so the chunk is an ordinary one."""
    queries, keys = rotated(cache, layer, query, scaling)
    weights = _weights(cache.policy, query) if cache.policy.scored else None
    output, sums = attend_and_sum(
        queries, keys, layer.values[:, :, : layer.used], weights, cache.policy.far, kernel=cache.kernel
    )
    if sums is not None:
        layer.scores[:, :, : layer.used] *= cache.policy.fade(1) ** query.shape[2]
        layer.scores[:, :, : sums.shape[-1]] += sums
    return output


def _weights(policy: Policy, query: Tensor) -> Tensor:
    """What the attention of each query counts when the last of them has passed, by the rule for one token: [C]."""
    age = torch.arange(query.shape[2] - 1, -1, -1, dtype=torch.float32, device=query.device)
    return policy.query_weights(1, query.device) * policy.fade(1) ** age


def _attend_band(cache: SlotCache, layer: LayerSlots, query: Tensor, scaling: float, seen: int) -> Tensor:
    """Sinks and recent tokens alone: each query drops the oldest of the window, so it sees a band and the sinks."""
    policy, rotary, n = cache.policy, layer.table, cache.policy.cache
    assert isinstance(rotary, RotaryTable)
    batch, heads, chunk, dim = query.shape
    kv_heads, sinks = layer.keys.shape[1], policy.sinks
    shape = (batch * kv_heads, heads // kv_heads, chunk, dim)
    cos, sin = rotary.cos, rotary.sin
    keys = rotary.rotate(layer.keys[:, :, : layer.used], cos[: layer.used], sin[: layer.used]).flatten(0, 1)
    values = layer.values[:, :, : layer.used].flatten(0, 1)
    near = rotary.rotate(query, cos[n : n + chunk], sin[n : n + chunk], scaling).view(shape)
    to_sinks = rotary.rotate(query, cos[n], sin[n], scaling).view(shape)
    if policy.scored:
        weights = _weights(policy, query)
        layer.scores[:, :, : layer.used] *= policy.fade(1) ** chunk
    outputs = []
    for start in range(0, chunk, BAND_ROWS):
        end = min(start + BAND_ROWS, chunk)
        band, count = slice(sinks + start, n + end), end - start
        seen_keys = torch.cat([keys[:, :sinks], keys[:, band]], dim=1)
        logits = products(near[:, :, start:end].flatten(1, 2), seen_keys)
        if sinks:
            logits[..., :sinks] = products(to_sinks[:, :, start:end].flatten(1, 2), keys[:, :sinks])
        logits = logits.view(batch, kv_heads, -1, count, seen_keys.shape[1])
        outside = torch.ones(logits.shape[-2], logits.shape[-1] - sinks, dtype=torch.bool, device=query.device)
        outside = outside.triu(policy.recent + 1) | outside.tril(-1)  # not yet there; no longer there
        logits[..., sinks:].masked_fill_(outside, -math.inf)
        probabilities = logits.softmax(dim=-1)
        if policy.scored:
            sums = column_sums(probabilities, weights[start:end], policy.far)
            layer.scores[:, :, :sinks] += sums[..., :sinks]
            layer.scores[:, :, band.start : band.start + sums.shape[-1] - sinks] += sums[..., sinks:]
        flat = probabilities.to(values.dtype).view(batch * kv_heads, -1, logits.shape[-1])
        mixed = torch.bmm(flat, torch.cat([values[:, :sinks], values[:, band]], dim=1))
        outputs.append(mixed.view(batch, heads, count, -1))
    layer.compact(sinks, policy.recent, layer.source_index.new_empty(batch, kv_heads, 0))
    return torch.cat(outputs, dim=2)
