"""Attention with column sums on a GPU, in Triton: the matrix of probabilities never leaves the processor's registers.

A program takes the queries of all heads that share a KV head, so that keys and values are read once for them. Its rows
are numbered query * group + head of the group, which keeps queries of the same age together. The sums need each row's
log-sum-exp, so they are a second pass, a program for each block of keys; nothing is added up across programs, and the
same input gives the same digits. What the results mean is said by `attention.attend` and `attention.column_sums`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _load(start, offsets, inside, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Vectors of DIM numbers at `offsets` from `start`: [offsets, PADDED], zeros beyond DIM and where not `inside`."""
    dims = tl.arange(0, PADDED)
    return tl.load(start + offsets[:, None] + dims[None, :], inside[:, None] & (dims[None, :] < DIM), other=0.0)


@triton.jit(do_not_specialize=["chunk", "past"])
def _attend(
    query,
    keys,
    values,
    output,
    totals,
    chunk,
    past,
    query_batch,
    query_head,
    query_row,
    keys_batch,
    keys_head,
    keys_row,
    values_batch,
    values_head,
    values_row,
    output_batch,
    output_head,
    output_row,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    batch, kv_head = (tl.program_id(1) // KV_HEADS).to(tl.int64), (tl.program_id(1) % KV_HEADS).to(tl.int64)
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    number, head = row // GROUP, kv_head * GROUP + row % GROUP
    there = number < chunk
    q = _load(query + batch * query_batch, head * query_head + number * query_row, there, DIM, PADDED)
    keys += batch * keys_batch + kv_head * keys_head
    values += batch * values_batch + kv_head * values_head
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)  # in units of e^largest, which grows as it goes
    mixed = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
    seen = past + tl.minimum((first + ROWS - 1) // GROUP + 1, chunk)
    for start in range(0, seen, KEYS):
        key = start + tl.arange(0, KEYS)
        k = _load(keys, key * keys_row, key < seen, DIM, PADDED)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        logits = tl.where(key[None, :] <= past + number[:, None], logits, float("-inf"))
        larger = tl.maximum(largest, tl.max(logits, 1))
        raised = tl.exp(logits - larger[:, None])
        fade = tl.exp(largest - larger)
        total = total * fade + tl.sum(raised, 1)
        v = _load(values, key * values_row, key < seen, VALUE_DIM, VALUE_PADDED)
        mixed = tl.dot(raised.to(v.dtype), v, acc=mixed * fade[:, None], input_precision="ieee")
        largest = larger
    dims = tl.arange(0, VALUE_PADDED)
    where = batch * output_batch + head * output_head + number * output_row
    mixed = (mixed / total[:, None]).to(output.dtype.element_ty)
    tl.store(output + where[:, None] + dims[None, :], mixed, there[:, None] & (dims[None, :] < VALUE_DIM))
    tl.store(totals + (batch * KV_HEADS * GROUP + head) * chunk + number, largest + tl.log(total), there)


@triton.jit(do_not_specialize=["chunk", "past", "far", "reached"])
def _sum_columns(
    query,
    keys,
    totals,
    weights,
    sums,
    chunk,
    past,
    far,
    reached,
    query_batch,
    query_head,
    query_row,
    keys_batch,
    keys_head,
    keys_row,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    batch, kv_head = (tl.program_id(1) // KV_HEADS).to(tl.int64), (tl.program_id(1) % KV_HEADS).to(tl.int64)
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    k = _load(keys + batch * keys_batch + kv_head * keys_head, key * keys_row, key < reached, DIM, PADDED)
    query += batch * query_batch
    totals += batch * KV_HEADS * GROUP * chunk
    received = tl.zeros([ROWS, KEYS], tl.float32)
    first = tl.maximum(tl.program_id(0) * KEYS + far - past, 0)  # query that is far enough away from the first key
    for start in range(first * GROUP, chunk * GROUP, ROWS):
        row = start + tl.arange(0, ROWS)
        number, head = row // GROUP, kv_head * GROUP + row % GROUP
        there = number < chunk
        q = _load(query, head * query_head + number * query_row, there, DIM, PADDED)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        total = tl.load(totals + head * chunk + number, there, other=0.0)
        weight = tl.load(weights + number, there, other=0.0)
        counts = there[:, None] & (past + number[:, None] - key[None, :] >= far)
        received += tl.where(counts, tl.exp(logits - total[:, None]) * weight[:, None], 0.0)
    tl.store(sums + tl.program_id(1).to(tl.int64) * reached + key, tl.sum(received, 0), key < reached)


def attend(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention of the last C of n + C slots, for float32, bfloat16 and float16.

    query: rotated and scaled, [batch, heads, C, head_dim]; keys, values: [batch, kv_heads, n + C, head_dim]; all may be
    parts of larger buffers, a head's numbers side by side.
    Returns the output [batch, heads, C, head_dim] in the type of the query, and the log-sum-exp of each query's logits,
    [batch, heads, C] float32.
    """
    batch, heads, chunk, dim = query.shape
    kv_heads, slots, value_dim = keys.shape[1], keys.shape[2], values.shape[3]
    output = query.new_empty(batch, chunk, heads, value_dim).transpose(1, 2)  # as the model will read it
    totals = query.new_empty(batch, heads, chunk, dtype=torch.float32)
    rows, block = _blocks(query, max(dim, value_dim))
    with torch.cuda.device_of(query):
        _attend[triton.cdiv(heads // kv_heads * chunk, rows), batch * kv_heads](
            *(query, keys, values, output, totals, chunk, slots - chunk),
            *(*query.stride()[:3], *keys.stride()[:3], *values.stride()[:3], *output.stride()[:3]),
            *(kv_heads, heads // kv_heads, dim, value_dim, _padded(dim), _padded(value_dim), rows, block),
            num_stages=2,
            enable_fp_fusion=True,
        )
    return output, totals


def column_sums(query: Tensor, keys: Tensor, totals: Tensor, weights: Tensor, far: int = 0) -> Tensor:
    """What each slot received, from queries and keys as of `attend` and the log-sum-exp `totals` that it gave.

    weights: [C] float32, what each query counts; far: as of `attention.column_sums`. Returns
    [batch, kv_heads, n + C - far] float32.
    """
    batch, heads, chunk, dim = query.shape
    kv_heads, slots = keys.shape[1:3]
    reached = max(0, slots - far)
    sums = totals.new_empty(batch, kv_heads, reached)
    if reached:
        rows, block = _blocks(query, dim)
        with torch.cuda.device_of(query):
            _sum_columns[triton.cdiv(reached, block), batch * kv_heads](
                *(query, keys, totals, weights, sums, chunk, slots - chunk, far, reached),
                *(*query.stride()[:3], *keys.stride()[:3]),
                *(kv_heads, heads // kv_heads, dim, _padded(dim), rows, block),
                num_stages=2,
                enable_fp_fusion=True,
            )
    return sums


def attend_and_sum(
    query: Tensor, keys: Tensor, values: Tensor, weights: Tensor | None, far: int = 0
) -> tuple[Tensor, Tensor | None]:
    """See `attention.attend_and_sum`."""
    query, keys, values = (x if x.stride(3) == 1 else x.contiguous() for x in (query, keys, values))
    output, totals = attend(query, keys, values)
    return output, None if weights is None else column_sums(query, keys, totals, weights, far)


def _padded(dim: int) -> int:
    """The power of two that a product of matrices on a GPU takes `dim` as."""
    return max(16, triton.next_power_of_2(dim))


def _blocks(query: Tensor, dim: int) -> tuple[int, int]:
    """Rows and keys of one product, as large as fits the registers and the 64 kB of shared memory of small GPUs.

    Float32 is multiplied without tensor cores, which takes more registers for each product.
    """
    size = _padded(dim) * query.element_size()  # bytes
    if query.element_size() == 4:
        return (32, 32) if size <= 256 else (16, 16)
    return (64, 64) if size <= 128 else (64, 32) if size <= 256 else (32, 32) if size <= 512 else (16, 16)
