"""Evicting after every token in chunks of any size gives what chunks of one token give."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamh2o.errors import UsageError
from streamh2o.policies import POLICIES, Policy, make_policy
from streamh2o.stream.chunk_stream import ChunkStream
from tests import tiny


@dataclass(frozen=True)
class Neighbours(Policy):
    """Depends on the order of the slots left, and weights and fades in a way of its own."""

    name: ClassVar[str] = "neighbours"

    def query_weights(self, chunk, device):
        return torch.full((chunk,), 0.5, device=device)

    def fade(self, chunk):
        return 0.9**chunk

    def priority(self, scores, source_index, seen):
        padded = torch.nn.functional.pad(scores, (1, 1))
        return padded[..., :-2] + 2 * scores + padded[..., 2:]


BY_LAYER = [name for name, policy in POLICIES.items() if not policy.across_layers and not policy.recomputes]
MODELS = {"grouped": tiny.llama(), "each its own": tiny.llama(4, 4), "partial rotary": tiny.gpt_neox()}


def fed(stream: ChunkStream, ids: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    parts = torch.tensor_split(ids, sorted({min(cut, ids.shape[1] - 1) for cut in cuts}), dim=1)
    return torch.cat([stream.feed(part).losses for part in parts if part.shape[1]], dim=1)


def check_like_chunks_of_one(model, policy, ids, cuts, **extra):
    """Losses, slots, scores and counts."""
    batch = ids.shape[0]
    with (
        ChunkStream(model, policy, chunk=1, batch=batch, **extra) as slow,
        ChunkStream(model, policy, chunk=ids.shape[1], batch=batch, evict="token", **extra) as fast,
    ):
        expected = torch.cat([slow.feed(ids[:, i : i + 1]).losses for i in range(ids.shape[1])], dim=1)
        got = fed(fast, ids, cuts)
        assert torch.allclose(got, expected, atol=1e-4)
        assert (fast.slots, fast.max_slots, fast.evictions) == (slow.slots, slow.max_slots, slow.evictions)
        assert fast.composition() == slow.composition()
        for ours, theirs in zip(fast.cache.slots, slow.cache.slots, strict=True):
            assert torch.equal(ours.source_index[..., : ours.used], theirs.source_index[..., : theirs.used])
            assert torch.allclose(ours.keys[:, :, : ours.used], theirs.keys[:, :, : theirs.used], atol=1e-4)
            if policy.scored:
                assert torch.allclose(ours.scores[..., : ours.used], theirs.scores[..., : theirs.used], atol=1e-3)


@pytest.mark.parametrize("name", BY_LAYER)
@settings(max_examples=6, deadline=None)
@given(
    model=st.sampled_from(list(MODELS)),
    cache=st.integers(6, 30),
    share=st.floats(0, 1),
    positions=st.sampled_from(["rolled", "distance"]),
    cuts=st.lists(st.integers(1, 79), max_size=4),
    batch=st.integers(1, 2),
    seed=st.integers(0, 99),
    way=st.sampled_from(["torch", "auto"]),
)
def test_losses_and_slots_are_those_of_chunks_of_one_token(
    name, model, cache, share, positions, cuts, batch, seed, way
):
    """Policies, models, splits of the budget and of the text, fewer recent tokens than a chunk has, a batch."""
    policy = make_policy(name, cache, positions=positions)
    if name in ("h2o", "streamh2o", "sparse-strided", "sparse-fixed+h2"):
        recent = int(share * (cache - policy.sinks))
        policy = make_policy(name, cache, recent=recent, positions=positions)
    check_like_chunks_of_one(MODELS[model], policy, tiny.tokens(80, batch, seed), cuts, kernel=way)


@pytest.mark.parametrize("positions", ["rolled", "distance"])
def test_a_policy_of_ones_own_is_asked_about_the_slots_that_are_left(positions):
    policy = Neighbours(cache=14, sinks=2, recent=5, hitters=7, positions=positions)
    check_like_chunks_of_one(tiny.llama(), policy, tiny.tokens(80), [30, 70])
    nothing_in_between = Neighbours(cache=14, sinks=2, recent=12, hitters=0, positions=positions, far=5)
    check_like_chunks_of_one(tiny.llama(), nothing_in_between, tiny.tokens(80), [30, 70])


@pytest.mark.parametrize("policy", ["h2o", "streamh2o"])
def test_every_query_head_can_have_slots_of_its_own(policy):
    check_like_chunks_of_one(tiny.llama(), make_policy(policy, 16), tiny.tokens(70), [25], per_query_head=True)


@pytest.mark.parametrize("way", ["torch", "auto"])
def test_more_queries_than_one_block_of_each_way(way):
    """Blocks are of 16 and 64 queries."""
    model = tiny.llama(layers=1)
    for policy in ("streamingllm", "h2o", "streamh2o"):
        check_like_chunks_of_one(model, make_policy(policy, 20), tiny.tokens(260), [7], kernel=way)


def test_what_is_farther_than_the_model_was_trained_to_look_goes_first():
    """A model of 48 positions and a stream of 130 tokens, with hitters that are nearly all kept."""
    model, policy = tiny.llama(positions=48), make_policy("streamh2o", 16, sinks=2, recent=3, reach=0, far=2)
    ids = tiny.tokens(130)
    with ChunkStream(model, policy, chunk=30, evict="token") as stream:
        got = fed(stream, ids, list(range(30, 130, 30)))
        assert int(stream.cache.slots[0].source_index[:, :, 2:16].min()) >= 130 + 1 - 48
    assert torch.allclose(got, tiny.stream_losses(model, policy, ids, 1), atol=1e-4)


def test_a_stream_goes_on_from_its_state_with_the_same_digits():
    model, ids, policy = tiny.llama(), tiny.tokens(96), make_policy("h2o", 20)
    whole = tiny.stream_losses(model, policy, ids, 32, evict="token")
    with ChunkStream(model, policy, chunk=32, evict="token") as first:
        head = first.feed(ids[:, :32]).losses
        tensors, counts = first.state()
    with ChunkStream(model, policy, chunk=32, evict="token") as second:
        second.load_state({k: v.clone() for k, v in tensors.items()}, counts)
        tail = [second.feed(ids[:, s : s + 32]).losses for s in (32, 64)]
    assert torch.equal(torch.cat([head, *tail], 1), whole)


def test_a_probe_leaves_no_trace():
    model, ids, policy = tiny.llama(), tiny.tokens(64), make_policy("h2o", 20)
    plain = tiny.stream_losses(model, policy, ids, 16, evict="token")
    parts = []
    with ChunkStream(model, policy, chunk=16, evict="token") as stream:
        for start in range(0, 64, 16):
            parts.append(stream.feed(ids[:, start : start + 16]).losses)
            stream.probe(tiny.tokens(5, seed=start))
    assert torch.equal(torch.cat(parts, 1), plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("policy", ["streamingllm", "h2o", "streamh2o"])
def test_half_precision_stays_near_float32(policy, dtype):
    model, ids, made = tiny.llama(layers=1), tiny.tokens(70), make_policy(policy, 20)
    exact = tiny.stream_losses(model, made, ids, 35, evict="token")
    half = tiny.stream_losses(model.to(dtype), made, ids, 35, evict="token")
    assert abs(float(half.mean() - exact.mean())) < 0.2


@pytest.mark.parametrize("name", ["spatten", "recompute"])
def test_policies_that_cannot_go_layer_by_layer_are_refused_by_name(name):
    with pytest.raises(UsageError, match=name):
        ChunkStream(tiny.llama(), make_policy(name, 20), evict="token")


def test_an_unknown_way_to_evict_is_refused():
    with pytest.raises(UsageError, match="chunk or token"):
        ChunkStream(tiny.llama(), make_policy("h2o", 20), evict="pass")


@dataclass(frozen=True)
class Divided(Policy):
    """Divides by what is given as another kind of tensor than the built-in policies give, and has a list for a knob."""

    name: ClassVar[str] = "divided"
    kind: tuple | list = ()

    def divisor(self, age):
        return torch.tensor(2.0).expand(age.shape) if self.kind[0] == "spread" else age


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("positions", ["rolled", "distance"])
@pytest.mark.parametrize("kind", ["spread", "whole numbers"])
def test_divisors_of_any_kind_are_read_right_by_the_kernel(positions, kind):
    policy = Divided(cache=14, sinks=2, recent=5, hitters=7, positions=positions, kind=(kind,))
    check_like_chunks_of_one(tiny.llama(), policy, tiny.tokens(80), [30, 70], kernel="compiled")


def test_a_policy_of_ones_own_is_given_one_layer_at_a_time_and_may_have_a_list():
    @dataclass(frozen=True)
    class First(Divided):
        def priority(self, scores, source_index, seen):
            assert scores.shape[:2] == (1, 2)
            return scores[0][None]

    policy = First(cache=14, sinks=2, recent=5, hitters=7, kind=["spread"])
    plain = make_policy("h2o", 14, sinks=2, recent=5)
    found, expected = (tiny.stream_losses(tiny.llama(), each, tiny.tokens(60), 8) for each in (policy, plain))
    assert torch.equal(found, expected)


@pytest.mark.usefixtures("built")
def test_a_policy_with_a_list_evicts_after_every_token_whatever_the_kernel():
    listed, hashed = (Divided(cache=14, sinks=2, recent=5, hitters=7, kind=kind) for kind in (["spread"], ("spread",)))
    losses = [
        tiny.stream_losses(tiny.llama(), policy, tiny.tokens(60), 20, evict="token", kernel="compiled")
        for policy in (listed, hashed)
    ]
    assert torch.allclose(*losses, atol=1e-4)
