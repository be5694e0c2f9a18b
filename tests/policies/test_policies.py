"""Making policies: defaults, and rules that name themselves when broken."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamh2o.errors import UsageError
from streamh2o.policies import POLICIES, make_policy


@given(st.sampled_from(list(POLICIES)), st.integers(5, 5000))
def test_the_default_split_fills_the_budget(name, cache):
    policy = make_policy(name, cache)
    assert policy.sinks + policy.recent + policy.hitters == cache
    assert min(policy.sinks, policy.recent, policy.hitters) >= 0


def test_one_of_recent_and_hitters_fixes_the_other():
    assert make_policy("h2o", 100, sinks=4, recent=60).hitters == 36
    assert make_policy("h2o", 100, sinks=4, hitters=60).recent == 36


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"name": "h3o"}, "choose from streamh2o, h2o"),
        ({"cache": 4, "sinks": 4}, "at least 5"),
        ({"cache": 100, "recent": 90, "hitters": 90}, "make 184, not --cache 100"),
        ({"cache": 100, "recent": 200}, "cannot hold"),
        ({"name": "streamingllm", "hitters": 5}, "keeps no hitters"),
        ({"decay": 0.0}, "--decay is 0.0"),
        ({"cache": 100, "recent": 50, "far": 60}, "--far is 60"),
        ({"nonsense": 3}, "no knob 'nonsense'"),
    ],
)
def test_a_broken_rule_is_named(arguments, rule):
    with pytest.raises(UsageError, match=rule):
        make_policy(**arguments)


@pytest.mark.parametrize("rule", ["sparse-strided", "sparse-fixed", "topk"])
def test_with_h2_at_the_end_a_name_stands_for_half_the_middle_by_attention(rule):
    alone, mixed = make_policy(rule, 100), make_policy(f"{rule}+h2", 100)
    assert (alone.name, alone.share) == (rule, 0)
    assert (mixed.name, mixed.share, mixed.scored) == (f"{rule}+h2", 0.5, True)
    assert mixed == make_policy(rule, 100, share=0.5)
    assert make_policy(f"{rule}+h2", 100, share=0.25).share == 0.25


def test_a_pattern_sums_attention_only_where_a_share_goes_by_it():
    assert not make_policy("sparse-fixed", 100).scored
    assert make_policy("sparse-fixed", 100, share=0.1).scored
