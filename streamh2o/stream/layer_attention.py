"""The attention of one layer in one pass: rotate, attend, and add to the scores what each slot received."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from streamh2o.cache.positions import Branches, beyond_window, rotated
from streamh2o.cache.rotary import RotaryTable
from streamh2o.cache.slot_cache import SlotCache
from streamh2o.cache.slots import LayerSlots
from streamh2o.errors import UserError
from streamh2o.kernels.attention import attend_and_sum
from streamh2o.kernels.plain import attend, column_sums
from streamh2o.policies.base import Policy
from streamh2o.stream.token_eviction import attend_and_evict


def attend_layer(
    cache: SlotCache,
    layer: LayerSlots,
    query: Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
    *,
    evict_each_token: bool = False,
    probe: bool = False,
    branches: Branches | None = None,
) -> Tensor:
    """The output [batch, heads, C, head_dim] of one layer for the rows that `cache` holds.

    query: un-rotated, [batch, heads, C, head_dim]; the keys of the same tokens are the last of `layer`. The rest: as of
    `Pass` and `Pass.attend`. Raises UserError where eviction after every token can't follow the model.
    """
    if evict_each_token:
        _require_plain_rotation(layer, window, softcap)
        return attend_and_evict(cache, layer, query, scaling)
    queries, keys = rotated(cache, layer, query, scaling, branches)
    values = layer.valid()[1]
    hidden = beyond_window(cache, layer, query.shape[2], window, branches)
    if probe:
        return attend(queries, keys, values, None if branches is None else branches.mask, hidden, softcap)[0]
    return _attend_and_score(cache, layer, queries, keys, values, hidden, softcap)


def _require_plain_rotation(layer: LayerSlots, window: int | None, softcap: float | None) -> None:
    if softcap or window or not isinstance(layer.table, RotaryTable):
        positions = "layers that don't rotate" if layer.table is None else "ALiBi"
        what = "soft-capping" if softcap else "a sliding window" if window else positions
        raise UserError(f"--evict token can't follow a model with {what}; use --chunk 1 for the same losses.")


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
    weights = _query_weights(policy, chunk, query.device) if policy.scored else None
    newest_weights = policy.newest_weights(chunk, query.device)
    if newest_weights is None:
        output, sums = attend_and_sum(query, keys, values, weights, policy.far, hidden, softcap, cache.kernel)
    else:
        output, probabilities = attend(query, keys, values, None, hidden, softcap)
        sums = None if weights is None else column_sums(probabilities, weights, policy.far)
        layer.newest = column_sums(probabilities, newest_weights)
    if sums is not None:
        if (fade := policy.fade(chunk)) != 1:
            layer.scores.narrow(2, 0, layer.used).mul_(fade)
        layer.scores.narrow(2, 0, sums.shape[-1]).add_(sums)
    return output


def _query_weights(policy: Policy, chunk: int, device: torch.device) -> Tensor:
    """`policy.query_weights`, kept for the next layer; not where a knob of a user's policy has no hash."""
    try:
        return _kept_query_weights(policy, chunk, device)
    except TypeError:
        return policy.query_weights(chunk, device)


@lru_cache(maxsize=32)
def _kept_query_weights(policy: Policy, chunk: int, device: torch.device) -> Tensor:
    return policy.query_weights(chunk, device)
