"""Figures are ratios of what ran side by side."""

from streamh2o.runs.bench.race import Timing, race, ratio, share


def test_a_ratio_is_the_median_over_rounds_of_speed_per_token():
    slow, fast = Timing("slow", 10, (1.0, 2.0, 4.0)), Timing("fast", 20, (1.0, 1.0, 1.0))
    assert slow.tokens_per_second == 5
    assert ratio(fast, slow) == 4  # of 2, 4 and 8
    assert ratio(slow, fast) == 0.25
    assert share(slow, fast) == 4  # what takes four times as long


def test_contestants_run_in_turn_and_the_first_round_does_not_count():
    ran = []
    now = iter(range(100))
    contestants = {name: (1, lambda name=name: ran.append(name)) for name in "ab"}
    timings = race(contestants, rounds=2, now=lambda: float(next(now)))
    assert ran == ["a", "b"] * 3
    assert [(timing.name, timing.seconds) for timing in timings] == [("a", (1.0, 1.0)), ("b", (1.0, 1.0))]
