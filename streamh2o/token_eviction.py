"""Eviction after every token at the speed of whole chunks: the losses of chunks of one token, without their passes.

What a query sees depends, within its layer, only on which slots that layer has evicted before it. So the linear layers
take the whole chunk, and a layer's attention follows its own evictions, token by token, before the next layer begins.
Logits are made for many queries at once; what is left for the turn of each token is to mask, raise, sum and choose.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from streamh2o.attention import attend_and_sum, column_sums, rotated
from streamh2o.cache import LayerSlots, SlotCache
from streamh2o.errors import UsageError
from streamh2o.policies.base import Middle, Policy

BAND_ROWS = 64  # queries at a time where the evictions are known beforehand
SCAN_ROWS = 64  # where they are not, and the distance of a slot does not depend on them
ROLLED_ROWS = 16  # where it does: the logits of n queries are made for up to n distances of every slot


def require_token_eviction(policy: Policy) -> None:
    """Raise UsageError where `policy` cannot evict layer by layer."""
    if policy.across_layers:
        raise UsageError(
            f"--evict token goes layer by layer, and --policy {policy.name} looks at all of them at once; use --chunk 1."
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
        rows, attend = ROLLED_ROWS if policy.positions == "rolled" else SCAN_ROWS, _attend_scan
    starts = [0, free] if free else [0]
    if policy.positions == "distance" and cache.tokens + starts[-1] == policy.cache:
        starts.append(starts[-1] + 1)  # the query before the first eviction sees everything at its own position
    starts += range(starts[-1] + rows, chunk, rows)
    outputs = []
    for start, end in zip(starts, [*starts[1:], chunk], strict=True):
        if start == end:
            continue
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
    output, sums = attend_and_sum(queries, keys, layer.values[:, :, : layer.used], weights, cache.policy.far)
    if sums is not None:
        layer.scores[:, :, : layer.used] *= cache.policy.fade(1) ** query.shape[2]
        layer.scores[:, :, : sums.shape[-1]] += sums
    return output


def _weights(policy: Policy, query: Tensor) -> Tensor:
    """What the attention of each query counts when the last of them has passed, by the rule for one token: [C]."""
    age = torch.arange(query.shape[2] - 1, -1, -1, dtype=torch.float32, device=query.device)
    return policy.query_weights(1, query.device) * policy.fade(1) ** age


def _logits(query: Tensor, keys: Tensor) -> Tensor:
    """Products [rows, queries, slots] in float32 of query [rows, queries, head_dim], keys [rows, slots, head_dim]."""
    if query.dtype == torch.float16:  # overflows above 65504
        query, keys = query.float(), keys.float()
    return torch.bmm(query, keys.transpose(1, 2)).float()


def _first_slot_distance(policy: Policy, seen: int) -> int:
    """How far from every query the first sink stands, once the cache is full; the others follow it."""
    if policy.positions == "rolled" or seen <= policy.cache:
        return policy.cache
    return policy.recent + policy.sinks


def _attend_band(cache: SlotCache, layer: LayerSlots, query: Tensor, scaling: float, seen: int) -> Tensor:
    """Sinks and recent tokens alone: each query drops the oldest of the window, so it sees a band and the sinks."""
    policy, rotary, n = cache.policy, cache.rotary, cache.policy.cache
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
        logits = torch.cat(
            [
                _logits(to_sinks[:, :, start:end].flatten(1, 2), keys[:, :sinks]),
                _logits(near[:, :, start:end].flatten(1, 2), keys[:, band]),
            ],
            dim=-1,
        ).view(batch, kv_heads, -1, count, sinks + band.stop - band.start)
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


def _attend_scan(cache: SlotCache, layer: LayerSlots, query: Tensor, scaling: float, seen: int) -> Tensor:
    """Sinks, hitters and recent tokens: logits of all queries first, then the evictions in turn.

    Slots keep their column until the end; `gone` masks those evicted. Slots stand at a fixed distance (sinks), at their
    true one, or, with rolled positions, in the middle, at the place in the cache that the evictions have left them.
    """
    policy, count = cache.policy, query.shape[2]
    batch, kv_heads = layer.keys.shape[:2]
    rows, slots = batch * kv_heads, layer.used
    n, sinks, middle = slots - count, policy.sinks, policy.hitters + count
    queries = query.reshape(rows, -1, count, query.shape[-1]).transpose(1, 2)  # [rows, C, group, head_dim]
    logits, moved = _scan_logits(cache, layer, queries, scaling, seen)
    turns = logits.unbind(1)  # [rows, group, slots] each
    middles = logits[..., sinks : sinks + middle].split(1, dim=1)
    tables = None if moved is None else moved.split(list(range(1, count + 1)), dim=1)

    like = {"device": query.device}
    columns = torch.arange(sinks, sinks + middle, **like)
    places = columns[: policy.hitters] - sinks
    # Columns of the middle in the order of the stream: the first `hitters` + 1 can be evicted now, the others later.
    order = columns.expand(batch, kv_heads, middle)
    gone = torch.zeros(batch, kv_heads, slots, **like)
    gone_rows = gone.view(rows, 1, slots)
    steps = torch.zeros(batch, kv_heads, middle, dtype=torch.int64, **like)  # evictions of older slots since the start
    steps_rows = steps.view(rows, 1, 1, middle).expand(rows, 1, logits.shape[2], middle)
    scores = layer.scores[:, :, :slots].contiguous()
    scores_rows = scores.view(rows, 1, slots)
    source_index = layer.source_index[:, :, :slots]
    weight, fade = float(policy.query_weights(1, query.device)[0]), policy.fade(1)
    newest_weights = policy.newest_weights(1, query.device)
    ones = torch.ones(rows, 1, logits.shape[2], **like)
    oldest = int(source_index[:, :, sinks].min()) if policy.positions == "distance" else seen
    distant = seen + count - oldest >= cache.rotary.positions
    probabilities = []
    for i, row in enumerate(turns):
        if tables is not None:
            torch.gather(tables[i], 1, steps_rows, out=middles[i])
        attention = (row + gone_rows).softmax(-1)
        probabilities.append(attention)
        if policy.scored:
            counted = n + i + 1 - policy.far
            scores_rows[..., :counted].baddbmm_(ones, attention[..., :counted], beta=fade, alpha=weight)
        candidates = order[..., : policy.hitters + 1]
        newest = None
        if newest_weights is not None:
            newest = (attention.sum(1) * newest_weights).view_as(scores).gather(-1, candidates)
        slots_at = Middle(scores.gather(-1, candidates), source_index.gather(-1, candidates), newest)
        priority = policy.priorities([slots_at], seen + i + 1)[0]
        if distant:
            priority = cache.lower_lost(priority, slots_at.source_index, seen + i + 1, 1)
        least = priority.argmin(-1, keepdim=True)
        column = candidates.gather(-1, least)
        gone.scatter_(-1, column, -math.inf)
        if tables is not None:
            steps += columns > column
        rest = torch.arange(order.shape[-1] - 1, **like) if i == 0 else rest[:-1]
        order = torch.where(rest >= least, order[..., 1:], order[..., :-1])
    values = layer.values[:, :, :slots].flatten(0, 1)
    weights = torch.stack(probabilities, dim=1).to(values.dtype)  # [rows, C, group, slots]
    output = torch.bmm(weights.view(rows, -1, slots), values).view(*queries.shape[:3], -1)
    layer.scores[:, :, :slots] = scores
    layer.compact(sinks, policy.recent, order)
    return output.transpose(1, 2).reshape(batch, query.shape[1], count, -1)


def _scan_logits(
    cache: SlotCache, layer: LayerSlots, queries: Tensor, scaling: float, seen: int
) -> tuple[Tensor, Tensor | None]:
    """Logits [rows, C, group, slots] of queries [rows, C, group, head_dim], and those of slots that evictions move.

    The second, for rolled positions only, is [rows, C * (C + 1) / 2, group, middle]: for query i, in turn, the logits of
    the middle columns after 0, 1, ..., i evictions of older slots.
    """
    policy, rotary = cache.policy, cache.rotary
    rows, count, group, dim = queries.shape
    slots, sinks = layer.used, policy.sinks
    n, middle = slots - count, policy.hitters + count
    first = _first_slot_distance(policy, seen)
    cos, sin = rotary.cos, rotary.sin

    def turned(which: Tensor, position: Tensor) -> Tensor:
        """[rows, positions * group, head_dim]"""
        return rotary.rotate(which, cos[position][:, None], sin[position][:, None], scaling).flatten(1, 2)

    place = torch.arange(slots, device=queries.device)
    moved = None
    if policy.positions == "rolled":
        start = n
        keys = rotary.rotate(layer.keys[:, :, :slots], cos[:slots], sin[:slots]).flatten(0, 1)
        who, steps = torch.tril_indices(count, count, device=queries.device)
        table = _logits(turned(queries[:, who], n + steps), keys[:, sinks : sinks + middle])
        moved = table.view(rows, len(who), group, middle)
        if policy.recent < count:
            moved.masked_fill_((place[sinks : sinks + middle] > n + who[:, None])[:, None], -math.inf)
    else:  # the first query stands at zero, older slots at negative positions, where the sines change their sign
        start = 0
        back = seen - layer.source_index[:, :, sinks : sinks + policy.hitters]
        ahead = (place - n)[sinks + policy.hitters :]
        parts = [
            rotary.rotate(layer.keys[:, :, :sinks], cos[:sinks], sin[:sinks]),
            rotary.rotate(layer.keys[:, :, sinks : sinks + policy.hitters], cos[back], -sin[back]),
            rotary.rotate(
                layer.keys[:, :, sinks + policy.hitters : slots],
                cos[ahead.abs()],
                sin[ahead.abs()] * ahead.sign()[:, None],
            ),
        ]
        keys = torch.cat(parts, dim=2).flatten(0, 1)
    logits = _logits(turned(queries, start + place[:count]), keys)
    if sinks:
        logits[..., :sinks] = _logits(turned(queries, place.new_full((count,), first)), keys[:, :sinks])
    logits = logits.view(rows, count, group, slots)
    future = place > n + place[:count, None]  # [C, slots]
    return logits.masked_fill_(future[:, None], -math.inf), moved
