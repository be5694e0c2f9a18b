"""How a model of `transformers` comes to use our attention, and gets its own back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from streamh2o.cache.families import own_attention
from streamh2o.cache.positions import Branches, beyond_window, rotated
from streamh2o.cache.rotary import RotaryTable
from streamh2o.cache.slot_cache import SlotCache, take_appended
from streamh2o.cache.slots import LayerSlots
from streamh2o.errors import UserError
from streamh2o.kernels.attention import attend, attend_and_sum, column_sums
from streamh2o.policies.base import Policy
from streamh2o.stream.engine.fused import Fused, fused
from streamh2o.stream.own_attention import NAME, has_own_attention


def _hashable(policy: Policy) -> bool:
    """Whether a policy of a user's own has no knob, such as a list, that stands in the way."""
    try:
        hash(policy)
    except TypeError:
        return False
    return True


@lru_cache(maxsize=32)
def _query_weights(policy: Policy, chunk: int, device: torch.device) -> Tensor:
    """`policy.query_weights`, which every layer of every pass would ask for."""
    return policy.query_weights(chunk, device)


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
        weights = _query_weights(policy, chunk, query.device) if _hashable(policy) else None
        weights = policy.query_weights(chunk, query.device) if weights is None else weights
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
        if softcap or window or not isinstance(layer.table, RotaryTable):
            positions = "layers that don't rotate" if layer.table is None else "ALiBi"
            what = "soft-capping" if softcap else "a sliding window" if window else positions
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


@dataclass
class _Attached:
    """depth: attachments that are not undone. original: the attention that the model had before them."""

    depth: int
    original: str
    fused: Fused


_attached: WeakKeyDictionary[PreTrainedModel, _Attached] = WeakKeyDictionary()


def attach(model: PreTrainedModel) -> None:
    """Let `model` use this attention until `detach`, always with positions of zero; calls nest."""
    if model in _attached:
        _attached[model].depth += 1
        return
    original: str = model.config._attn_implementation
    if own_attention(model.config):
        ours = has_own_attention(model)
    else:
        model.set_attn_implementation(NAME)
        ours = model.config._attn_implementation == NAME
    if not ours:
        raise UserError(
            f"{type(model).__name__} computes attention itself in the installed transformers and lets no other be "
            "chosen, so it cannot be run; a newer transformers may."
        )
    _attached[model] = _Attached(1, original, fused(model.get_decoder()))
    _attached[model].fused.on()


def detach(model: PreTrainedModel) -> None:
    """Give `model` back the attention it had before the first `attach`."""
    attached = _attached.get(model)
    if attached is None:
        return
    attached.depth -= 1
    if attached.depth == 0:
        del _attached[model]
        attached.fused.off()
        if not own_attention(model.config):
            model.set_attn_implementation(attached.original)
