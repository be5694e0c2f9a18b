"""spatten: one ranking for the whole model."""

import pytest

from streamh2o.policies import make_policy
from tests import tiny
from tests.watch import by, watch


@pytest.mark.parametrize("recent", [0, 4])
@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_all_layers_and_heads_keep_what_the_whole_model_attended_to_most(chunk, recent):
    model, policy = tiny.llama(layers=3), make_policy("spatten", 12, sinks=2, recent=recent)
    evictions = 0
    for now in watch(model, policy, tiny.tokens(48), chunk):
        anyone = now[0, 0]
        if len(anyone.before) <= 12:
            continue
        evictions += 1
        middle, newest = anyone.before[2 : len(anyone.before) - recent], anyone.before[len(anyone.before) - recent :]
        total = {token: sum(step.received[token] for step in now.values()) for token in middle}
        expected = sorted({0, 1} | by(middle, most_of=total.get, count=10 - recent) | set(newest))
        assert all(step.kept == expected for step in now.values())
    assert evictions > 1


def test_h2o_lets_every_head_choose_for_itself():
    """What spatten gives up: with the same budget the heads of h2o differ."""
    last = watch(tiny.llama(layers=3), make_policy("h2o", 12, sinks=2), tiny.tokens(48), 5)[-1]
    assert len({tuple(step.kept) for step in last.values()}) > 1
