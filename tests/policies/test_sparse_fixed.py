"""sparse-fixed: a recent window and the last tokens of every block, and the same with hitters."""

import pytest

from streamh2o.errors import UsageError
from streamh2o.policies import make_policy
from tests import tiny
from tests.watch import by, evicting, watch

KNOBS = {"sinks": 2, "recent": 6, "block": 8, "summary_tokens": 2}


def summaries_then_newest(token):
    return (token % 8 in (6, 7), token)


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_the_last_two_of_every_eight_tokens_are_kept_the_newest_first(chunk):
    policy = make_policy("sparse-fixed", 14, **KNOBS)
    for step in evicting(watch(tiny.llama(), policy, tiny.tokens(60), chunk)):
        middle, recent = step.before[2:-6], step.before[-6:]
        chosen = by(middle, most_of=summaries_then_newest, count=6)
        assert step.kept == sorted({0, 1} | chosen | set(recent))


def test_a_long_stream_ends_with_nothing_but_block_ends_in_the_middle():
    last = watch(tiny.llama(), make_policy("sparse-fixed", 14, **KNOBS), tiny.tokens(60), 5)[-1]
    assert {tuple(step.kept) for step in last.values()} == {(0, 1, 30, 31, 38, 39, 46, 47, 54, 55, 56, 57, 58, 59)}


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_with_hitters_half_of_the_middle_is_chosen_by_attention(chunk):
    policy = make_policy("sparse-fixed+h2", 14, **KNOBS)
    for step in evicting(watch(tiny.llama(), policy, tiny.tokens(60), chunk)):
        middle, recent = step.before[2:-6], step.before[-6:]
        hitters = by(middle, most_of=step.received.get, count=3)
        pattern = by(set(middle) - hitters, most_of=summaries_then_newest, count=3)
        assert step.kept == sorted({0, 1} | hitters | pattern | set(recent))


@pytest.mark.parametrize("tokens", [0, 129])
def test_a_summary_larger_than_its_block_is_refused(tokens):
    with pytest.raises(UsageError, match="between 1 and the block of 128"):
        make_policy("sparse-fixed", 100, summary_tokens=tokens)
