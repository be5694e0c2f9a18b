"""The benchmark beside other programs: its ratios, its processes, and what is said where one fails."""

import json

import pytest

from streamh2o.errors import UserError
from streamh2o.runs.bench import shared
from tests.call import one_sentence
from tests.tiny_folder import make_folder


def work(model: str, **extra) -> shared.Work:
    how = {"dtype": "float32", "weights": "plain", "device": "cpu", "threads": 1, "kernel": "torch"}
    slots = {"policy": "h2o", "cache": 32, "chunk": 8}
    return shared.Work(model, trust_remote_code=False, **{**how, **slots, **extra})


def test_ratios_are_medians_of_what_was_measured_in_the_same_round():
    rounds = [
        {"alone": 100, "busy": 50, "pair": 90, "unwatched": 100},
        {"alone": 200, "busy": 120, "pair": 200, "unwatched": 100},
        {"alone": 10, "busy": 7, "pair": 11, "unwatched": 5},
    ]
    assert [each["ratio"] for each in shared.ratios(rounds)] == [0.6, 1.0, 2.0]
    assert [each["wanted"] for each in shared.ratios(rounds)] == [0.47, 0.9, 0.98]


def test_a_call_that_ends_too_late_does_not_count(monkeypatch):
    now = iter([0.0, 1.0, 2.0, 4.0])
    monkeypatch.setattr(shared.time, "perf_counter", lambda: next(now))
    assert shared.speed_of(lambda: None, 10, 3.0) == 10  # two calls in two seconds


def test_one_call_counts_however_long_it_takes(monkeypatch):
    now = iter([0.0, 5.0])
    monkeypatch.setattr(shared.time, "perf_counter", lambda: next(now))
    assert shared.speed_of(lambda: None, 10, 3.0) == 2


def test_on_the_command_line(streamh2o, tmp_path, monkeypatch):
    monkeypatch.setattr(shared, "SECONDS", 0.05)
    model = ("--model", make_folder(tmp_path), "--dtype", "float32", "--device", "cpu", "--threads", 1)
    small = ("--cache", 32, "--chunk", 8, "--policy", "h2o", "--rounds", 1)
    code, out, _ = streamh2o("bench", "--shared", *model, *small, "--json", tmp_path / "figures.json")
    assert code == 0
    assert "two side by side, together / alone" in out
    result = json.loads((tmp_path / "figures.json").read_text())
    assert all(result["rounds"][0][name] > 0 for name in ("alone", "busy", "pair", "unwatched"))
    assert (result["cache"], result["threads"]) == (32, 1)


def test_a_process_that_fails_is_one_sentence_and_leaves_no_other(tmp_path, capfd):
    with pytest.raises(UserError, match="ended too early"):
        shared.bench_shared(work(str(tmp_path / "none")), rounds=1, seconds=0.1)
    assert "none" in capfd.readouterr().err


def test_two_benchmarks_at_once_are_bad_usage(streamh2o):
    code, _, err = streamh2o("bench", "--shared", "--generate")
    assert code == 2
    assert "run one after the other" in one_sentence(err)
