"""The compiled forms, as functions: operators built from cpp/*.cpp on CPUs, Triton's attention on GPUs.

Each is for tensors that `Kernel.takes` says yes to; plain torch's forms give the same but for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Runs = Sequence[tuple[int, int, Any]]


def append(
    keys: Tensor,
    values: Tensor,
    scores: Tensor,
    source_index: Tensor,
    key: Tensor,
    value: Tensor,
    used: int,
    first: int,
) -> None:
    """See `slots.LayerSlots.append`: its buffers, new keys and values, where in those and in the stream they begin."""
    torch.ops.streamh2o.append(keys, values, scores, source_index, key, value, used, first)


def attend_and_sum(
    query: Tensor, keys: Tensor, values: Tensor, weights: Tensor | None, far: int
) -> tuple[Tensor, Tensor | None]:
    """See `attention.attend_and_sum`."""
    if query.device.type == "cuda":
        from streamh2o.kernels import triton

        return triton.attend_and_sum(query, keys, values, weights, far)
    output, sums = torch.ops.streamh2o.attend_and_sum(query, keys, values, weights, far)
    return output, None if weights is None else sums


def rotate(x: Tensor, runs: Runs, cos: Tensor, sin: Tensor, scale: float, interleaved: bool) -> Tensor:
    """A rotated copy of x [batch, heads, n, head_dim], times `scale`.

    runs: as of `positions.in_cache_positions`, tensors being [batch or 1, heads or 1, end - start].
    """
    ends = [end for _, end, _ in runs]
    firsts = [at if isinstance(at, int) else -1 for _, _, at in runs]
    own = [at for _, _, at in runs if not isinstance(at, int)]
    rotated: Tensor = torch.ops.streamh2o.rotate(x, ends, firsts, own, cos, sin, scale, interleaved)
    return rotated


def losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy [rows] of logits [rows, vocabulary] in nats, float32."""
    result: Tensor = torch.ops.streamh2o.losses(logits, targets)
    return result


def pack_head(weight: Tensor) -> Tensor:
    """An output embedding [vocabulary, hidden] for `head_losses`, in as many bytes and up to 511 words more."""
    packed: Tensor = torch.ops.streamh2o.pack_head(weight)
    return packed


def head_losses(hidden: Tensor, weight: Tensor, packed: Tensor | None, targets: Tensor) -> Tensor:
    """`losses` of the logits of hidden [rows, hidden_size], which are not written.

    weight: the output embedding [vocabulary, hidden_size]; packed: the same by `pack_head`, which saves time.
    """
    result: Tensor = torch.ops.streamh2o.head_losses(hidden.contiguous(), weight, packed, targets.contiguous())
    return result


def gate(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, in place of `gate`, both [..., n]."""
    gated: Tensor = torch.ops.streamh2o.gate(gate, up)
    return gated


def pack_linear(weight: Tensor) -> Tensor:
    """Weights [features, dim] of a linear layer for `linear`, bfloat16, in as many bytes and up to 63 features more."""
    packed: Tensor = torch.ops.streamh2o.pack_linear(weight)
    return packed


def linear(x: Tensor, packed: Tensor, bias: Tensor | None, features: int, residual: Tensor | None = None) -> Tensor:
    """x [..., dim] times the transpose of a weight [features, dim] that `pack_linear` gave, plus bias [features].

    residual [..., features] is added to what would be stored without it.
    """
    if residual is not None:
        residual = residual.contiguous()
    product: Tensor = torch.ops.streamh2o.linear(x.contiguous(), packed, bias, features, residual)
    return product


def gated_linear(x: Tensor, gate: Tensor, up: Tensor, features: int) -> Tensor:
    """silu(x times gate) * (x times up) [..., features], of two weights that `pack_linear` gave."""
    product: Tensor = torch.ops.streamh2o.gated_linear(x.contiguous(), gate, up, features)
    return product


def few_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., dim], a few rows, times the transpose of a weight [vocabulary, dim] as it is, plus bias [vocabulary]."""
    product: Tensor = torch.ops.streamh2o.few_linear(x.contiguous(), weight, bias)
    return product


def highest(priority: Tensor, n: int) -> Tensor:
    """The slots [rows, n], ascending, of the n highest priorities [rows, slots] float32; of equal ones the newest."""
    chosen: Tensor = torch.ops.streamh2o.highest(priority, n)
    return chosen


def keep(buffers: list[Tensor], chosen: Tensor, sinks: int, recent: int, used: int) -> None:
    """See `slots.LayerSlots.compact`: the buffers [batch, kv_heads, capacity, ...], of which `used` rows are slots."""
    torch.ops.streamh2o.keep(buffers, chosen, sinks, recent, used)


def attend_scan(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scores: Tensor,
    source_index: Tensor,
    cos: Tensor,
    sin: Tensor,
    divisors: Tensor | None,
    *,
    sinks: int,
    hitters: int,
    sink_distance: int,
    far: int,
    weight: float,
    fade: float,
    scaling: float,
    interleaved: bool,
    rolled: bool,
) -> tuple[Tensor, Tensor]:
    """See `token_scan.attend_scan`: the output, and the middle slots that are left [batch, kv_heads, hitters].

    keys, values, scores and source_index of all slots, the scores changed in place; cos, sin [positions, rotary_dim /
    2]; divisors: `Policy.divisor` by age, the last one for all older ages; weight: what a query's attention counts.
    """
    counts = sinks, hitters, sink_distance, far, weight, fade, scaling, interleaved, rolled
    output, kept = torch.ops.streamh2o.attend_scan(
        query, keys, values, scores, source_index, cos, sin, divisors, *counts
    )
    return output, kept


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., n] divided by the root of the mean of its squares and `eps`, times weight [n]."""
    normed: Tensor = torch.ops.streamh2o.rms_norm(x.contiguous(), weight, eps)
    return normed


def packed_linear(x: Tensor, blocks: Tensor, kind: int, bias: Tensor | None) -> Tensor:
    """x [..., n] times the weights in blocks [m, bytes], transposed, plus bias [m] float32: [..., m].

    kind: the number of a `gguf_blocks.Blocks`. The weights are rounded to x's number format.
    """
    result: Tensor = torch.ops.streamh2o.packed_linear(x.contiguous(), blocks, kind, bias)
    return result
