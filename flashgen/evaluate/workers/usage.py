"""What child processes use: their memory and CPU time, and how much memory each may hold.

The parent reads /proc while it waits. The system's own limits do not work here. RLIMIT_AS counts
addresses, and a CUDA context reserves more of those than the machine has memory. RLIMIT_RSS has no
effect since Linux 2.4. A cgroup needs rights that a user may lack. Without /proc, memory is not
limited, and CPU time is unknown.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

TICK_S = 0.25
"""Between two looks at a child at work. They read some files of /proc, which take no lock of it."""

LEAST_BYTES = 4 << 30
"""A share is no smaller. A child that compiled or interpreted a kernel held up to 0.45 GiB, half of
them files that all children share; a device's libraries and pinned buffers come on top."""

_CGROUPS = Path("/sys/fs/cgroup")


def share(children: int) -> int:
    """Bytes that each of this number of children may hold: together half of the machine's
    memory.
    """
    return max(LEAST_BYTES, machine() // 2 // children)


def machine() -> int:
    """Bytes of memory available to all processes: the machine's, or its cgroup's limit; more than
    any machine has where that is unknown.
    """
    if not hasattr(os, "sysconf"):  # Windows
        return 1 << 60
    pages = os.sysconf("SC_PHYS_PAGES")
    return min([pages * os.sysconf("SC_PAGE_SIZE"), *_cgroup_limits()])


def resident(pid: int) -> int:
    """Bytes in memory of a process and its descendants, such as a compiler that it started.

    Shared memory counts for each. Processes that ended or cannot be read count nothing.
    """
    held = sum(int(fields[_RSS]) for fields in _tree(pid))
    return held * os.sysconf("SC_PAGE_SIZE") if held else 0


def cpu_seconds(pid: int) -> float | None:
    """CPU seconds of a process, of its descendants and of those that they waited for. None if it
    cannot be read.
    """
    ticks = [sum(map(int, fields[_TIMES])) for fields in _tree(pid)]
    return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None


_TIMES, _RSS = slice(11, 15), 21
"""In /proc/PID/stat after the name, proc(5): utime, stime, cutime, cstime; and rss, in pages."""


def _tree(pid: int) -> Iterator[list[str]]:
    """The fields of stat of a process and its descendants; nothing where there is no /proc."""
    left = [pid] if hasattr(os, "sysconf") else []  # Windows has neither
    while left:
        process = Path("/proc") / str(left.pop())
        with contextlib.suppress(OSError):  # it has ended
            yield (process / "stat").read_text().rpartition(")")[2].split()
            for thread in (process / "task").iterdir():
                left += map(int, (thread / "children").read_text().split())


def _cgroup_limits(groups: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """The memory limits of this process's cgroup and its parents, of either version."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounted, file = _CGROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            mounted, file = _CGROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be the host's, and what is mounted the group itself.
        inside = PurePosixPath(path).relative_to("/")
        for folder in (mounted / inside, *(mounted / above for above in inside.parents)):
            with contextlib.suppress(OSError, ValueError):  # "max" is no number
                yield int((folder / file).read_text())
