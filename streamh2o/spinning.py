"""Threads that sleep instead of spinning while other programs want the processor.

A thread of libgomp, which PyTorch uses on Linux, spins for some milliseconds before it sleeps. On an idle machine this
saves time. Beside another program it holds a core that the thread it waits for could use. libgomp spins only for a
moment where it has more threads than the process has cores (GCC's manual, GOMP_SPINCOUNT). So while the system reports
that our threads wait for a core, `Watch` keeps a few more threads, all asleep. The threads that compute stay the same,
and so do the digits.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

PERIOD = 0.2  # seconds between two looks
BUSY, IDLE = 0.4, 0.25  # seconds per second that our threads together waited for a core; one busy core makes about 0.8
QUIET_LOOKS = 10  # so many idle looks in a row end it
_MOST = 16  # teams of sleeping threads; a machine that needs more has cores to spare
_PARALLEL = 32768  # numbers that PyTorch gives each thread at least
_TASKS = Path("/proc/self/task")
_USERS_CHOICE = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def watch_for_neighbours() -> None:
    """Watch from now on, once a process; not where the user has set how long threads spin, nor with one thread."""
    global _watch
    if _watch is None and not any(name in os.environ for name in _USERS_CHOICE) and seconds_waited() is not None:
        _watch = Watch()
        _watch.start()


def seconds_waited() -> float | None:
    """How long the threads of this process have waited for a core, summed up; None where the system does not tell."""
    waited = 0
    try:
        for task in _TASKS.iterdir():
            try:
                waited += int((task / "schedstat").read_text().split()[1])
            except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                continue
    except (OSError, ValueError, IndexError):
        return None
    return waited / 1e9


class Watch(threading.Thread):
    """Looks every `PERIOD` whether our threads wait for a core, and lets them spin or sleep accordingly."""

    def __init__(self) -> None:
        super().__init__(name="streamh2o-spinning", daemon=True)
        self._end = threading.Event()
        self._sleepers: list[_Team] = []
        self._idle_looks = 0

    @property
    def sleeps(self) -> bool:
        """Whether waiting threads sleep at once."""
        return bool(self._sleepers)

    def run(self) -> None:
        before, then = seconds_waited(), time.perf_counter()
        while not self._end.wait(PERIOD):
            waited, now = seconds_waited(), time.perf_counter()
            if before is not None and waited is not None:
                self.look((waited - before) / (now - then))
            before, then = waited, now
        self._spin()

    def close(self) -> None:
        self._end.set()
        self.join()

    def look(self, waited: float) -> None:
        """Decide by how many seconds our threads waited for each second that passed."""
        self._idle_looks = self._idle_looks + 1 if waited < IDLE else 0
        if waited > BUSY and not self._sleepers:
            self._sleepers = [_Team() for _ in range(teams_needed())]
        elif self._idle_looks >= QUIET_LOOKS:
            self._spin()

    def _spin(self) -> None:
        for team in self._sleepers:
            team.close()
        self._sleepers = []


_watch: Watch | None = None


def teams_needed() -> int:
    """How many teams of sleeping threads make more threads than cores; 0 with one thread, or if they are too many."""
    import torch

    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    if threads < 2:
        return 0
    needed = max(1, -(-(cores + 1 - threads) // (threads - 1)))
    return needed if needed <= _MOST else 0


class _Team(threading.Thread):
    """A thread with a team of its own in libgomp, all asleep until it is closed."""

    def __init__(self) -> None:
        super().__init__(name="streamh2o-asleep", daemon=True)
        self._made, self._end = threading.Event(), threading.Event()
        self.start()
        self._made.wait()

    def run(self) -> None:
        import torch

        torch.zeros(_PARALLEL * torch.get_num_threads()).add_(1)  # work that PyTorch splits makes the team
        self._made.set()
        self._end.wait()

    def close(self) -> None:
        self._end.set()
        self.join()
