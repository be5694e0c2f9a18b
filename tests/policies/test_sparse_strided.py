"""sparse-strided: a recent window and every l-th token, and the same with hitters."""

import pytest

from streamh2o.errors import UsageError
from streamh2o.policies import make_policy
from tests import tiny
from tests.watch import by, evicting, watch

STRIDE = 4


def strided_then_newest(token):
    return (token % STRIDE == 0, token)


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_every_fourth_token_is_kept_the_newest_first(chunk):
    policy = make_policy("sparse-strided", 14, sinks=2, recent=6, stride=STRIDE)
    for step in evicting(watch(tiny.llama(), policy, tiny.tokens(60), chunk)):
        middle, recent = step.before[2:-6], step.before[-6:]
        chosen = by(middle, most_of=strided_then_newest, count=6)
        assert step.kept == sorted({0, 1} | chosen | set(recent))


def test_a_long_stream_ends_with_nothing_but_the_pattern_in_the_middle():
    policy = make_policy("sparse-strided", 14, sinks=2, recent=6, stride=STRIDE)
    last = watch(tiny.llama(), policy, tiny.tokens(60), 5)[-1]
    assert {tuple(step.kept) for step in last.values()} == {(0, 1, 32, 36, 40, 44, 48, 52, 54, 55, 56, 57, 58, 59)}


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_with_hitters_half_of_the_middle_is_chosen_by_attention(chunk):
    policy = make_policy("sparse-strided+h2", 14, sinks=2, recent=6, stride=STRIDE)
    for step in evicting(watch(tiny.llama(), policy, tiny.tokens(60), chunk)):
        middle, recent = step.before[2:-6], step.before[-6:]
        hitters = by(middle, most_of=step.received.get, count=3)
        pattern = by(set(middle) - hitters, most_of=strided_then_newest, count=3)
        assert step.kept == sorted({0, 1} | hitters | pattern | set(recent))


@pytest.mark.parametrize(("knob", "value"), [("stride", 0), ("share", 1.5)])
def test_an_impossible_knob_is_refused(knob, value):
    with pytest.raises(UsageError, match=f"{knob} of sparse-strided is {value}"):
        make_policy("sparse-strided", 100, **{knob: value})
