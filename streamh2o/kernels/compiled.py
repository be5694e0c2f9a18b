"""The compiled path, chosen at the start of a run: on CPUs built from cpp/*.cpp, once, on GPUs made by Triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from streamh2o.errors import UsageError, UserError
from streamh2o.kernels.build import load

if TYPE_CHECKING:
    from streamh2o.cache.rotary import RotaryTable
    from streamh2o.policies.base import Policy

KERNELS = ("auto", "torch", "compiled")
CPU = torch.device("cpu")
Runs = Sequence[tuple[int, int, Any]]
_WITHIN = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # how close to plain torch's float32

_types: frozenset[torch.dtype] = frozenset()  # what the kernel that is in use computes; empty: it is not
_place = "cpu"  # the type of device that it is for


def choose(name: str, tell: Callable[[str], None] = lambda _: None, device: torch.device = CPU) -> str:
    """Let all streams of this process compute on `device` as `name` says from now on; returns what that came to.

    auto: compiled where it can be built and gives what plain torch gives, else torch, with a word to `tell`. compiled:
    the same, but it must. torch: plain torch. Raises UsageError for another name, UserError where `compiled` cannot be.
    """
    global _types, _place
    if name not in KERNELS:
        raise UsageError(f"--kernel is {name!r}; it must be {', '.join(KERNELS[:-1])} or {KERNELS[-1]}.")
    _types, _place = frozenset(), device.type
    if name != "torch":
        try:
            if device.type == "cpu":
                load(tell)
                _types = _sound_types()
            else:
                _types = _triton_types(device)
        except UserError as reason:
            if name == "compiled":
                raise
            tell(f"kernel: plain torch, since {reason}")
    return chosen()


def chosen() -> str:
    """`compiled` or `torch`: what streams of this process use, where they can."""
    return "compiled" if _types else "torch"


def takes(x: Tensor) -> bool:
    """Whether the kernel for CPUs is in use, and `rotate` and `losses` are for tensors such as `x`."""
    return x.dtype in _types and x.device.type == "cpu" == _place


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


def takes_slots(buffer: Tensor) -> bool:
    """Whether the kernel for CPUs is in use, and `keep` is for this buffer."""
    return bool(_types) and buffer.device.type == "cpu" == _place


def takes_queries(query: Tensor) -> bool:
    """Whether `attend_and_sum` is for these queries [batch, heads, C, head_dim]."""
    if query.dtype in _types and query.device.type == "cuda" == _place:
        return query.shape[2] >= 16
    # In float32 plain torch is as fast with few queries.
    return takes(query) and query.shape[3] % 2 == 0 and (query.shape[2] >= 16 or query.dtype == torch.bfloat16)


def attend_and_sum(
    query: Tensor, keys: Tensor, values: Tensor, weights: Tensor | None, far: int
) -> tuple[Tensor, Tensor | None]:
    """See `attention.attend_and_sum`."""
    if query.device.type == "cuda":
        from streamh2o.kernels import triton as kernel_triton

        return kernel_triton.attend_and_sum(query, keys, values, weights, far)
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
    table: RotaryTable,
    divisors: Tensor | None,
    policy: Policy,
    sink_distance: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """See `token_scan.attend_scan`: the output, and the middle slots that are left [batch, kv_heads, hitters].

    keys, values, scores and source_index of all slots, the scores changed in place; divisors: `Policy.divisor` by age,
    the last one for all older ages.
    """
    weight, fade = float(policy.query_weights(1, CPU)[0]), policy.fade(1)
    counts = policy.sinks, policy.hitters, sink_distance, policy.far, weight, fade, scaling
    styles = table.style == "interleaved", policy.positions == "rolled"
    slots = keys, values, scores, source_index
    output, kept = torch.ops.streamh2o.attend_scan(query, *slots, table.cos, table.sin, divisors, *counts, *styles)
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


def _agrees(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel gives in `dtype` what plain torch gives in float32."""
    from streamh2o.kernels.attention import attend, column_sums

    torch_seed = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 64, 64, generator=torch_seed) / 8
    keys, values = torch.randn(2, 1, 2, 200, 64, generator=torch_seed)
    weights = torch.rand(64, generator=torch_seed)
    expected, probabilities = attend(query, keys, values)
    expected_sums = column_sums(probabilities, weights, 32)
    query, keys, values = (tensor.to(device, dtype) for tensor in (query, keys, values))
    output, sums = attend_and_sum(query, keys, values, weights.to(device), 32)
    assert sums is not None
    good = torch.allclose(output.cpu().float(), expected, atol=_WITHIN[dtype])
    return good and torch.allclose(sums.cpu(), expected_sums, rtol=_WITHIN[dtype])


def _sound_types() -> frozenset[torch.dtype]:
    """The number formats in which the kernel can be used on this CPU. Raises UserError where there are none."""
    agrees = {}
    for dtype in (torch.float32, torch.bfloat16):
        try:
            agrees[dtype] = _agrees(dtype, CPU)
        except RuntimeError:
            continue  # oneDNN has no such product for this processor
    if not agrees:
        raise UserError("this processor has not the products that it needs.")
    if not any(agrees.values()):
        raise UserError("it does not give here what plain torch gives; please report this.")
    return frozenset(dtype for dtype, good in agrees.items() if good)


def _triton_types(device: torch.device) -> frozenset[torch.dtype]:
    """All number formats, where Triton's kernel can be used on this GPU. Raises UserError where one is not right."""
    if device.type != "cuda":
        raise UserError(f"there is no kernel for {device.type}.")
    if find_spec("triton") is None:
        raise UserError("there is no triton here, which PyTorch's builds for GPUs bring along.")
    for dtype in _WITHIN:
        try:
            good = _agrees(dtype, device)
        except Exception as error:  # whatever its compiler, the system's linker or the driver may say
            said = " ".join(str(error).split())[:200]
            raise UserError(f"Triton fails on this GPU ({type(error).__name__}: {said}).") from error
        if not good:
            raise UserError(f"Triton's {str(dtype).removeprefix('torch.')} is not plain torch's on this GPU.")
    return frozenset(_WITHIN)
