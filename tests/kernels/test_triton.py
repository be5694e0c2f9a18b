"""The Triton kernel against plain torch: on a GPU where there is one, else through Triton's interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamh2o.kernels import compiled
from streamh2o.kernels.plain import attend, column_sums
from streamh2o.kernels.select import Kernel
from streamh2o.policies import make_policy
from streamh2o.stream.chunk_stream import ChunkStream
from tests.tiny import VOCABULARY, llama

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
pytest.importorskip("triton", reason="triton is not installed; PyTorch's builds for GPUs bring it along")

from streamh2o.kernels import triton as kernel_triton  # noqa: E402

HALVES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.skipif(not GPU, reason="not interpreted"))]


def tensors(batch, kv_heads, group, chunk, past, dim, value_dim=None, dtype=torch.float32, seed=0):
    """Queries, keys, values and weights; keys and values are parts of larger buffers."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, kv_heads * group, chunk, dim, generator=generator) / dim**0.5
    room = torch.randn(batch, kv_heads, past + chunk + 5, dim + (value_dim or dim), generator=generator)
    keys, values = room.to(DEVICE, dtype)[:, :, : past + chunk].split([dim, value_dim or dim], dim=-1)
    return query.to(DEVICE, dtype), keys, values, torch.rand(chunk, generator=generator).to(DEVICE)


def expected(query, keys, values, weights, far):
    output, probabilities = attend(query.float(), keys.float(), values.float())
    return output, column_sums(probabilities, weights, far)


def close(found, right, within):
    return found.shape == right.shape and torch.allclose(found.float(), right, atol=within)


SHAPES = [  # batch, KV heads, heads of a group, chunk, past, head_dim, of values
    (1, 1, 1, 1, 0, 16, 16),
    (2, 2, 3, 37, 50, 20, 20),
    (1, 1, 4, 5, 130, 80, 80),
    (1, 2, 1, 70, 0, 64, 64),
    (1, 1, 2, 33, 40, 8, 24),
]


@pytest.mark.parametrize("far", [0, 9, 60, 1000])
@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_sums_equal_plain_torch(shape, far):
    query, keys, values, weights = tensors(*shape)
    output, sums = kernel_triton.attend_and_sum(query, keys, values, weights, far)
    right, right_sums = expected(query, keys, values, weights, far)
    assert close(output, right, 1e-5)
    assert close(sums, right_sums, 1e-5)


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_rounds_the_output_and_hardly_the_sums(dtype):
    query, keys, values, weights = tensors(2, 1, 3, 40, 60, 24, dtype=dtype)
    output, sums = kernel_triton.attend_and_sum(query, keys, values, weights, 10)
    right, right_sums = expected(query, keys, values, weights, 10)
    assert output.dtype == dtype
    assert close(output, right, 1e-2)
    assert close(sums, right_sums, 1e-5)


@settings(max_examples=10, deadline=None)
@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    chunk=st.integers(1, 40),
    past=st.integers(0, 70),
    dim=st.integers(1, 40),
    far=st.integers(0, 120),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
    seed=st.integers(0, 99),
)
def test_any_shape_equals_plain_torch(batch, kv_heads, group, chunk, past, dim, far, scale, seed):
    query, keys, values, weights = tensors(batch, kv_heads, group, chunk, past, dim, seed=seed)
    query *= scale
    output, sums = kernel_triton.attend_and_sum(query, keys, values, weights, far)
    right, right_sums = expected(query, keys, values, weights, far)
    within = 1e-5 * max(1, scale)  # large logits round more coarsely
    assert close(output, right, within)
    assert close(sums, right_sums, 10 * within)


def test_the_log_sum_exp_is_that_of_each_querys_logits():
    query, keys, values, _ = tensors(1, 2, 2, 20, 30, 16)
    _, totals = kernel_triton.attend(query, keys, values)
    logits = query.unflatten(1, (2, 2)) @ keys[:, :, None].mT
    hidden = torch.ones(20, 50, dtype=torch.bool, device=DEVICE).triu(31)
    assert close(totals, logits.masked_fill(hidden, -torch.inf).logsumexp(-1).flatten(1, 2), 1e-5)


def test_heads_may_lie_in_any_order_in_memory():
    query, keys, values, weights = tensors(2, 2, 2, 18, 20, 16)
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, keys, values)]
    turned = [x.mT.contiguous().mT for x in (query, keys, values)]
    first, sums = kernel_triton.attend_and_sum(query, keys, values, weights, 3)
    for other in (apart, turned):
        output, other_sums = kernel_triton.attend_and_sum(*other, weights, 3)
        assert torch.equal(output, first)
        assert torch.equal(other_sums, sums)


def test_without_weights_there_are_no_sums():
    query, keys, values, _ = tensors(1, 1, 2, 20, 10, 8)
    output, sums = kernel_triton.attend_and_sum(query, keys, values, None)
    assert sums is None
    assert close(output, attend(query, keys, values)[0], 1e-5)


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_is_not_a_number_is_not_hidden(odd):
    query, keys, values, weights = tensors(1, 1, 1, 20, 10, 8)
    query[0, 0, 7, 3] = odd
    output, sums = kernel_triton.attend_and_sum(query, keys, values, weights, 5)
    assert output[0, 0, 7].isnan().all()
    assert not output[0, 0, [6, 8]].isnan().any()
    assert sums[0, 0, :12].isnan().all()  # what the seventh query, at 17, is far enough away from
    assert not sums[0, 0, 13:].isnan().any()


@pytest.mark.parametrize("policy", ["streamh2o", "h2o"])
def test_a_stream_has_the_same_losses_with_it(policy, monkeypatch):
    model = llama(heads=4).to(DEVICE)
    ids = torch.randint(0, VOCABULARY, (1, 160), generator=torch.Generator().manual_seed(1))

    def read(kernel):
        with ChunkStream(model, make_policy(policy, 48), chunk=32, kernel=kernel) as stream:
            found = torch.cat([stream.feed(part).losses for part in ids.split(32, dim=1)], dim=1)
            return found, stream.cache.slots[1].source_index[:, :, :48].clone()

    plain, kept = read("torch")
    if GPU:
        found, kept_too = read("compiled")
    else:  # what a GPU would be given goes to the interpreter
        monkeypatch.setattr(Kernel, "takes_queries", lambda self, query: query.shape[2] >= 16)
        monkeypatch.setattr(compiled, "attend_and_sum", kernel_triton.attend_and_sum)
        found, kept_too = read("torch")
    assert torch.allclose(found, plain, atol=1e-4)
    assert torch.equal(kept, kept_too)
    assert not torch.equal(found, plain), "the kernel was not used"
