"""Evictions in turn within a layer: logits of many queries at once, then mask, softmax, sums and choice of each.

Where the kernel for CPUs is in use it does all of that, for policies that choose as `Policy` does.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from streamh2o.cache.rotary import RotaryTable
from streamh2o.cache.slot_cache import SlotCache
from streamh2o.cache.slots import LayerSlots
from streamh2o.kernels import compiled
from streamh2o.policies.base import Middle, Policy, checked_priorities

AGES = 1 << 20  # of tokens, that the kernel has a table for


def scan_rows(cache: SlotCache, query: Tensor) -> int:
    """How many queries at a time: each block re-rotates the cache, and makes n / 2 logits of a slot that can roll, but
    in the kernel. There it has one column more for each query."""
    return 16 if cache.policy.positions == "rolled" and not _takes(cache, query) else 64


def _takes(cache: SlotCache, query: Tensor) -> bool:
    """Whether the kernel is in use, and computes what this policy asks for."""
    policy, kind = cache.policy, type(cache.policy)
    own = kind.priority is not Policy.priority or kind.priorities is not Policy.priorities
    if own or not policy.scored or not cache.kernel.takes(query) or policy.newest_weights(1, query.device) is not None:
        return False
    try:
        hash(policy)
    except TypeError:  # a knob has none, so that its divisors could not be kept from one call to the next
        return False
    # Older slots than the table has go first at true distances, and are no case of their own where nothing is divided.
    return policy.positions == "distance" or kind.divisor is Policy.divisor or cache.tokens + query.shape[2] < AGES


@lru_cache(maxsize=4)
def _divisors(policy: Policy, positions: int) -> Tensor | None:
    """`Policy.divisor` by age, with what `SlotCache.lower_lost` makes of it: the last one is for all older ages."""
    rolled = policy.positions == "rolled"
    ages = torch.arange(AGES if rolled else positions + 1)
    given = policy.divisor(ages)
    if given is None and rolled:
        return None
    divisors = (
        torch.ones(len(ages))
        if given is None
        else given.float().expand(len(ages)).clone(memory_format=torch.contiguous_format)
    )
    if rolled:
        return divisors
    divisors[positions] = math.inf
    return divisors


def products(query: Tensor, keys: Tensor) -> Tensor:
    """Logits [rows, queries, slots] of query [rows, queries, head_dim] and keys [rows, slots, head_dim].

    Made in the type of the query (float16 would overflow above 65504), and given in float32, or float64 if that is it.
    """
    if query.dtype == torch.float16:
        query, keys = query.float(), keys.float()
    logits = torch.bmm(query, keys.transpose(1, 2))
    return logits.float() if logits.dtype == torch.bfloat16 else logits


def attend_scan(cache: SlotCache, layer: LayerSlots, query: Tensor, scaling: float, seen: int) -> Tensor:
    """Attention of C queries over sinks, hitters and recent tokens, with an eviction after each.

    query: [batch, heads, C, head_dim], not rotated, of the tokens from `seen` on, whose keys are the last of `layer`;
    before them the cache is full. Returns [batch, heads, C, head_dim]; `layer` then holds what is left.
    """
    policy, count = cache.policy, query.shape[2]
    if _takes(cache, query):
        table = layer.table
        assert isinstance(table, RotaryTable)
        slots = *layer.valid(), layer.scores[:, :, : layer.used], layer.source_index[:, :, : layer.used]
        output, kept = compiled.attend_scan(
            query,
            *slots,
            table.cos,
            table.sin,
            _divisors(policy, cache.rotary.positions),
            sinks=policy.sinks,
            hitters=policy.hitters,
            sink_distance=first_sink_distance(policy, seen),
            far=policy.far,
            weight=float(policy.query_weights(1, query.device)[0]),
            fade=policy.fade(1),
            scaling=scaling,
            interleaved=table.style == "interleaved",
            rolled=policy.positions == "rolled",
        )
        layer.compact(policy.sinks, policy.recent, kept)
        return output
    batch, kv_heads = layer.keys.shape[:2]
    queries = query.reshape(batch * kv_heads, -1, count, query.shape[-1]).transpose(1, 2)
    logits, moved = _logits(cache, layer, queries, scaling, seen)
    probabilities, kept = _evict_in_turn(cache, layer, logits, moved, seen)
    values = layer.values[:, :, : layer.used].flatten(0, 1)
    output = torch.bmm(probabilities.to(values.dtype).flatten(1, 2), values)  # [rows, C * group, head_dim]
    layer.compact(policy.sinks, policy.recent, kept)
    output = output.view(batch * kv_heads, count, -1, output.shape[-1]).transpose(1, 2)
    return output.reshape(batch, query.shape[1], count, -1)


def _logits(
    cache: SlotCache, layer: LayerSlots, queries: Tensor, scaling: float, seen: int
) -> tuple[Tensor, Tensor | None]:
    """Logits [rows, C, group, slots] of queries [rows, C, group, head_dim], and those of slots that evictions move.

    The first are right where a slot keeps its distance to its own query: at the sinks always, and at the others while
    each token takes the query one step away from them. With rolled positions a middle slot stays at its place, unless
    an older slot is evicted; the second, [rows, C * (C + 1) / 2, group, middle], are then, for one query after another,
    the logits of the middle columns after 0, 1, ..., i such evictions. None at true distances.
    """
    policy, rotary = cache.policy, layer.table
    assert isinstance(rotary, RotaryTable)
    rows, count, group, _ = queries.shape
    slots, sinks, hitters = layer.used, policy.sinks, policy.hitters
    n, middle = slots - count, policy.hitters + count
    cos, sin = rotary.cos, rotary.sin
    place = torch.arange(slots, device=queries.device)

    def turned(which: Tensor, position: Tensor) -> Tensor:  # [rows, positions * group, head_dim]
        return rotary.rotate(which, cos[position][:, None], sin[position][:, None], scaling).flatten(1, 2)

    moved = None
    if policy.positions == "rolled":
        start = n
        keys = rotary.rotate(layer.keys[:, :, :slots], cos[:slots], sin[:slots]).flatten(0, 1)
        who, steps = torch.tril_indices(count, count, device=queries.device)
        table = products(turned(queries[:, who], n + steps), keys[:, sinks : sinks + middle])
        moved = table.view(rows, len(who), group, middle)
        if policy.recent < count:  # then even the middle has tokens that are newer than a query
            moved.masked_fill_((place[sinks : sinks + middle] > n + who[:, None])[:, None], -math.inf)
    else:  # the first query stands at zero, older slots at negative positions, where the sines change their sign
        start = 0
        distance = seen - layer.source_index[:, :, sinks : sinks + hitters]
        ahead = place[sinks + hitters :] - n
        rigid_sin = sin[ahead.abs()] * ahead.sign()[:, None]
        parts = [
            rotary.rotate(layer.keys[:, :, :sinks], cos[:sinks], sin[:sinks]),
            rotary.rotate(layer.keys[:, :, sinks : sinks + hitters], cos[distance], -sin[distance]),
            rotary.rotate(layer.keys[:, :, sinks + hitters : slots], cos[ahead.abs()], rigid_sin),
        ]
        keys = torch.cat(parts, dim=2).flatten(0, 1)
    logits = products(turned(queries, start + place[:count]), keys)
    if sinks:
        first = place.new_full((count,), first_sink_distance(policy, seen))
        logits[..., :sinks] = products(turned(queries, first), keys[:, :sinks])
    logits = logits.view(rows, count, group, slots)
    future = place[n:] > n + place[:count, None]  # [C, C]
    logits[..., n:].masked_fill_(future[:, None], -math.inf)
    return logits, moved


def first_sink_distance(policy: Policy, seen: int) -> int:
    """How far from token `seen` the first sink stands in a full cache; the others follow it."""
    if policy.positions == "rolled" or seen <= policy.cache:  # nothing evicted yet: everything at its own position
        return policy.cache
    return policy.recent + policy.sinks


def _evict_in_turn(
    cache: SlotCache, layer: LayerSlots, logits: Tensor, moved: Tensor | None, seen: int
) -> tuple[Tensor, Tensor]:
    """Probabilities [rows, C, group, slots] of `_logits`, and the middle slots left at the end [batch, kv_heads,
    hitters]; the layer's scores are what the queries have made of them.

    Every slot keeps its column until then, and a mask hides those evicted. These lines run once a token and layer, so
    that each call of torch counts.
    """
    policy = cache.policy
    rows, count, group, slots = logits.shape
    batch, kv_heads = layer.keys.shape[:2]
    sinks, hitters, device = policy.sinks, policy.hitters, logits.device
    n, middle = slots - count, policy.hitters + count
    scores = layer.scores[:, :, :slots].to(logits.dtype, copy=True).contiguous()
    source_index = layer.source_index[:, :, :slots]
    gone = torch.zeros_like(scores)  # -inf at evicted slots
    scores_by_row, gone_by_row = scores.view(rows, 1, slots), gone.view(rows, 1, slots)
    columns = torch.arange(sinks, sinks + middle, device=device)
    # Columns of the middle that are left, in the order of the stream: the first hitters + 1 may be evicted by the query
    # at hand; each query brings one more.
    order, numbers = columns.expand(batch, kv_heads, middle), torch.arange(middle, device=device)
    steps = torch.zeros(batch, kv_heads, middle, dtype=torch.int64, device=device)  # evictions of slots older than each
    older = torch.empty_like(steps)
    tables, targets = [], []
    if moved is not None:
        tables = moved.split(list(range(1, count + 1)), dim=1)
        targets = logits[..., sinks : sinks + middle].split(1, dim=1)
    steps_by_row = steps.view(rows, 1, 1, middle).expand(rows, 1, group, middle)
    far_enough = torch.ones(count, slots, dtype=logits.dtype, device=device).tril_(n - policy.far).unbind()
    every_head = torch.ones(rows, 1, group, dtype=logits.dtype, device=device)
    weight, fade = float(policy.query_weights(1, torch.device("cpu"))[0]), policy.fade(1)
    newest_weights = policy.newest_weights(1, device)
    oldest = seen
    if policy.positions == "distance":  # a GPU would have to be waited for; without, some may be lost from early on
        oldest = 0 if device.type == "cuda" else int(source_index[:, :, sinks].min())
    some_lost = seen + count - oldest >= cache.rotary.positions
    probabilities = []
    for i, row in enumerate(logits.unbind(1)):
        if tables:
            torch.gather(tables[i], 1, steps_by_row, out=targets[i])
        attention = (row + gone_by_row).softmax(-1)  # [rows, group, slots]
        probabilities.append(attention)
        if policy.scored:
            counted = attention * far_enough[i] if policy.far else attention
            scores_by_row.baddbmm_(every_head, counted, beta=fade, alpha=weight)
        candidates = order[..., : hitters + 1]
        newest = None
        if newest_weights is not None:
            layer.newest = (attention.sum(1) * newest_weights).view_as(scores)
            newest = layer.newest.gather(-1, candidates)
        among = Middle(scores.gather(-1, candidates), source_index.gather(-1, candidates), newest)
        priority = checked_priorities(policy, [among], seen + i + 1)[0]
        if some_lost:
            priority = cache.lower_lost(priority, among.source_index, seen + i + 1, 1)
        least = priority.argmin(-1, keepdim=True)
        column = candidates.gather(-1, least)
        gone.scatter_(-1, column, -math.inf)
        if tables:
            steps += torch.gt(columns, column, out=older)
        numbers = numbers[:-1]
        order = torch.where(numbers >= least, order[..., 1:], order[..., :-1])
    layer.scores[:, :, :slots] = scores
    return torch.stack(probabilities, dim=1), order
