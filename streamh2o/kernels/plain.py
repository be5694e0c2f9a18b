"""Attention with column sums in plain torch: C queries over n + C slots, and what each slot received."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=8)
def _future(chunk: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[chunk, chunk] with -inf where the key comes after the query."""
    return torch.full((chunk, chunk), -math.inf, dtype=dtype, device=device).triu(1)


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
