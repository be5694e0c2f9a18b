"""Threads spin while the machine is theirs and sleep while others want it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from streamh2o import spinning

linux_only = pytest.mark.skipif(spinning.seconds_waited() is None, reason="the system does not tell who waits")


class FakeTeam:
    open = 0

    def __init__(self):
        FakeTeam.open += 1

    def close(self):
        FakeTeam.open -= 1


@pytest.fixture
def watch(monkeypatch):
    FakeTeam.open = 0
    monkeypatch.setattr(spinning, "_Team", FakeTeam)
    monkeypatch.setattr(spinning, "teams_needed", lambda: 2)
    return spinning.Watch()


def test_threads_sleep_once_they_wait_for_a_core(watch):
    watch.look(spinning.BUSY - 0.01)
    assert not watch.sleeps
    watch.look(spinning.BUSY + 0.01)
    watch.look(1.0)
    assert watch.sleeps
    assert FakeTeam.open == 2


def test_threads_spin_again_only_after_idle_looks_in_a_row(watch):
    watch.look(1.0)
    for waited in [0.0] * (spinning.QUIET_LOOKS - 1) + [spinning.IDLE + 0.1] + [0.0] * (spinning.QUIET_LOOKS - 1):
        watch.look(waited)
        assert watch.sleeps
    watch.look(0.0)
    assert not watch.sleeps
    assert FakeTeam.open == 0


def test_a_closed_watch_leaves_no_team(watch):
    watch.start()
    watch.look(1.0)
    watch.close()
    assert FakeTeam.open == 0


@pytest.mark.parametrize(
    ("threads", "cores", "teams"), [(2, 2, 1), (8, 16, 2), (16, 16, 1), (1, 8, 0), (2, 16, 15), (2, 64, 0)]
)
def test_the_teams_make_more_threads_than_cores_or_there_are_none(monkeypatch, threads, cores, teams):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    assert spinning.teams_needed() == teams
    assert teams == 0 or threads + teams * (threads - 1) > cores


def test_the_time_waited_is_summed_over_threads(monkeypatch, tmp_path):
    for name, text in (("1", "5 1500000000 2"), ("2", "7 500000000 1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedstat").write_text(text)
    (tmp_path / "3").mkdir()  # a thread that has just ended
    monkeypatch.setattr(spinning, "_TASKS", tmp_path)
    assert spinning.seconds_waited() == 2.0
    monkeypatch.setattr(spinning, "_TASKS", tmp_path / "none")
    assert spinning.seconds_waited() is None


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_what_the_user_has_set_is_left_alone(monkeypatch, name):
    monkeypatch.setattr(spinning, "_watch", None)
    monkeypatch.setenv(name, "1")
    spinning.watch_for_neighbours()
    assert spinning._watch is None


@linux_only
def test_a_process_watches_once(monkeypatch, watch):
    monkeypatch.setattr(spinning, "_watch", None)
    monkeypatch.setattr(spinning, "_USERS_CHOICE", ())
    spinning.watch_for_neighbours()
    first = spinning._watch
    spinning.watch_for_neighbours()
    assert spinning._watch is first
    first.close()


SCRIPT = """
import pathlib, time, torch
from streamh2o.spinning import Watch

def slept():
    files = pathlib.Path("/proc/self/task").glob("*/status")
    found = {file.parent.name: file.read_text().split("voluntary_ctxt_switches:") for file in files}
    return {task: int(parts[1].split()[0]) for task, parts in found.items()}

def worker_sleeps():
    time.sleep(0.5)  # a thread that was joined ends a little later
    ones.add_(1)
    time.sleep(0.1)
    before = slept()
    for _ in range(20):
        ones.add_(1)
        time.sleep(0.01)
    after = slept()
    return after[worker] > before[worker]

torch.set_num_threads(2)
before = set(slept())
ones = torch.ones(1 << 20).add_(1)
(worker,) = set(slept()) - before
watch, answers = Watch(), [worker_sleeps()]
for waited in (1.0, *[0.0] * 10):
    watch.look(waited)
    answers += [worker_sleeps()] if watch.sleeps == (waited > 0) else []
print("libgomp" in pathlib.Path("/proc/self/maps").read_text(), *answers)
"""


@linux_only
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) != 2, reason="for two cores")
def test_libgomp_does_as_its_manual_says():
    """Its worker spins through pauses, sleeps in them while there is a team more, and spins again after that."""
    environment = {**os.environ, "GOMP_SPINCOUNT": "1000000000000"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )
    assert done.returncode == 0, done.stderr
    libgomp, *answers = done.stdout.split()
    if libgomp != "True":
        pytest.skip("PyTorch has another OpenMP here")
    assert answers == ["False", "True", "False"]
