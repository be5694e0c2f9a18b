import os
from pathlib import Path

import numpy as np

from streamh2o.machine import cache_home, peak_rss_bytes, physical_cores, rss_bytes


def test_memory_in_use_grows_with_what_is_held_and_the_peak_stays():
    before = rss_bytes()
    held = np.ones(100_000_000, np.uint8)
    assert rss_bytes() - before > 90_000_000
    assert peak_rss_bytes() - before > 90_000_000
    size = held.nbytes
    del held
    assert peak_rss_bytes() - before > 0.9 * size


def test_only_the_cores_that_the_process_may_use_are_counted():
    allowed = os.sched_getaffinity(0)
    assert 1 <= physical_cores() <= len(allowed)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert physical_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_the_cache_lies_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.delenv("STREAMH2O_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_home() == tmp_path / "streamh2o"
    monkeypatch.setenv("STREAMH2O_CACHE", str(tmp_path / "own"))
    assert cache_home() == tmp_path / "own"
    monkeypatch.delenv("STREAMH2O_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the XDG specification
    assert cache_home() == Path.home() / ".cache" / "streamh2o"
