"""Attention with column sums: C queries over n + C slots, and what each slot received."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from streamh2o.cache import LayerSlots, SlotCache, take_appended
from streamh2o.errors import UserError
from streamh2o.policies.base import Policy

NAME = "streamh2o"


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
        distance = cache.tokens - layer.source_index[:, :, sinks:middle]
        runs.append((sinks, middle, (base - distance).clamp_(min=0)))
    runs.append((middle, layer.used, base - (n - middle)))
    return base, runs


class Branches:
    """What to give `Stream.probe` for several continuations of the text in one pass, none of which sees another.

    The pass is `stem` tokens that all of them begin with, then the branches, of `lengths` tokens, one after another.
    """

    def __init__(self, stem: int, lengths: Sequence[int], device: torch.device) -> None:
        parts = [torch.arange(stem), *(torch.arange(stem, stem + length) for length in lengths)]
        owner = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor([len(part) for part in parts]))
        seen = ((owner[:, None] == owner) | (owner == 0)).tril()
        self.offsets = torch.cat(parts).to(device)  # [n], positions after the text's last token
        self.mask = torch.zeros(seen.shape).masked_fill_(~seen, -math.inf).to(device)  # [n, n], added to the logits

    def __call__(self, layer: LayerSlots, probabilities: Tensor) -> None:
        """Nothing: what counts are the hidden states."""


def rotated(
    cache: SlotCache, layer: LayerSlots, query: Tensor, scaling: float, branches: Branches | None = None
) -> tuple[Tensor, Tensor]:
    """Rotated copies: queries [batch, heads, C, head_dim] times `scaling`, and all keys of the layer."""
    if cache.keeps_rotated:
        return cache.rotate_new(layer, query, scaling)
    rotary, chunk = layer.table, query.shape[2]
    if rotary is None:
        return query * scaling, layer.valid()[0]
    first, runs = in_cache_positions(cache, layer, chunk)
    newest: Any = slice(first, first + chunk)
    if branches is not None:
        newest = first + branches.offsets
        start, end, position = runs[-1]
        runs[-1:] = [(start, end - chunk, position), (end - chunk, end, newest)]
    queries = rotary.rotate(query, rotary.cos[newest], rotary.sin[newest], scaling)
    parts, keys = [], layer.valid()[0]
    for start, end, position in runs:
        if isinstance(position, int):
            position = slice(position, position + end - start)
        parts.append(rotary.rotate(keys[:, :, start:end], rotary.cos[position], rotary.sin[position]))
    return queries, parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


@lru_cache(maxsize=8)
def _future(chunk: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[chunk, chunk] with -inf where the key comes after the query."""
    return torch.full((chunk, chunk), -math.inf, dtype=dtype, device=device).triu(1)


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
    places = layer.source_index[:, :, : layer.used].clone()  # [batch, kv_heads, n + C]
    for start, end, position in runs:
        run = position
        if isinstance(position, int):
            run = torch.arange(position, position + end - start, device=device)
        places[:, :, start:end] = run
    places[:, :, layer.used - chunk :] = queries
    return (queries[:, None] - places[:, :, None, None, :]) >= window


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None = None,
    hidden: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of the last C of n + C slots.

    query: rotated and scaled, [batch, heads, C, head_dim]; keys, values: [batch, kv_heads, n + C, head_dim]. mask:
    [C, C], added to the logits of the last C slots in place of the causal one. hidden: as `beyond_window` gives it.
    softcap: logits are squeezed below it by a tanh (Gemma 2).
    Returns the output [batch, heads, C, head_dim] and the probabilities [batch, kv_heads, group, C, n + C], in the
    type of the query; the softmax is computed in float32.
    """
    batch, heads, chunk, head_dim = query.shape
    kv_heads, slots = keys.shape[1:3]
    grouped = query.reshape(batch * kv_heads, -1, head_dim)  # [batch * kv_heads, group * C, head_dim]
    flat_keys, flat_values = keys.flatten(0, 1), values.flatten(0, 1)
    if query.dtype == torch.float16:  # float16 overflows above 65504
        logits = torch.bmm(grouped.float(), flat_keys.float().transpose(1, 2))
    elif chunk == 1 and query.dtype == torch.bfloat16:  # the other way round a few queries take a third of the time
        logits = torch.bmm(flat_keys, grouped.transpose(1, 2)).transpose(1, 2).contiguous()
    else:
        logits = torch.bmm(grouped, flat_keys.transpose(1, 2))
    if softcap:
        logits.div_(softcap).tanh_().mul_(softcap)
    if hidden is not None:
        logits.view(batch, kv_heads, -1, chunk, slots).masked_fill_(hidden, -math.inf)
    if chunk > 1:
        newest = logits.view(batch * kv_heads, -1, chunk, slots)[..., slots - chunk :]
        newest += _future(chunk, logits.dtype, logits.device) if mask is None else mask.to(logits.dtype)
    probabilities = logits.softmax(dim=-1).to(query.dtype)
    output = torch.bmm(probabilities, flat_values).view(batch, heads, chunk, -1)
    return output, probabilities.view(batch, kv_heads, heads // kv_heads, chunk, slots)


def column_sums(probabilities: Tensor, weights: Tensor, far: int = 0) -> Tensor:
    """What each slot received: sums over the queries, and over the query heads of a group.

    probabilities: [batch, kv_heads, group, C, n + C], the last C columns being the chunk itself; weights: [C], what
    each query counts; far: queries less than so many tokens after a slot do not count (the last `far` slots before the
    chunk must be consecutive tokens of the stream). Returns [batch, kv_heads, n + C - far] float32: the sums of the
    slots that have any, which are the first.
    """
    chunk, slots = probabilities.shape[-2:]
    reached = max(0, slots - far)  # far enough away from the newest query
    if chunk == 1:
        sums = probabilities.select(3, 0).narrow(3, 0, reached).sum(2, dtype=torch.float32)
        return sums.mul_(weights)
    whole = max(0, reached - chunk)  # far enough away from every query
    row = weights.to(probabilities.dtype)
    received = torch.matmul(row, probabilities[..., :whole]).sum(2, dtype=torch.float32)
    band = probabilities[..., whole:reached].tril(slots - chunk - far - whole)
    return torch.cat([received, torch.matmul(row, band).sum(2, dtype=torch.float32)], dim=-1)


BLOCK_BYTES = 1 << 20  # of logits at a time: they stay in the second-level cache of one core


def attend_blocked(
    query: Tensor, keys: Tensor, values: Tensor, weights: Tensor | None, far: int = 0
) -> tuple[Tensor, Tensor | None]:
    """`attend` and `column_sums` together in float32 on a CPU, a block of one head's queries at a time.

    The logits of a block are made, raised, multiplied and summed before they leave the cache; they are never divided:
    the output and the weights of the column sums are. Without `weights` there are no sums.
    """
    batch, heads, chunk, _ = query.shape
    kv_heads, slots = keys.shape[1:3]
    past, group = slots - chunk, heads // kv_heads
    output = torch.empty(batch, heads, chunk, values.shape[-1], dtype=query.dtype)
    sums = None if weights is None else torch.zeros(batch, kv_heads, max(0, slots - far))
    rows = max(16, min(chunk, BLOCK_BYTES // (4 * slots)))
    scratch = torch.empty(rows * slots, dtype=query.dtype)
    future = _future(rows, query.dtype, query.device)
    for b in range(batch):
        for head in range(heads):
            kv = head // group
            for start in range(0, chunk, rows):
                end = min(start + rows, chunk)
                seen, size = past + end, end - start
                logits = scratch[: size * seen].view(size, seen)
                torch.mm(query[b, head, start:end], keys[b, kv, :seen].t(), out=logits)
                logits[:, seen - size :] += future[:size, :size]
                raised = logits.sub_(logits.amax(dim=-1, keepdim=True)).exp_()
                total = raised.sum(dim=-1, keepdim=True)
                torch.mm(raised, values[b, kv, :seen], out=output[b, head, start:end]).div_(total)
                if sums is None or weights is None or seen <= far:
                    continue
                if far:  # of the nearest slots that count, not every query of the block is far enough away
                    band = max(0, past + start - far)
                    raised[:, band : seen - far].tril_(past + start - far - band)
                row = (weights[start:end, None] / total).t()
                sums[b, kv, : seen - far] += torch.mm(row, raised[:, : seen - far])[0]
    return output, sums


def attend_and_sum(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    weights: Tensor | None,
    far: int = 0,
    hidden: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Output [batch, heads, C, head_dim], and the column sums where `weights` [C] are given, by the faster way."""
    plain = hidden is None and not softcap
    if plain and query.device.type == "cpu" and query.dtype == torch.float32 and query.shape[2] >= 16:
        return attend_blocked(query, keys, values, weights, far)
    output, probabilities = attend(query, keys, values, None, hidden, softcap)
    return output, None if weights is None else column_sums(probabilities, weights, far)


@lru_cache(maxsize=8)
def _single(policy: Policy, device: torch.device) -> Tensor:
    """`policy.query_weights` of a single token, which decoding would ask for in every layer."""
    return policy.query_weights(1, device)


def _attend_and_score(
    cache: SlotCache,
    layer: LayerSlots,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    hidden: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """The output [batch, heads, C, head_dim]; what the slots received goes to the layer's scores."""
    policy, chunk = cache.policy, query.shape[2]
    weights = None
    if policy.scored:
        weights = _single(policy, query.device) if chunk == 1 else policy.query_weights(chunk, query.device)
    newest_weights = policy.newest_weights(chunk, query.device)
    if newest_weights is None:
        output, sums = attend_and_sum(query, keys, values, weights, policy.far, hidden, softcap)
    else:
        output, probabilities = attend(query, keys, values, None, hidden, softcap)
        sums = None if weights is None else column_sums(probabilities, weights, policy.far)
        layer.newest = column_sums(probabilities, newest_weights)
    if sums is not None:
        if (fade := policy.fade(chunk)) != 1:
            layer.scores.narrow(2, 0, layer.used).mul_(fade)
        layer.scores.narrow(2, 0, sums.shape[-1]).add_(sums)
    return output


_UNKNOWN = {"s_aux", "position_bias", "alibi", "head_mask"}  # what would change the result and is not dealt with


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What `transformers` calls in place of its own attention, right after `SlotCache.update` of the same layer."""
    for name in _UNKNOWN.intersection(kwargs):
        if kwargs[name] is not None:
            raise UserError(f"{type(module).__name__} gives its attention '{name}', which streamh2o does not know.")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    owners = take_appended()
    if len(owners) == 1:
        output = _attend(*owners[0], query, scaling, sliding_window, softcap)
    else:
        rows = query.split([layer.keys.shape[0] for _, layer in owners])
        parts = zip(owners, rows, strict=True)
        output = torch.cat([_attend(*owner, part, scaling, sliding_window, softcap) for owner, part in parts])
    return output.transpose(1, 2), None


def _attend(
    cache: SlotCache, layer: LayerSlots, query: Tensor, scaling: float, window: int | None, softcap: float | None
) -> Tensor:
    """The output [batch, heads, C, head_dim] of one layer for the rows that `cache` holds."""
    chunk = query.shape[2]
    if cache.evicting is not None and cache.probe is None:
        if softcap or window or layer.table is None:
            what = "soft-capping" if softcap else "a sliding window" if window else "layers that don't rotate"
            raise UserError(f"--evict token can't follow a model with {what}; use --chunk 1 for the same losses.")
        output = cache.evicting(cache, layer, query, scaling)
        cache.layer_done(layer, chunk)
        return output
    branches = cache.probe if isinstance(cache.probe, Branches) else None
    queries, keys = rotated(cache, layer, query, scaling, branches)
    values = layer.valid()[1]
    hidden = beyond_window(cache, layer, chunk, window, branches)
    if cache.probe is not None:
        mask = None if branches is None else branches.mask
        output, probabilities = attend(queries, keys, values, mask, hidden, softcap)
        cache.probe(layer, probabilities)
    else:
        output = _attend_and_score(cache, layer, queries, keys, values, hidden, softcap)
    cache.layer_done(layer, chunk)
    return output


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)

_attached: WeakKeyDictionary[PreTrainedModel, tuple[int, str]] = WeakKeyDictionary()


def attach(model: PreTrainedModel) -> None:
    """Let `model` use this attention until `detach`; calls nest."""
    depth, original = _attached.get(model, (0, model.config._attn_implementation))
    if depth == 0:
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:
            raise UserError(
                f"{type(model).__name__} computes attention itself in the installed transformers and lets no other be "
                "chosen, so it cannot be run; a newer transformers may."
            )
    _attached[model] = (depth + 1, original)


def detach(model: PreTrainedModel) -> None:
    """Give `model` back the attention it had before the first `attach`."""
    depth, original = _attached.get(model, (0, ""))
    if depth > 1:
        _attached[model] = (depth - 1, original)
    elif depth == 1:
        del _attached[model]
        model.set_attn_implementation(original)
