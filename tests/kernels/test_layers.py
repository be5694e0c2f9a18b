"""The compiled kernel's linear layers, gates and moving of slots against plain torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamh2o.cache.slots import LayerSlots, keep
from streamh2o.kernels import compiled

pytestmark = pytest.mark.usefixtures("built")


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 300),
    features=st.one_of(st.integers(1, 200), st.sampled_from([96, 192, 576])),
    half_size=st.integers(1, 100),
    biased=st.booleans(),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 99),
)
def test_a_linear_layer_equals_that_of_plain_torch(count, features, half_size, biased, threads, seed):
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(n, 2 * half_size, generator=generator).bfloat16() for n in (count, features))
    bias = torch.randn(features, generator=generator).bfloat16() if biased else None
    exact = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    torch.set_num_threads(threads)
    try:
        found = compiled.linear(x[None], compiled.pack_linear(weight), bias, features)
    finally:
        torch.set_num_threads(1)
    assert found.shape == (1, count, features)
    assert torch.allclose(found[0].float(), exact, rtol=2**-8, atol=1e-4 * half_size)
    residual = torch.randn(1, count, features, generator=generator).bfloat16()
    assert torch.equal(
        compiled.linear(x[None], compiled.pack_linear(weight), bias, features, residual), found + residual
    )


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 150),
    features=st.one_of(st.integers(1, 200), st.sampled_from([96, 192])),
    half_size=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_a_gate_of_two_linear_layers_equals_them_one_by_one(count, features, half_size, seed):
    generator = torch.Generator().manual_seed(seed)
    x, *weights = (torch.randn(n, 2 * half_size, generator=generator).bfloat16() for n in (count, features, features))
    packed = [compiled.pack_linear(weight / half_size**0.5) for weight in weights]
    expected = compiled.gate(*(compiled.linear(x, each, None, features) for each in packed))
    assert torch.equal(compiled.gated_linear(x, *packed, features), expected)


@pytest.mark.parametrize("count", [2, 40])
def test_a_row_that_is_no_number_stays_alone(count):
    x, weight = torch.randn(count, 64).bfloat16(), torch.randn(100, 64).bfloat16()
    x[1, 5] = float("nan")
    found = compiled.linear(x, compiled.pack_linear(weight), None, 100)
    assert found[1].isnan().all()
    assert found[[i for i in range(count) if i != 1]].isfinite().all()


def test_an_input_of_another_number_format_is_not_misread():
    packed = compiled.pack_linear(torch.randn(8, 4).bfloat16())
    with pytest.raises(RuntimeError, match="must be bfloat16"):
        compiled.linear(torch.randn(2, 4), packed, None, 8)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    parts=st.tuples(*[st.integers(0, 6)] * 5),
    dim=st.sampled_from([(), (1,), (5,)]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.int64]),
    seed=st.integers(0, 99),
)
def test_slots_that_stay_are_moved_as_by_plain_torch(shape, parts, dim, dtype, seed):
    sinks, hitters, others, recent, room = parts
    generator = torch.Generator().manual_seed(seed)
    used = sinks + hitters + others + recent
    buffer = torch.randint(0, 1000, (*shape, used + room, *dim), generator=generator).to(dtype)
    chosen = torch.rand(*shape, hitters + others, generator=generator).topk(hitters).indices.sort().values + sinks
    expected = buffer.clone()
    other = torch.arange(used).expand(*shape, used).clone()
    keep(expected, chosen, sinks, recent, used)
    compiled.keep([buffer, other], chosen, sinks, recent, used)
    kept = sinks + hitters + recent
    assert torch.equal(buffer[:, :, :kept], expected[:, :, :kept])
    assert torch.equal(buffer[:, :, used:], expected[:, :, used:])
    assert torch.equal(other[:, :, sinks : sinks + hitters], chosen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_are_appended_as_by_plain_torch(dtype):
    def filled():
        slots = LayerSlots(torch.zeros(2, 3, 1, 6, dtype=dtype), torch.zeros(2, 3, 1, 4, dtype=dtype), 12)
        slots.scores += 1
        generator = torch.Generator().manual_seed(0)
        for first, n in ((0, 5), (5, 1), (6, 9)):  # the last needs more room
            key, value = (torch.randn(2, n, 3, dim, generator=generator).to(dtype) for dim in (6, 4))
            slots.append(key.transpose(1, 2), value.transpose(1, 2), first)
        return slots.state()

    expected = filled()
    found = filled()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not found["scores"].any()


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 5),
    slots=st.integers(1, 60),
    odd=st.sampled_from([0.0, -0.5, float("-inf"), float("inf")]),
    share=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_the_highest_priorities_are_those_of_plain_torch_and_of_equal_ones_the_newest(count, slots, odd, share, seed):
    generator = torch.Generator().manual_seed(seed)
    priority = torch.randn(count, slots, generator=generator)
    priority[torch.rand(count, slots, generator=generator) < share] = odd
    n = int(torch.randint(0, slots + 1, (), generator=generator))
    newest_first = priority.flip(-1).sort(dim=-1, descending=True, stable=True).indices[:, :n]
    assert torch.equal(compiled.highest(priority, n), (slots - 1 - newest_first).sort(dim=-1).values)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 4),
    words=st.integers(1, 1100),
    dim=st.one_of(st.integers(1, 150), st.sampled_from([64, 576])),
    biased=st.booleans(),
    threads=st.sampled_from([1, 3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_a_few_rows_times_a_weight_as_it_lies_are_those_of_plain_torch(count, words, dim, biased, threads, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(count, dim, generator=generator), torch.randn(words, dim, generator=generator)
    bias = 10 * torch.randn(words, generator=generator) if biased else None
    x, weight, bias = (None if part is None else part.to(dtype) for part in (x, weight, bias))
    expected = x.float() @ weight.float().T + (0 if bias is None else bias.float())
    torch.set_num_threads(threads)
    try:
        found = compiled.few_linear(x[None], weight, bias)
    finally:
        torch.set_num_threads(1)
    assert found.dtype == dtype
    within = 1e-5 if dtype == torch.float32 else 2**-8
    assert ((found[0].float() - expected).abs() <= within * expected.abs() + 1e-4).all()
