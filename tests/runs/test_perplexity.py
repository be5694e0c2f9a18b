import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from streamh2o.errors import UserError
from streamh2o.runs.perplexity import RunningPerplexity, exp

LOSSES = hnp.arrays(np.float32, st.integers(0, 60), elements=st.floats(0, 30, width=32))


def added(losses: np.ndarray, cuts: list[int], window: int = 7) -> RunningPerplexity:
    running = RunningPerplexity(window)
    for part in np.split(losses, sorted(min(cut, len(losses)) for cut in cuts)):
        running.add(part)
    return running


@given(LOSSES, st.lists(st.integers(0, 60), max_size=6), st.integers(1, 70))
def test_however_the_losses_are_cut_the_perplexity_is_that_of_their_mean(losses, cuts, window):
    running = added(losses, cuts, window)
    assert running.scored == len(losses)
    if len(losses) == 0:
        assert running.ppl is None
        assert running.window_ppl is None
        return
    double = losses.astype(np.float64)
    assert running.nll_sum == pytest.approx(double.sum(), rel=1e-12)
    assert running.ppl == pytest.approx(math.exp(double.mean()), rel=1e-9)
    assert running.window_ppl == pytest.approx(math.exp(double[-window:].mean()), rel=1e-9)


@given(LOSSES, st.integers(0, 60), LOSSES)
def test_a_saved_state_goes_on_with_the_same_digits(before, window, after):
    running = RunningPerplexity(window + 1)
    running.add(before)
    resumed = RunningPerplexity(1)
    resumed.load_state(json.loads(json.dumps(running.state())))
    running.add(after)
    resumed.add(after)
    assert resumed.state() == running.state()
    assert resumed.window_ppl == running.window_ppl


def test_the_mean_is_not_a_mean_of_chunk_means():
    running = RunningPerplexity()
    running.add(np.array([1.0, 1.0, 1.0]))
    running.add(np.array([5.0]))
    assert running.nll_mean == 2.0


def test_sums_are_float64_where_float32_would_stop_growing():
    running = RunningPerplexity()
    running.add(np.array([2.0**24], np.float32))
    for _ in range(10):
        running.add(np.ones(1, np.float32))
    assert running.nll_sum == 2.0**24 + 10


def test_bits_per_byte_and_perplexity_per_word_divide_all_losses_by_bytes_and_words():
    running = RunningPerplexity()
    running.add(np.array([math.log(2)] * 12))
    assert running.bits_per_byte(6) == pytest.approx(2.0)
    assert running.ppl_word(4) == pytest.approx(8.0)


def test_what_would_divide_by_nothing_is_none():
    running = RunningPerplexity()
    assert (
        running.nll_mean is running.ppl is running.window_ppl is running.bits_per_byte(0) is running.ppl_word(0) is None
    )
    running.add(np.array([1.0]))
    assert running.bits_per_byte(0) is None
    assert running.ppl_word(0) is None


def test_a_text_of_one_endless_word_has_no_perplexity_per_word():
    running = RunningPerplexity()
    running.add(np.full(1000, 3.0))
    assert running.ppl_word(1) is None
    assert running.ppl == pytest.approx(math.exp(3))
    assert exp(1e6) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_named_and_never_averaged(bad):
    running = RunningPerplexity()
    running.add(np.array([1.0, 2.0]))
    with pytest.raises(UserError, match="number 4 "):
        running.add(np.array([1.0, 1.0, bad, 1.0]))
    assert running.scored == 2
    assert running.nll_sum == 3.0


@pytest.mark.parametrize(
    "damage", [{"scored": 9}, {"recent": None}, {"nll_sum": math.nan}, {"window": 0}, {"nll_sum": "many"}]
)
def test_a_damaged_state_is_refused(damage):
    running = RunningPerplexity(3)
    running.add(np.array([1.0, 2.0]))
    with pytest.raises(UserError, match="damaged"):
        RunningPerplexity().load_state(running.state() | damage)
