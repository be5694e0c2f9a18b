"""streamh2o, the default: hitters by the fading mean of far attention."""

from collections import defaultdict

import pytest
import torch

from streamh2o.errors import UsageError
from streamh2o.policies import make_policy
from streamh2o.policies.streamh2o import LEAST_QUERIES
from streamh2o.stream.chunk_stream import ChunkStream
from tests import tiny
from tests.watch import probed


@pytest.mark.parametrize(("cache", "far"), [(128, 31), (256, 63), (512, 127), (1024, 128), (2048, 128)])
def test_far_follows_the_window_up_to_128_tokens(cache, far):
    assert make_policy("streamh2o", cache).far == far
    assert make_policy("streamh2o", cache, far=7).far == 7


def test_the_smallest_budget_still_makes_a_policy():
    assert make_policy("streamh2o", 5).hitters == 0


def test_a_given_window_moves_far_along():
    assert make_policy("streamh2o", 512, recent=40).far == 20


def test_reach_is_four_times_the_cache_and_never_below_it():
    assert make_policy("streamh2o", 512).reach == 2048
    with pytest.raises(UsageError, match="at least the cache"):
        make_policy("streamh2o", 512, reach=511)


def test_a_hitter_out_of_reach_loses_to_any_other():
    policy = make_policy("streamh2o", 64, far=4, reach=500)
    source = torch.tensor([[[499, 500, 700]]])
    priority = policy.priority(torch.tensor([[[9.0, 0.5, 0.0]]]), source, 1000)[0, 0]
    assert priority[0] == -torch.inf
    assert priority[1] > priority[2] > -torch.inf


def test_half_of_the_budget_is_hitters():
    policy = make_policy("streamh2o", 512)
    assert (policy.sinks, policy.recent, policy.hitters) == (4, 254, 254)


def test_a_slot_that_gets_the_same_from_every_query_keeps_the_same_priority_however_long_it_stays():
    policy = make_policy("streamh2o", 64, far=4, decay=0.5, reach=0)
    per_query = 0.25
    source = torch.tensor([[[0, 300, 900]]])
    seen = 1000
    ages = (seen - source - policy.far).tolist()[0][0]
    sums = [sum(per_query * policy.decay ** (back / 256) for back in range(age)) for age in ages]
    priority = policy.priority(torch.tensor([[sums]]), source, seen)[0, 0]
    torch.testing.assert_close(priority, priority[:1].expand(3), rtol=1e-4, atol=0)


def test_without_fading_the_priority_is_the_plain_mean():
    policy = make_policy("streamh2o", 64, far=4, decay=1.0, reach=0)
    priority = policy.priority(torch.tensor([[[10.0, 10.0]]]), torch.tensor([[[0, 500]]]), 1000)
    torch.testing.assert_close(priority, torch.tensor([[[10 / 996, 10 / 496]]]))


def test_one_look_at_a_new_slot_does_not_beat_steady_attention():
    policy = make_policy("streamh2o", 64, far=4, decay=1.0, reach=0)
    steady, lucky = 0.02 * 1000, 0.1  # 0.02 from each of 1000 queries; 0.1 from the only one
    priority = policy.priority(torch.tensor([[[steady, lucky]]]), torch.tensor([[[0, 999]]]), 1004)[0, 0]
    assert priority[1] == pytest.approx(lucky / LEAST_QUERIES)
    assert priority[0] > priority[1]


@pytest.mark.parametrize("chunk", [3, 16])
def test_the_kept_are_those_with_the_highest_fading_mean_of_far_attention(chunk):
    policy = make_policy("streamh2o", 24, sinks=2, recent=10, far=5, decay=0.001, reach=0)
    ids = tiny.tokens(96)
    received: dict[tuple[int, int, int], list[tuple[int, float]]] = defaultdict(list)  # (query, attention)
    evicted = 0
    with ChunkStream(tiny.llama(), policy, chunk=chunk) as stream:
        for start in range(0, ids.shape[1], chunk):
            part = ids[:, start : start + chunk]
            passes = probed(stream, part)
            stream.feed(part)
            seen = start + part.shape[1]
            for number, (sources, attention) in enumerate(passes):
                layer = stream.cache.slots[number]
                for head, tokens in enumerate(sources):
                    for slot, token in enumerate(tokens):
                        for query in range(part.shape[1]):
                            if start + query - token >= policy.far:
                                got = float(attention[head, :, query, slot].sum())
                                received[number, head, token].append((start + query, got))
                    if len(tokens) <= policy.cache:
                        continue
                    evicted += 1

                    def mean(token, number=number, head=head, seen=seen):
                        weights = [
                            policy.decay ** ((seen - 1 - query) / 256) for query in range(token + policy.far, seen)
                        ]
                        counted = max(sum(weights), sum(policy.decay ** (i / 256) for i in range(LEAST_QUERIES)))
                        got = received[number, head, token]
                        return sum(policy.decay ** ((seen - 1 - query) / 256) * x for query, x in got) / counted

                    middle = tokens[policy.sinks : -policy.recent]
                    best = sorted(middle, key=mean, reverse=True)[: policy.hitters]
                    expected = tokens[: policy.sinks] + sorted(best) + tokens[-policy.recent :]
                    assert layer.source_index[0, head, : layer.used].tolist() == expected
    assert evicted > 4


def test_what_is_farther_than_the_trained_length_goes_first():
    policy = make_policy("streamh2o", 24, sinks=2, recent=10)
    ids = tiny.tokens(400)
    with ChunkStream(tiny.llama(positions=64), policy, chunk=8) as stream:
        for start in range(0, ids.shape[1], 8):
            before = [layer.source_index[0, :, : layer.used].tolist() for layer in stream.cache.slots]
            stream.feed(ids[:, start : start + 8])
            reach = start + 8 - (64 - 8)  # older tokens would be put too near in the next pass
            for layer, heads in zip(stream.cache.slots, before, strict=False):
                for tokens, kept in zip(heads, layer.source_index[0, :, : layer.used].tolist(), strict=True):
                    middle = (tokens + list(range(start, start + 8)))[2:-10]
                    near = [token for token in middle if token >= reach]
                    if any(token < reach for token in kept[2:-10]):
                        assert set(near) <= set(kept)
        assert start > 300
