"""Attention by blocks against attention at once, and both against loops."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamh2o.kernels.plain import attend, attend_blocked, column_sums


def loops(query, keys, values, weights, far):
    """One query, one head, one slot at a time."""
    batch, heads, chunk, dim = query.shape
    kv_heads, slots = keys.shape[1:3]
    group, past = heads // kv_heads, slots - chunk
    output = torch.zeros(batch, heads, chunk, dim)
    sums = torch.zeros(batch, kv_heads, slots)
    for b in range(batch):
        for head in range(heads):
            for i in range(chunk):
                logits = [float(query[b, head, i] @ keys[b, head // group, j]) for j in range(past + i + 1)]
                peak = max(logits)
                total = sum(math.exp(x - peak) for x in logits)
                for j, x in enumerate(logits):
                    p = math.exp(x - peak) / total
                    output[b, head, i] += p * values[b, head // group, j]
                    if past + i - j >= far:
                        sums[b, head // group, j] += p * weights[i]
    return output, sums


def case(batch, kv_heads, group, chunk, past, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, kv_heads, past + chunk, 4)
    query = torch.randn(batch, kv_heads * group, chunk, 4, generator=generator)
    keys, values = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    return query, keys, values, torch.rand(chunk, generator=generator)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    chunk=st.integers(1, 9),
    past=st.integers(0, 9),
    far=st.integers(0, 20),
    seed=st.integers(0, 99),
)
def test_both_ways_equal_the_loops(batch, kv_heads, group, chunk, past, far, seed):
    query, keys, values, weights = case(batch, kv_heads, group, chunk, past, seed)
    expected_output, expected_sums = loops(query, keys, values, weights, far)
    output, probabilities = attend(query, keys, values)
    blocked_output, blocked_sums = attend_blocked(query, keys, values, weights, far)
    for got in (output, blocked_output):
        assert torch.allclose(got, expected_output, atol=1e-5)
    reached = max(0, past + chunk - far)
    for got in (column_sums(probabilities, weights, far), blocked_sums):
        assert got.shape[-1] == reached
        assert torch.allclose(got, expected_sums[..., :reached], atol=1e-5)
        assert not expected_sums[..., reached:].any()


@settings(max_examples=20, deadline=None)
@given(chunk=st.integers(16, 90), past=st.integers(0, 120), far=st.integers(0, 150), seed=st.integers(0, 99))
def test_blocks_smaller_than_the_chunk_change_nothing(chunk, past, far, seed):
    from streamh2o.kernels import plain

    query, keys, values, weights = case(1, 2, 2, chunk, past, seed)
    output, probabilities = attend(query, keys, values)
    sums = column_sums(probabilities, weights, far)
    whole = plain.BLOCK_BYTES
    plain.BLOCK_BYTES = 1  # the least: blocks of 16 queries
    try:
        blocked_output, blocked_sums = attend_blocked(query, keys, values, weights, far)
    finally:
        plain.BLOCK_BYTES = whole
    assert torch.allclose(blocked_output, output, atol=1e-5)
    assert torch.allclose(blocked_sums, sums, atol=1e-5)


def test_column_sums_of_a_chunk_add_up_to_its_queries():
    query, keys, values, _ = case(2, 2, 3, 5, 7, 0)
    _, sums = attend_blocked(query, keys, values, torch.ones(5))
    assert torch.allclose(sums.sum(-1), torch.full((2, 2), 3.0 * 5))


def test_bfloat16_stays_near_float32():
    query, keys, values, weights = case(1, 2, 3, 20, 40, 0)
    exact, sums = attend_blocked(query, keys, values, weights, 8)
    output, probabilities = attend(query.bfloat16(), keys.bfloat16(), values.bfloat16())
    assert (output.float() - exact).abs().max() < 0.05
    assert (column_sums(probabilities, weights, 8) - sums).abs().max() < 0.05


def test_float16_survives_logits_beyond_its_range():
    query, keys = torch.full((1, 1, 2, 64), 60.0).half(), torch.full((1, 1, 2, 64), 60.0).half()
    output, _ = attend(query, keys, torch.ones(1, 1, 2, 64).half())
    assert torch.isfinite(output).all()
