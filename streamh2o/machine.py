"""What this process may use of the machine, and what it uses: memory, processor cores and a folder for its cache."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def rss_bytes() -> int:
    """Memory that the process holds now; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return peak_rss_bytes()


def peak_rss_bytes() -> int:
    """The most memory that the process has held; 0 where the system does not tell."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            # getrusage would count what a parent held before it became this program.
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_bytes() -> int | None:
    """Memory that this process may still take without swapping; None where the system does not tell.

    The least of what the machine has free, what the control group grants, and what `ulimit -v` allows.
    """
    found = [free for free in (_free_memory(), _group_memory(), _address_space()) if free is not None]
    return max(0, min(found)) if found else None


def whole_bytes() -> int | None:
    """The memory there would be if nothing ran, the same at every call; None where the system does not tell."""
    found = [size for size in (_meminfo("MemTotal"), _group_limit(), _address_limit()) if size is not None]
    return min(found) if found else None


def _free_memory() -> int | None:
    return _meminfo("MemAvailable")


def _meminfo(name: str) -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


_GROUP = Path("/sys/fs/cgroup")


def _group_limit() -> int | None:
    try:
        return int((_GROUP / "memory.max").read_text())
    except (OSError, ValueError):  # no limit reads "max"
        return None


def _group_memory() -> int | None:
    """What is left of the control group's limit; pages that only cache files count as free."""
    limit = _group_limit()
    if limit is None:
        return None
    try:
        used = int((_GROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
        return limit - used + int(stat.get("inactive_file", 0))
    except (OSError, ValueError):
        return None


def _address_limit() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _address_space() -> int | None:
    limit = _address_limit()
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        return None if limit is None else limit - used
    except (OSError, ValueError, IndexError):
        return None


def physical_cores() -> int:
    """Cores that this process may use: hyperthreads counted once, a container's quota respected; at least 1."""
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:
        return max(1, os.cpu_count() or 1)
    siblings = {_siblings(cpu) for cpu in allowed}
    return max(1, min(len(siblings), _quota()))


def _siblings(cpu: int) -> str:
    """A name that all hyperthreads of one core share."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota() -> int:
    """Whole cores that the control group grants; a large number without a limit."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, round(int(limit) / int(period)))
    except (OSError, ValueError):
        return sys.maxsize


def cache_home() -> Path:
    """`STREAMH2O_CACHE`, else `streamh2o` in the user's cache folder."""
    own = os.environ.get("STREAMH2O_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "streamh2o"
