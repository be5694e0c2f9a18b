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
