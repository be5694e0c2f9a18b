"""What this process may use of the machine, and what it uses: memory and processor cores."""

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


def _free_memory() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _group_memory() -> int | None:
    """What is left of the control group's limit; pages that only cache files count as free."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return limit - used + int(stat.get("inactive_file", 0))
    except (OSError, ValueError):  # no limit reads "max"
        return None


def _address_space() -> int | None:
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY:
            return None
        return limit - int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (ImportError, OSError, ValueError, IndexError):
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
