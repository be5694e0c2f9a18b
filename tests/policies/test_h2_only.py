"""h2-only: sinks and what received the most attention, and nothing because it is new."""

import pytest

from streamh2o.errors import UsageError
from streamh2o.policies import make_policy
from tests import tiny
from tests.watch import by, evicting, watch


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_sinks_and_the_most_attended_are_kept(chunk):
    for step in evicting(watch(tiny.llama(), make_policy("h2-only", 12, sinks=2), tiny.tokens(48), chunk)):
        rest = [token for token in step.before if token >= 2]
        assert step.kept == sorted({0, 1} | by(rest, most_of=step.received.get, count=10))


def test_a_new_token_can_lose_its_slot_at_once():
    passes = watch(tiny.llama(), make_policy("h2-only", 12, sinks=2), tiny.tokens(48), 5)
    assert any(max(step.before) not in step.kept for step in evicting(passes))


def test_a_recent_window_is_refused():
    with pytest.raises(UsageError, match="no recent window"):
        make_policy("h2-only", 100, recent=10)
