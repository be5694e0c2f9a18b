"""topk: what the newest queries look at, and the same with hitters."""

import pytest

from streamh2o.errors import UsageError
from streamh2o.policies import make_policy
from tests import tiny
from tests.watch import by, evicting, watch


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_only_the_attention_of_the_last_three_queries_decides(chunk):
    policy = make_policy("topk", 12, sinks=2, newest=3)
    for step in evicting(watch(tiny.llama(), policy, tiny.tokens(48), chunk, newest=3)):
        assert step.kept == sorted({0, 1} | by(step.before[2:], most_of=step.newest.get, count=10))


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_with_hitters_half_of_the_slots_go_by_all_attention_ever_received(chunk):
    policy = make_policy("topk+h2", 12, sinks=2, newest=3)
    for step in evicting(watch(tiny.llama(), policy, tiny.tokens(48), chunk, newest=3)):
        hitters = by(step.before[2:], most_of=step.received.get, count=5)
        top = by(set(step.before[2:]) - hitters, most_of=step.newest.get, count=5)
        assert step.kept == sorted({0, 1} | hitters | top)


def test_a_recent_window_can_be_put_back():
    policy = make_policy("topk", 12, sinks=2, recent=4, newest=3)
    for step in evicting(watch(tiny.llama(), policy, tiny.tokens(48), 5, newest=3)):
        chosen = by(step.before[2:-4], most_of=step.newest.get, count=6)
        assert step.kept == sorted({0, 1} | chosen | set(step.before[-4:]))


def test_no_query_at_all_is_refused():
    with pytest.raises(UsageError, match="at least 1"):
        make_policy("topk", 100, newest=0)
