"""Slots as integers: how far a value comes back off, that it is quantised once, and what is held and counted."""

import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamh2o.cache import quantised_slots as quantised
from streamh2o.cache.quantised_slots import GROUP, QuantisedSlots, Scratch, dequantise, quantise
from streamh2o.errors import UsageError, UserError
from streamh2o.kernels.select import TORCH
from streamh2o.models.find import NAMED
from streamh2o.models.load import load_model
from streamh2o.policies import POLICIES, make_policy
from streamh2o.stream.chunk_stream import ChunkStream
from streamh2o.stream.stream_cache import StreamCache
from tests import tiny

HITTERS = [name for name in POLICIES if make_policy(name, 16).hitters]


@contextmanager
def newest_kept(window):
    """Only so many of the newest slots stay as they are."""
    whole, quantised.WINDOW = quantised.WINDOW, window
    try:
        yield
    finally:
        quantised.WINDOW = whole


@contextmanager
def streams(model, policy):
    """One at full width, one at 8 bits."""
    with ChunkStream(model, policy, chunk=6) as exact, ChunkStream(model, policy, chunk=6, kv_bits=8) as rounded:
        yield exact, rounded


def feed(stream, ids, chunk):
    return torch.cat([stream.feed(ids[:, start : start + chunk]).losses for start in range(0, ids.shape[1], chunk)], 1)


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from([8, 4]),
    dim=st.sampled_from([1, 3, 8, 32, 64, 80, 96]),
    size=st.floats(1e-4, 1e4),
    offset=st.floats(-1e5, 1e5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_a_value_comes_back_within_half_a_step_of_its_group(bits, dim, size, offset, dtype, seed):
    noise = torch.randn(2, 3, 5, dim, generator=torch.Generator().manual_seed(seed))
    x = (noise * size + offset).to(dtype)
    codes, steps = quantise(x, bits)
    assert codes.dtype == torch.uint8
    assert codes.shape == (2, 3, 5, dim if bits == 8 else (dim + 1) // 2)
    step = steps.float().repeat_interleave(dim // steps.shape[-1], -1)
    error = (dequantise(codes, steps, bits, dim) - x.float()).abs()
    assert (error <= step / 2 + x.float().abs().amax(-1, keepdim=True) * 1e-6).all()  # sums round by the largest
    largest = x.float().unflatten(-1, (steps.shape[-1], -1)).abs().amax(-1)
    assert (steps.float() <= (largest * 2.02 + 1e-29) / (2**bits - 1)).all()


@pytest.mark.parametrize("value", [0.0, -3.5, 3e38])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_group_of_equal_values_comes_back_near_them(bits, value):
    x = torch.full((1, 1, 2, GROUP), value)
    assert torch.allclose(dequantise(*quantise(x, bits), bits, GROUP), x, rtol=1e-2)


@settings(max_examples=12, deadline=None)
@given(
    cache=st.integers(7, 40),
    chunk=st.integers(1, 30),
    count=st.integers(1, 80),
    policy=st.sampled_from([*HITTERS, "streamingllm"]),
    bits=st.sampled_from([8, 4]),
    window=st.integers(1, 20),
)
def test_only_what_is_older_is_quantised_and_the_budget_is_kept(cache, chunk, count, policy, bits, window):
    model, made, ids = tiny.llama(), make_policy(policy, cache), tiny.tokens(count, batch=2)
    newest = min(window, made.recent)
    with newest_kept(window), ChunkStream(model, made, chunk=chunk, batch=2, kv_bits=bits) as stream:
        for start in range(0, count, chunk):
            stream.feed(ids[:, start : start + chunk])
            assert stream.slots == min(stream.tokens, cache)
            older = max(0, stream.slots - made.sinks - newest)
            for layer in stream.cache.slots:
                assert isinstance(layer, QuantisedSlots)
                assert layer.packed_keys.rows == layer.packed_values.rows == older
                assert layer.keys.shape[2] == made.sinks + newest + chunk
                index = layer.source_index[:, :, : layer.used]
                assert (index.diff(dim=-1) > 0).all()
        state, _ = stream.state()
        kept = [each for name, each in state.items() if name.startswith("layer")]
        counted = [each for each in kept if each.dim() != 3]  # all but scores and source indices
        if stream.slots == stream.max_slots:
            assert stream.kv_bytes == sum(each.nbytes for each in counted)


@pytest.mark.parametrize("bits", [8, 4])
def test_survivors_are_the_same_integers_after_fifty_evictions(bits):
    model, policy, ids = tiny.llama(layers=1), make_policy("h2o", 24, sinks=2, recent=6), tiny.tokens(150)
    first: dict = {}  # by head and token: the eviction before which it was quantised, and its codes and steps
    with ChunkStream(model, policy, chunk=2, kv_bits=bits) as stream:
        for start in range(0, 150, 2):
            stream.feed(ids[:, start : start + 2])
            (layer,) = stream.cache.slots
            parts = [t[0].float() for p in (layer.packed_keys, layer.packed_values) for t in (p.codes, p.steps)]
            rows = torch.cat(parts, dim=-1)
            tokens = layer.source_index[0, :, 2 : 2 + rows.shape[1]]
            for head in range(2):
                for token, row in zip(tokens[head].tolist(), rows[head].tolist(), strict=True):
                    assert first.setdefault((head, token), (stream.evictions, row))[1] == row
        assert max(stream.evictions - first[0, token][0] for token in tokens[0].tolist()) >= 50


@pytest.mark.parametrize("window", [3, 64])
@pytest.mark.parametrize("count", [24, 66])
def test_at_eight_bits_the_slots_hold_what_the_model_gave_but_for_rounding(window, count):
    """The last layer's slots against those of a run at full width: it has no layer below that was quantised."""
    model, policy, ids = tiny.llama(layers=1), make_policy("streamingllm" if count > 24 else "h2o", 24), tiny.tokens(90)
    with (
        newest_kept(window),
        ChunkStream(model, policy, chunk=6) as exact,
        ChunkStream(model, policy, chunk=6, kv_bits=8) as rounded,
    ):
        feed(exact, ids[:, :count], 6), feed(rounded, ids[:, :count], 6)
        one, other = exact.cache.slots[0], rounded.cache.slots[0]
        assert torch.equal(one.source_index[:, :, :24], other.source_index[:, :, :24])
        for plain, back in zip(one.valid(), other.valid(), strict=True):
            older = slice(policy.sinks, policy.cache - min(window, policy.recent))
            assert (plain - back).abs().max() < 0.02 * plain.abs().max()
            assert ((plain - back)[:, :, older].abs().amax((0, 1, 3)) > 0).all()
            assert torch.equal(plain[:, :, : older.start], back[:, :, : older.start])
            assert torch.equal(plain[:, :, older.stop :], back[:, :, older.stop :])


@settings(max_examples=40, deadline=None)
@given(
    scale=st.floats(-3, 3).map(lambda power: 10**power),
    seed=st.integers(0, 2**31),
    first=st.integers(20, 60),
)
def test_keys_are_quantised_per_channel(scale, seed, first):
    """A channel comes back within a share of its own spread, or of a quarter of the mean one, however far off it is."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.rand(2, 1, 64, generator=generator).mul(6).sub(3).exp() * scale  # of the 64 channels of two heads
    keys = (torch.randn(1, 2, 150, 64, generator=generator) + 30 * torch.randn(2, 1, 64, generator=generator)) * wide
    slots = QuantisedSlots(keys, keys, 200, TORCH, make_policy("h2o", 200), 4, Scratch())
    for part in keys.split([first, 150 - first], dim=2):
        slots.append(part, part, slots.used)
        slots.leave_window(4, 100)
    off = (slots.valid()[0] - keys)[:, :, 4:-16].square().mean(2, keepdim=True).sqrt()
    assert (off <= 0.25 * wide.clamp(min=wide.mean(-1, keepdim=True) * 0.25)).all()


def test_more_bits_are_nearer_to_the_losses_of_sixteen():
    model, policy, ids = tiny.llama(), make_policy("streamh2o", 40), tiny.tokens(200)
    exact, eight, four = (tiny.stream_losses(model, policy, ids, 8, kv_bits=bits) for bits in (16, 8, 4))
    assert torch.equal(exact, tiny.stream_losses(model, policy, ids, 8))
    assert 0 < (eight - exact).abs().mean() < (four - exact).abs().mean() / 4


@pytest.mark.parametrize("policy", ["streamingllm", "full", "recompute"])
def test_without_older_slots_there_is_nothing_to_quantise(policy):
    model, made, ids = tiny.llama(), make_policy(policy, 20), tiny.tokens(60)
    got = tiny.stream_losses(model, made, ids, 8, kv_bits=4)
    assert torch.equal(got, tiny.stream_losses(model, made, ids, 8))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_streams_a_batch_as_if_each_were_alone(family):
    model, ids, made = tiny.FAMILIES[family](), tiny.tokens(70, batch=2), make_policy("streamh2o", 20)
    both = tiny.stream_losses(model, made, ids, 8, kv_bits=8)
    for row in range(2):
        alone = tiny.stream_losses(model, made, ids[row : row + 1], 8, kv_bits=8)
        assert torch.allclose(both[row], alone[0], atol=1e-2)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("stop", [8, 16, 40])
@pytest.mark.parametrize("policy", [make_policy("streamh2o", 20), make_policy("h2-only", 20, sinks=0)])
def test_a_stream_goes_on_from_its_state_with_the_same_digits(policy, bits, stop):
    model, ids = tiny.llama(), tiny.tokens(96)
    whole = tiny.stream_losses(model, policy, ids, 8, kv_bits=bits)
    with ChunkStream(model, policy, chunk=8, kv_bits=bits) as first:
        head = feed(first, ids[:, :stop], 8)
        tensors, counts = first.state()
    with ChunkStream(model, policy, chunk=8, kv_bits=bits) as second:
        second.load_state({k: v.clone() for k, v in tensors.items()}, counts)
        tail = feed(second, ids[:, stop:], 8)
    assert torch.equal(torch.cat([head, tail], 1), whole)


def test_a_state_of_another_width_or_damaged_is_refused():
    model, made = tiny.llama(), make_policy("h2o", 20)
    with ChunkStream(model, made, chunk=8, kv_bits=4) as stream:
        feed(stream, tiny.tokens(40), 8)
        tensors, counts = stream.state()
    for bits in (16, 8):
        with ChunkStream(model, made, chunk=8, kv_bits=bits) as other, pytest.raises(UserError, match="damaged"):
            other.load_state(tensors, counts)
    for name in [name for name in tensors if name.startswith("layer1.")]:
        cut = {**tensors, name: tensors[name][:, :1]}
        with ChunkStream(model, made, chunk=8, kv_bits=4) as other, pytest.raises(UserError, match="damaged"):
            other.load_state(cut, counts)
        if name != "layer1.keys":  # its lack ends the cache
            with (
                ChunkStream(model, made, chunk=8, kv_bits=4) as other,
                pytest.raises(UserError, match=f"lacks {name};"),
            ):
                other.load_state({each: tensors[each] for each in tensors if each != name}, counts)


def test_a_probe_leaves_no_trace_though_longer_than_a_chunk():
    model, ids, policy = tiny.llama(), tiny.tokens(64), make_policy("h2o", 20)
    plain = tiny.stream_losses(model, policy, ids, 8, kv_bits=8)
    with ChunkStream(model, policy, chunk=8, kv_bits=8) as stream:
        parts = []
        for start in range(0, 64, 8):
            parts.append(stream.feed(ids[:, start : start + 8]).losses)
            stream.probe(tiny.tokens(13, seed=start))
    assert torch.equal(torch.cat(parts, 1), plain)


@pytest.mark.skipif(NAMED["smollm2-135m"].path() is None, reason="streamh2o models get smollm2-135m")
def test_the_real_model_loses_next_to_nothing_in_about_half_and_a_third_of_the_bytes():
    loaded = load_model(dtype="bfloat16", device="cpu")
    text = (Path(__file__).parents[2] / "data" / "sample.txt").read_text("utf-8")
    ids, policy, found = loaded.tokenizer(text, return_tensors="pt").input_ids, make_policy("streamh2o", 320), {}
    for bits in (16, 8, 4):
        with ChunkStream(loaded.model, policy, chunk=128, kv_bits=bits, kernel="auto") as stream:
            found[bits] = float(feed(stream, ids, 128)[:, 1:].mean()), stream.kv_bytes
    for bits, nats, part in ((8, 0.005, 0.56), (4, 0.03, 0.32)):
        assert abs(found[bits][0] - found[16][0]) < nats
        assert found[bits][1] < part * found[16][1]


def test_what_it_cannot_do_is_refused_by_name():
    model, policy = tiny.llama(), make_policy("h2o", 20)
    with pytest.raises(UsageError, match="--kv-bits is 5; it must be 16, 8 or 4"):
        ChunkStream(model, policy, chunk=8, kv_bits=5)
    with pytest.raises(UsageError, match=r"--kv-bits 8 .* --evict token"):
        ChunkStream(model, policy, chunk=8, kv_bits=8, evict="token")
    with pytest.raises(UsageError, match="kv_bits is for a Stream"):
        StreamCache.for_model(model, cache=20, kv_bits=8)


def test_a_cache_that_fits_only_as_integers_is_let_in_and_one_that_does_not_is_told_the_sum(monkeypatch):
    model, policy = tiny.llama(layers=8, positions=2048), make_policy("h2o", 1000, sinks=4, recent=96)
    slot, packed = 2 * 8 * 4 + 12, 2 * (8 + 2) + 12  # bytes of a key and value of 8 channels, score and index
    need = 8 * 2 * ((1000 + 8 - 980) * slot + 980 * packed) + 2 * (1008 * 2 * 8 * 4 + 980 * 8 * 4)  # one layer unpacked
    monkeypatch.setattr("streamh2o.cache.memory_check.free_bytes", lambda device: need)
    ChunkStream(model, policy, chunk=8, kv_bits=8).close()
    with pytest.raises(UserError, match="would fit"):
        ChunkStream(model, policy, chunk=8)
    monkeypatch.setattr("streamh2o.cache.memory_check.free_bytes", lambda device: need - 1)
    with pytest.raises(UserError, match=r"0\.73 MB .* less 0\.50 MB by --kv-bits 8.* --cache 999 would fit"):
        ChunkStream(model, policy, chunk=8, kv_bits=8)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_the_cache_that_is_said_to_fit_does_and_one_slot_more_does_not(monkeypatch, bits):
    model = tiny.llama(positions=2048)
    monkeypatch.setattr("streamh2o.cache.memory_check.free_bytes", lambda device: 200_000)
    with pytest.raises(UserError) as told:
        ChunkStream(model, make_policy("h2o", 2000, recent=96), chunk=8, kv_bits=bits)
    fits = int(re.search(r"--cache (\d+) would fit", str(told.value))[1])
    ChunkStream(model, make_policy("h2o", fits, recent=96), chunk=8, kv_bits=bits).close()
    with pytest.raises(UserError, match=f"--cache {fits} would fit"):
        ChunkStream(model, make_policy("h2o", fits + 1, recent=96), chunk=8, kv_bits=bits)


def test_a_state_without_integers_yet_is_taken_again():
    model, policy, ids = tiny.llama(), make_policy("streamingllm", 20), tiny.tokens(60)
    assert policy.recent == quantised.WINDOW
    with ChunkStream(model, policy, chunk=8, kv_bits=8) as first:
        feed(first, ids[:, :40], 8)
        tensors, counts = first.state()
        expected = feed(first, ids[:, 40:], 8)
    with ChunkStream(model, policy, chunk=8, kv_bits=8) as second:
        second.load_state({name: tensor.clone() for name, tensor in tensors.items()}, counts)
        assert torch.equal(feed(second, ids[:, 40:], 8), expected)
