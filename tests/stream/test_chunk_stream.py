"""The loop as a whole: equal to plain attention while nothing is evicted, and to the reference afterwards."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamh2o.cache.slots import LayerSlots
from streamh2o.errors import UsageError, UserError
from streamh2o.policies import make_policy
from streamh2o.stream.chunk_stream import ChunkStream
from streamh2o.stream.engine.fused import Fused
from tests import families, tiny
from tests.reference import reference_losses

CASES = {case.name: case for case in families.CASES}


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("policy", ["streamh2o", "h2o", "streamingllm", "local", "full", "recompute"])
def test_while_nothing_is_evicted_every_chunk_size_equals_the_plain_model(family, policy):
    model, ids = tiny.FAMILIES[family](), tiny.tokens(60)
    expected = tiny.dense_losses(model, ids)
    for chunk in (1, 7, 60):
        got = tiny.stream_losses(model, make_policy(policy, cache=64), ids, chunk)
        assert torch.allclose(got, expected, atol=1e-4), f"chunk {chunk}"


@pytest.mark.parametrize("rope", ["linear", "yarn", "llama3"])
def test_scaled_rope_equals_the_plain_model(rope):
    parameters = {
        "linear": {"factor": 2.0},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
        "llama3": {
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    }[rope]
    model = tiny.llama(rope_parameters={"rope_type": rope, "rope_theta": 10000.0, **parameters})
    ids = tiny.tokens(60)
    got = tiny.stream_losses(model, make_policy("h2o", cache=64), ids, 7)
    assert torch.allclose(got, tiny.dense_losses(model, ids), atol=1e-4)


REFERENCE_CASES = {
    "h2o": make_policy("h2o", 12, sinks=2),
    "h2o without sinks": make_policy("h2o", 12, sinks=0, recent=8),
    "streamingllm": make_policy("streamingllm", 12, sinks=3),
    "local": make_policy("local", 12),
    "long-range": make_policy("streamh2o", 12, sinks=2, recent=6, far=5, decay=1.0),
    "fading": make_policy("streamh2o", 12, sinks=2, recent=6, far=3, decay=1e-6),
    "rolled": make_policy("streamh2o", 12, sinks=2, recent=6, far=6, decay=0.1, positions="rolled"),
}


@pytest.mark.parametrize("case", REFERENCE_CASES)
@pytest.mark.parametrize("chunk", [1, 5, 20])
def test_evicting_equals_the_slow_reference(case, chunk):
    model, policy, ids = tiny.llama(), REFERENCE_CASES[case], tiny.tokens(56)
    with torch.no_grad():
        expected = reference_losses(copy.deepcopy(model).double(), ids[0], policy, chunk)
    assert torch.allclose(tiny.stream_losses(model.double(), policy, ids, chunk)[0].double(), expected, atol=1e-5)
    assert torch.allclose(tiny.stream_losses(model.float(), policy, ids, chunk)[0].double(), expected, atol=1e-3)


def test_true_distances_stay_below_the_trained_positions():
    """A model of 48 positions and a stream of 150: hitters that are farther go first."""
    model = tiny.llama(positions=48).double()
    policy, ids = make_policy("streamh2o", 16, sinks=2, recent=6, far=4), tiny.tokens(150)
    with torch.no_grad():
        expected = reference_losses(model, ids[0], policy, 10)
    assert torch.allclose(tiny.stream_losses(model, policy, ids, 10)[0].double(), expected, atol=1e-5)


@pytest.mark.parametrize("policy", ["streamh2o", "h2o", "streamingllm"])
def test_a_batch_of_two_equals_two_batches_of_one(policy):
    model, ids = tiny.llama(), tiny.tokens(90, batch=2)
    made = make_policy(policy, cache=20)
    both = tiny.stream_losses(model, made, ids, 8)
    for row in range(2):
        assert torch.allclose(both[row], tiny.stream_losses(model, made, ids[row : row + 1], 8)[0], atol=1e-4)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 79), st.sampled_from(["streamh2o", "h2o", "streamingllm", "local"]), st.integers(1, 20))
def test_changing_a_token_never_changes_an_earlier_loss(changed, policy, chunk):
    model, ids = tiny.llama(), tiny.tokens(80)
    other = ids.clone()
    other[0, changed] = (other[0, changed] + 1) % tiny.VOCABULARY
    made = make_policy(policy, cache=16)
    before, after = (tiny.stream_losses(model, made, x, chunk)[0] for x in (ids, other))
    assert torch.equal(before[: max(changed - 1, 0)], after[: max(changed - 1, 0)])


@settings(max_examples=25, deadline=None)
@given(
    cache=st.integers(6, 40),
    chunk=st.integers(1, 30),
    count=st.integers(1, 120),
    policy=st.sampled_from(["streamh2o", "h2o", "streamingllm", "local"]),
)
def test_slots_are_the_tokens_seen_or_the_budget_and_hold_what_the_policy_says(cache, chunk, count, policy):
    model, ids, made = tiny.llama(), tiny.tokens(count), make_policy(policy, cache)
    with ChunkStream(model, made, chunk=chunk) as stream:
        for start in range(0, count, chunk):
            stream.feed(ids[:, start : start + chunk])
            assert stream.slots == min(stream.tokens, cache)
            assert sum(stream.composition().values()) == stream.slots
            for layer in stream.cache.slots:
                index = layer.source_index[:, :, : layer.used]
                assert (index.diff(dim=-1) > 0).all()
                sinks = min(made.sinks, stream.tokens)
                assert (index[..., :sinks] == torch.arange(sinks)).all()
                recent = min(made.recent, stream.slots)
                newest = torch.arange(stream.tokens - recent, stream.tokens)
                assert (index[..., stream.slots - recent :] == newest).all()
        assert stream.scored == count - 1
        assert (stream.evictions > 0) == (count > cache)


def test_after_ten_thousand_evictions_a_rotated_key_equals_a_fresh_rotation():
    """Keys are kept un-rotated, so a slot is turned once, however long it has been there."""
    from streamh2o.cache.positions import rotated

    model, policy = tiny.llama(layers=1), make_policy("h2o", 8, sinks=2, recent=3)
    with ChunkStream(model, policy, chunk=1) as stream:
        first_keys = None
        for token in tiny.tokens(10_010).T:
            stream.feed(token[None])
            if first_keys is None and stream.tokens == 2:
                first_keys = stream.cache.slots[0].keys[:, :, :2].clone()
        assert stream.evictions > 10_000
        layer = stream.cache.slots[0]
        assert torch.equal(layer.keys[:, :, :2], first_keys)
        _, keys = rotated(stream.cache, layer, torch.zeros(1, 8, 1, 8), 1.0)
        rotary = stream.cache.rotary.tables[0]
        for slot in range(layer.used):
            fresh = rotary.rotate(layer.keys[:, :, slot : slot + 1], rotary.cos[slot], rotary.sin[slot])
            assert (keys[:, :, slot : slot + 1] - fresh).abs().max() < 1e-6


def test_kv_bytes_is_what_the_slots_take():
    model = tiny.llama()
    with ChunkStream(model, make_policy("h2o", 20), chunk=8) as stream:
        for start in range(0, 64, 8):
            stream.feed(tiny.tokens(64)[:, start : start + 8])
        assert stream.kv_bytes == 2 * 2 * 20 * 8 * 2 * 4  # layers, KV heads, slots, head_dim, K and V, bytes
        assert stream.max_slots == 20


def test_a_probe_leaves_no_trace_and_sees_what_the_next_chunk_would():
    model, ids, policy = tiny.llama(), tiny.tokens(64), make_policy("h2o", 20)
    plain = tiny.stream_losses(model, policy, ids, 8)
    with ChunkStream(model, policy, chunk=8) as stream:
        parts = []
        for start in range(0, 64, 8):
            probed = stream.probe(ids[:, start : start + 8])
            stream.probe(tiny.tokens(5, seed=start))
            result = stream.feed(ids[:, start : start + 8])
            assert torch.allclose(probed, result.hidden, atol=1e-4)
            parts.append(result.losses)
    assert torch.equal(torch.cat(parts, 1), plain)


@pytest.mark.parametrize("policy", ["streamh2o", "recompute"])
def test_a_stream_goes_on_from_its_state_with_the_same_digits(policy):
    model, ids, made = tiny.llama(), tiny.tokens(96), make_policy(policy, 20)
    whole = tiny.stream_losses(model, made, ids, 8)
    with ChunkStream(model, made, chunk=8) as first:
        head = [first.feed(ids[:, s : s + 8]).losses for s in range(0, 40, 8)]
        tensors, counts = first.state()
    with ChunkStream(model, made, chunk=8) as second:
        second.load_state({k: v.clone() for k, v in tensors.items()}, counts)
        tail = [second.feed(ids[:, s : s + 8]).losses for s in range(40, 96, 8)]
        assert second.scored == 95
    assert torch.equal(torch.cat(head + tail, 1), whole)


def test_a_text_longer_than_the_model_is_refused_without_eviction():
    with (
        ChunkStream(tiny.llama(positions=32), make_policy("full", 16), chunk=8) as stream,
        pytest.raises(UserError, match="longer than the 32 tokens"),
    ):
        for start in range(0, 64, 8):
            stream.feed(tiny.tokens(64)[:, start : start + 8])


@pytest.mark.parametrize(("cache", "chunk"), [(600, 8), (500, 64), (16, 0)])
def test_settings_the_model_cannot_hold_are_refused(cache, chunk):
    with pytest.raises(UsageError):
        ChunkStream(tiny.llama(), make_policy("h2o", cache), chunk=chunk)


def test_a_loss_that_is_not_a_number_names_its_token():
    model, ids = tiny.llama(), tiny.tokens(20)
    ids[ids == 5] = 6
    ids[0, 13] = 5
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = float("nan")
    with ChunkStream(model, make_policy("h2o", 64), chunk=1) as stream, pytest.raises(UserError, match="token 14 "):
        for start in range(20):
            stream.feed(ids[:, start : start + 1])


def test_the_model_gets_its_own_attention_back():
    model, ids = tiny.llama(), tiny.tokens(20)
    before = model.config._attn_implementation
    expected = tiny.dense_losses(model, ids)
    with ChunkStream(model, make_policy("h2o", 8), chunk=4) as outer:
        with ChunkStream(model, make_policy("h2o", 8), chunk=4) as inner:
            inner.feed(ids[:, :4])
        outer.feed(ids[:, :4])
    assert model.config._attn_implementation == before
    assert torch.equal(tiny.dense_losses(model, ids), expected)


def test_every_query_head_can_have_slots_of_its_own():
    """Equal to a model whose KV heads were repeated, which is how the H2O authors' code runs grouped models."""
    grouped, full = tiny.llama(8, 2), tiny.llama(8, 8)
    state = grouped.state_dict()
    for name in list(state):
        if "k_proj" in name or "v_proj" in name:
            state[name] = state[name].view(2, 8, -1).repeat_interleave(4, 0).flatten(0, 1)
    full.load_state_dict(state)
    policy, ids = make_policy("h2o", 12), tiny.tokens(60)
    got = tiny.stream_losses(grouped, policy, ids, 4, per_query_head=True)
    assert torch.allclose(got, tiny.stream_losses(full, policy, ids, 4), atol=1e-4)


@pytest.mark.usefixtures("built")
def test_a_probe_that_is_cut_off_leaves_no_trace_or_ends_the_stream(monkeypatch):
    model, ids = tiny.llama(), tiny.tokens(40)
    expected = tiny.stream_losses(model, make_policy("h2o", 16), ids, 8)

    def interrupt(*args):
        raise KeyboardInterrupt

    with ChunkStream(model, make_policy("h2o", 16), chunk=8) as stream:
        losses = []
        for part in ids.split(8, dim=1):
            losses.append(stream.feed(part).losses)
            with monkeypatch.context() as cut, pytest.raises(KeyboardInterrupt):
                cut.setattr(Fused, "on", interrupt)
                stream.probe(ids[:, :5])
        assert torch.equal(torch.cat(losses, dim=1), expected)
        with monkeypatch.context() as cut, pytest.raises(KeyboardInterrupt):
            cut.setattr(LayerSlots, "set_back", interrupt)
            stream.probe(ids[:, :5])
        for then in (lambda: stream.feed(ids[:, :8]), stream.state):
            with pytest.raises(UserError, match="cut off"):
                then()


def test_after_a_state_that_does_not_fit_a_stream_reads_no_more():
    model, ids = tiny.llama(), tiny.tokens(40)
    with ChunkStream(model, make_policy("h2o", 16), chunk=8) as stream:
        for part in ids[:, :24].split(8, dim=1):
            stream.feed(part)
        tensors, counts = stream.state()
        damaged = {name: tensor for name, tensor in tensors.items() if name != "layer1.scores"}
        with pytest.raises(UserError, match="damaged"):
            stream.load_state(damaged, counts)
        with pytest.raises(UserError, match="cut off"):
            stream.feed(ids[:, 24:32])
        stream.load_state(tensors, counts)
        stream.feed(ids[:, 24:32])


def test_a_chunk_beyond_the_learned_positions_is_refused_and_a_shorter_one_is_read():
    model, ids = CASES["gpt2"].model(), tiny.tokens(520)
    with ChunkStream(model, make_policy("h2o", 16), chunk=16) as stream:
        for part in ids[:, :496].split(16, dim=1):
            stream.feed(part)
        stream.feed(ids[:, 496:506])
        for _ in range(2):
            with pytest.raises(UserError, match="has learned 512 positions"):
                stream.feed(ids[:, 506:516])
            with pytest.raises(UserError, match="has learned 512 positions"):
                stream.probe(ids[:, 506:516])
        assert stream.feed(ids[:, 506:512]).losses.shape == (1, 6)
