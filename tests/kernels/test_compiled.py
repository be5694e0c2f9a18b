"""The compiled kernel against plain torch, and what is said where it cannot be had."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamh2o.cache.rotary import RotaryTable
from streamh2o.errors import UsageError, UserError
from streamh2o.kernels import compiled, select
from streamh2o.kernels.plain import attend, column_sums
from streamh2o.policies import make_policy
from streamh2o.stream.chunk_stream import ChunkStream
from tests.tiny import VOCABULARY, gpt_neox, llama

pytestmark = pytest.mark.usefixtures("built")


def rows(generator, *shape):
    return torch.randn(*shape, generator=generator)


@settings(max_examples=80, deadline=None)
@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3, 7]),
    chunk=st.one_of(st.integers(1, 4), st.integers(1, 150)),  # the first are few enough for a way of their own
    past=st.integers(0, 200),
    half_dim=st.one_of(st.integers(1, 24), st.sampled_from([32, 64])),
    narrower=st.integers(0, 12),
    far=st.integers(0, 250),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
    seed=st.integers(0, 99),
)
def test_attention_and_sums_equal_plain_torch(
    batch, kv_heads, group, chunk, past, half_dim, narrower, far, scale, seed
):
    generator, dim = torch.Generator().manual_seed(seed), 2 * half_dim
    query = rows(generator, batch, kv_heads * group, chunk, dim) * scale / dim**0.5
    room = rows(generator, 2, batch, kv_heads, past + chunk + 5, dim)  # slots are a part of a larger buffer
    keys, values = room[0, :, :, : past + chunk], room[1, :, :, : past + chunk, : max(1, dim - narrower)]
    weights = torch.rand(chunk, generator=generator)
    expected, probabilities = attend(query, keys, values)
    expected_sums = column_sums(probabilities, weights, far)
    output, sums = compiled.attend_and_sum(query, keys, values, weights, far)
    assert torch.allclose(output, expected, atol=1e-5 * max(1, scale))  # large logits round more coarsely
    assert sums.shape == expected_sums.shape
    assert torch.allclose(sums, expected_sums, atol=1e-4 * max(1, scale))
    half = [tensor.bfloat16() for tensor in (query, keys, values)]
    exact, probabilities = attend(*(tensor.float() for tensor in half))
    output, sums = compiled.attend_and_sum(*half, weights, far)
    assert (output.float() - exact).abs().max() < 0.03
    assert torch.allclose(sums, column_sums(probabilities, weights, far), atol=1e-3 * max(1, scale), rtol=1e-3)


def test_without_weights_there_are_no_sums():
    query, keys = torch.randn(1, 2, 20, 8), torch.randn(1, 1, 30, 8)
    output, sums = compiled.attend_and_sum(query, keys, keys, None, 0)
    assert sums is None
    assert torch.allclose(output, attend(query, keys, keys)[0], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_not_a_number_is_not_hidden(dtype, odd):
    query, keys = torch.randn(1, 1, 20, 8).to(dtype), torch.randn(1, 1, 30, 8).to(dtype)
    query[0, 0, 7, 3] = odd
    output, _ = compiled.attend_and_sum(query, keys, keys, torch.ones(20), 0)
    assert output[0, 0, 7].isnan().all()
    assert not output[0, 0, [6, 8]].isnan().any()
    query, keys = torch.randn(1, 2, 2, 64).to(dtype), torch.randn(1, 1, 30, 64).to(dtype)
    query[0, 1, 0, 3] = odd
    output, _ = compiled.attend_and_sum(query, keys, keys, torch.ones(2), 0)
    assert output[0, 1, 0].isnan().all()
    assert not output[0, [0, 0, 1], [0, 1, 1]].isnan().any()
    logits = torch.randn(3, 2000).to(dtype)
    logits[1, 1999] = odd
    found = compiled.losses(logits, torch.tensor([0, 1, 2]))
    assert not found[1].isfinite()
    assert found[[0, 2]].isfinite().all()


@settings(max_examples=60, deadline=None)
@given(
    heads=st.integers(1, 3),
    n=st.integers(1, 40),
    half=st.integers(1, 20),
    rest=st.integers(0, 9),
    style=st.sampled_from(["half", "interleaved"]),
    own=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rotation_equals_that_of_the_table(heads, n, half, rest, style, own, seed):
    generator = torch.Generator().manual_seed(seed)
    angles = torch.arange(64)[:, None] * torch.rand(half, generator=generator)
    table = RotaryTable(angles.cos(), angles.sin(), style)
    x = rows(generator, 2, heads, n, 2 * half + rest)
    positions = torch.randint(0, 64, (2, heads, n) if own else (1, 1, n), generator=generator)
    expected = table.rotate(x, table.cos[positions], table.sin[positions], 0.7)
    found = compiled.rotate(x, [(0, n, positions)], table.cos, table.sin, 0.7, style == "interleaved")
    assert torch.allclose(found, expected, atol=1e-5)


def test_slots_rotate_by_runs():
    angles = torch.arange(99)[:, None] * torch.rand(4)
    table = RotaryTable(angles.cos(), angles.sin())
    x, own = torch.randn(2, 3, 200, 8), torch.randint(0, 99, (2, 3, 70))
    runs = [(0, 4, 20), (4, 74, own), (74, 80, own[:1, :1, :6]), (80, 110, 50), (110, 110, 5), (110, 200, 7)]
    expected = [table.place_keys(x[:, :, start:end], _where(at, end - start)) for start, end, at in runs]
    found = compiled.rotate(x, runs, table.cos, table.sin, 1.0, False)
    assert torch.allclose(found, torch.cat(expected, dim=2), atol=1e-5)
    with pytest.raises(RuntimeError, match="no such position"):
        compiled.rotate(x, [(0, 200, 0)], table.cos, table.sin, 1.0, False)


def _where(at, count):
    return at if isinstance(at, torch.Tensor) else slice(at, at + count)


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 5),
    vocabulary=st.integers(1, 5000),
    scale=st.sampled_from([0.01, 1.0, 50.0]),
    seed=st.integers(0, 99),
)
def test_losses_equal_cross_entropy(count, vocabulary, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = rows(generator, count, vocabulary) * scale
    targets = torch.randint(0, vocabulary, (count,), generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        given_logits = logits.to(dtype)
        expected = torch.nn.functional.cross_entropy(given_logits.float(), targets, reduction="none")
        assert torch.allclose(compiled.losses(given_logits, targets), expected, atol=1e-4, rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 150),
    vocabulary=st.integers(1, 3000),
    half_size=st.integers(1, 20),
    scale=st.sampled_from([0.01, 1.0, 30.0]),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 99),
)
def test_losses_without_logits_equal_those_with_them(count, vocabulary, half_size, scale, threads, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = rows(generator, count, 2 * half_size) * scale, rows(generator, vocabulary, 2 * half_size)
    targets = torch.randint(0, vocabulary, (count,), generator=generator)
    torch.set_num_threads(threads)
    try:
        for dtype in (torch.float32, torch.bfloat16):
            logits = hidden.to(dtype).float() @ weight.to(dtype).float().T
            expected = torch.nn.functional.cross_entropy(logits.to(dtype).float(), targets, reduction="none")
            given_hidden, embedding = hidden.to(dtype), weight.to(dtype)
            found = compiled.head_losses(given_hidden, embedding, compiled.pack_head(embedding), targets)
            assert torch.equal(found, compiled.head_losses(given_hidden, embedding, None, targets))
            # A logit that lies between two numbers of bfloat16 may be rounded to the other one.
            within = 1e-4 if dtype == torch.float32 else 2**-7
            assert torch.allclose(found, expected, atol=within * max(1, float(logits.abs().max())), rtol=1e-5)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_loss_without_logits_that_is_no_number_is_not_hidden(dtype, odd):
    hidden, weight = torch.randn(3, 8).to(dtype), torch.randn(2000, 8).to(dtype)
    hidden[1, 3] = odd
    found = compiled.head_losses(hidden, weight, compiled.pack_head(weight), torch.tensor([0, 1, 1999]))
    assert not found[1].isfinite()
    assert found[[0, 2]].isfinite().all()


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 20),
    size=st.integers(1, 200),
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_norm_and_gate_equal_those_of_plain_torch(count, size, scale, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x, y = (rows(generator, 2, count, size) * scale).to(dtype), rows(generator, 2, count, size).to(dtype)
    weight, within = rows(generator, size).to(dtype), 1e-5 if dtype == torch.float32 else 2**-7
    normed = weight * (x.float() * (x.float().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()).to(dtype)
    assert torch.allclose(compiled.rms_norm(x, weight, 1e-5), normed, rtol=within, atol=1e-6)
    expected = torch.nn.functional.silu(x) * y
    # In bfloat16 it is rounded twice, and either may go the other way.
    assert torch.allclose(compiled.gate(x.clone(), y), expected, rtol=2 * within, atol=1e-6)


@pytest.mark.parametrize("policy", ["streamh2o", "h2o", "streamingllm"])
@pytest.mark.parametrize("build", [llama, gpt_neox])
def test_a_stream_has_the_same_losses_with_it(policy, build):
    model = build()
    ids = torch.randint(0, VOCABULARY, (2, 400), generator=torch.Generator().manual_seed(1))

    def read(kernel):
        with ChunkStream(model, make_policy(policy, 64), chunk=32, batch=2, kernel=kernel) as stream:
            found = torch.cat([stream.feed(part).losses for part in ids.split(32, dim=1)], dim=1)
            return found, stream.cache.slots[1].source_index[:, :, :64].clone()

    plain, kept = read("torch")
    found, kept_too = read("compiled")
    assert torch.allclose(found, plain, atol=1e-4)
    assert torch.equal(kept, kept_too)
    assert not torch.equal(found, plain), "the kernel was not used"


def test_names_are_checked():
    with pytest.raises(UsageError, match="--kernel is 'fast'"):
        select.select("fast")


GPU = torch.device("cuda")


@pytest.fixture
def tried_anew(monkeypatch):
    monkeypatch.setattr(select, "_found", {})


def test_without_triton_a_gpu_computes_in_plain_torch_and_that_is_said(monkeypatch, tried_anew):
    monkeypatch.setattr(select, "find_spec", lambda name: None)
    said = []
    assert select.select("auto", GPU, said.append) == select.TORCH
    assert said == ["kernel: plain torch, since there is no triton here, which PyTorch's builds for GPUs bring along."]
    with pytest.raises(UserError, match="no triton here"):
        select.select("compiled", GPU)
    with pytest.raises(UserError, match="no kernel for mps"):
        select.select("compiled", torch.device("mps"))


def fails(dtype, device):
    raise RuntimeError("no linker\nanywhere")


@pytest.mark.parametrize(
    ("trial", "why"),
    [
        (fails, "Triton fails on this GPU (RuntimeError: no linker anywhere)."),
        (lambda dtype, device: dtype != torch.float16, "Triton's float16 is not plain torch's on this GPU."),
    ],
)
def test_triton_is_not_used_where_a_trial_of_it_fails(monkeypatch, tried_anew, trial, why):
    monkeypatch.setattr(select, "find_spec", lambda name: name)
    monkeypatch.setattr(select, "_agrees", trial)
    said = []
    assert select.select("auto", GPU, said.append) == select.TORCH
    assert said == [f"kernel: plain torch, since {why}"]


def test_a_kernel_is_for_the_device_that_it_was_selected_for(monkeypatch, tried_anew):
    monkeypatch.setattr(select, "find_spec", lambda name: name)
    monkeypatch.setattr(select, "_agrees", lambda dtype, device: True)
    here = torch.zeros(1, 1, 16, 8)
    there = SimpleNamespace(dtype=torch.float16, device=torch.device("cuda:1"), shape=here.shape)
    kernel = select.select("auto", GPU)
    assert kernel.name == "compiled"
    assert (kernel.takes_queries(there), kernel.takes_queries(here)) == (True, False)
    assert [kernel.takes(there), kernel.takes(here)] == [False, False], "there is but the attention for a GPU"
    monkeypatch.undo()
    kernel = select.select("compiled")
    assert (kernel.takes_queries(there), kernel.takes_queries(here)) == (False, True)


def elsewhere(tmp_path, name, **environment):
    """What `select` says in a process of its own, with a cache folder of its own."""
    code = f"from streamh2o.kernels.select import select; print(select({name!r}, tell=print).name)"
    return subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "", "STREAMH2O_CACHE": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_compiler_plain_torch_is_taken_and_said(tmp_path):
    done = elsewhere(tmp_path, "auto")
    assert done.stdout.splitlines() == ["kernel: plain torch, since there is no C++ compiler (g++) here.", "torch"]
    assert "there is no C++ compiler" in elsewhere(tmp_path, "compiled").stderr


def test_a_compiler_that_fails_is_named(tmp_path):
    broken = tmp_path / "compiler"
    broken.write_text("#!/bin/sh\necho 'fatal error: no such header' >&2\nexit 1\n")
    broken.chmod(0o755)
    done = elsewhere(tmp_path, "auto", CXX=str(broken), PATH="/usr/bin:/bin")
    assert "the compiler failed on attention.cpp: fatal error: no such header" in done.stdout
    assert done.stdout.splitlines()[-1] == "torch"
    assert list((tmp_path / "kernels").iterdir()) == []
