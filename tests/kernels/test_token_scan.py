"""The compiled scan of `--evict token` against the one in plain torch."""

import copy
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamh2o.cache.rotary import Rotary, RotaryTable
from streamh2o.cache.slot_cache import SlotCache
from streamh2o.kernels.select import select
from streamh2o.policies import POLICIES, Policy, make_policy
from streamh2o.stream import token_scan
from streamh2o.stream.token_scan import attend_scan

pytestmark = pytest.mark.usefixtures("built")


@dataclass(frozen=True)
class Young(Policy):
    """States by what scores are divided, weights and fades in a way of its own."""

    name: ClassVar[str] = "young"

    def query_weights(self, chunk, device):
        return torch.full((chunk,), 0.5, device=device)

    def fade(self, chunk):
        return 0.9**chunk

    def divisor(self, age):
        return age.float().masked_fill(age > 90, torch.inf)


def full_cache(policy, chunk, batch=1, kv_heads=2, dim=8, rotary_dim=8, style="half", seed=0):
    """A cache of one layer, whose newest `chunk` slots are those of the queries to come, and random scores and gaps."""
    generator = torch.Generator().manual_seed(seed)
    n = policy.cache
    positions = n + 105  # the oldest slots get too old on the way
    angles = torch.arange(positions)[:, None] * 0.3 ** torch.arange(rotary_dim // 2)
    rotary = Rotary([RotaryTable(angles.cos(), angles.sin(), style)], positions)
    cache = SlotCache(policy, rotary, 1, chunk, kernel=select("compiled"))
    keys, values = torch.randn(2, batch, kv_heads, n + chunk, dim, generator=generator)
    cache.append(keys, values[..., : dim - 1], 0)  # values may be of another size
    layer = cache.slots[0]
    layer.scores[:, :, :n] = torch.rand(batch, kv_heads, n, generator=generator)
    cache.tokens = seen = n + 100
    for row in layer.source_index.flatten(0, 1):
        older = torch.randperm(100 + policy.hitters, generator=generator)[: policy.hitters].sort().values
        row[policy.sinks : policy.sinks + policy.hitters] = policy.sinks + older
        row[policy.sinks + policy.hitters : n + chunk] = torch.arange(seen - policy.recent, seen + chunk)
    return cache, layer, seen, generator


def both(cache, layer, query, seen):
    """Output, slots and scores of the scan in plain torch, and of the compiled one."""
    found = []
    for name in ("torch", "compiled"):
        cache.kernel = select(name)
        ours = copy.deepcopy(layer)
        output = attend_scan(cache, ours, query, 0.4, seen)
        assert token_scan._takes(cache, query) == (name == "compiled")
        found.append((output, ours.source_index[:, :, : ours.used], ours.scores[:, :, : ours.used]))
    return found


# The same examples each time: of two scores that differ by a rounding error, either may be the lower one.
@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(["h2o", "streamh2o", "h2-only", "young"]),
    positions=st.sampled_from(["rolled", "distance"]),
    counts=st.tuples(st.integers(0, 4), st.integers(1, 40), st.integers(0, 40)),
    far=st.integers(0, 40),
    decay=st.sampled_from([0.5, 1.0]),
    reach=st.sampled_from([0, 100]),
    chunk=st.integers(1, 40),
    batch=st.integers(1, 2),
    group=st.integers(1, 5),
    half_dim=st.integers(1, 20),
    rotary_share=st.floats(0.1, 1),
    style=st.sampled_from(["half", "interleaved"]),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 99),
)
def test_output_slots_and_scores_are_those_of_plain_torch(
    name, positions, counts, far, decay, reach, chunk, batch, group, half_dim, rotary_share, style, threads, seed
):
    sinks, hitters, recent = counts
    recent = 0 if name == "h2-only" else recent
    knobs = {"positions": positions, "far": min(far, recent), "decay": decay}
    if name == "streamh2o":
        knobs["reach"] = max(reach, sinks + hitters + recent) if reach else 0
    kind = Young if name == "young" else POLICIES[name]
    policy = kind(cache=sinks + hitters + recent, sinks=sinks, recent=recent, hitters=hitters, **knobs)
    dim, rotary_dim = 2 * half_dim, 2 * max(1, int(rotary_share * half_dim))
    cache, layer, seen, generator = full_cache(policy, chunk, batch, 2, dim, rotary_dim, style, seed)
    query = torch.randn(batch, 2 * group, chunk, dim, generator=generator)
    torch.set_num_threads(threads)
    try:
        (expected, kept, scores), (output, kept_too, scores_too) = both(cache, layer, query, seen)
        assert torch.equal(kept_too, kept)
        assert torch.allclose(output, expected, atol=1e-5)
        assert torch.allclose(scores_too, scores, atol=1e-5)
        # From bfloat16 it computes in float32 too, so that only the output is rounded.
        layer.keys, layer.values, query = layer.keys.bfloat16(), layer.values.bfloat16(), query.bfloat16()
        cache.kernel = select("compiled")
        half = copy.deepcopy(layer)
        output = attend_scan(cache, half, query, 0.4, seen)
        layer.keys, layer.values = layer.keys.float(), layer.values.float()
        (expected, kept, scores), _ = both(cache, layer, query.float(), seen)
        assert torch.equal(half.source_index[:, :, : half.used], kept)
        assert torch.allclose(output.float(), expected, atol=1e-5, rtol=2**-7)
        assert torch.allclose(half.scores[:, :, : half.used], scores, atol=1e-5)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("positions", ["rolled", "distance"])
def test_of_equal_scores_the_oldest_goes(positions):
    """Queries of zeros look at all slots alike."""
    policy = make_policy("h2o", 40, sinks=3, recent=20, positions=positions)
    cache, layer, seen, _ = full_cache(policy, 12, seed=1)
    layer.scores.zero_()
    before = layer.source_index.clone()
    (_, kept, _), (_, kept_too, _) = both(cache, layer, torch.zeros(1, 6, 12, 8), seen)
    assert torch.equal(kept_too, kept)
    assert torch.equal(kept_too, torch.cat([before[:, :, :3], before[:, :, 3 + 12 : 52]], dim=2))


def test_a_policy_that_chooses_in_its_own_way_is_left_to_plain_torch():
    query = torch.zeros(1, 4, 3, 8)

    def takes(policy, tokens=0):
        cache = full_cache(policy, 3)[0]
        cache.tokens = tokens
        return token_scan._takes(cache, query)

    for name in ("topk", "topk+h2", "sparse-fixed", "sparse-strided+h2"):
        assert not takes(make_policy(name, 20))
    assert takes(make_policy("h2o", 20), tokens=10**9)
    assert takes(make_policy("streamh2o", 20), tokens=10**9)
    rolled = make_policy("streamh2o", 20, positions="rolled")
    assert (takes(rolled), takes(rolled, tokens=10**9)) == (True, False), "divisors are a table of a million ages"


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_not_a_number_is_not_hidden_and_stays_with_its_query(odd):
    policy = make_policy("h2o", 20)
    cache, layer, seen, generator = full_cache(policy, 5)
    query = torch.rand(1, 4, 5, 8, generator=generator)
    layer.keys[:, :, layer.used - 1, 3] = odd
    output = attend_scan(cache, layer, query, 0.4, seen)
    assert output[:, :, 4].isnan().all()
    assert not output[:, :, :4].isnan().any()
