"""Machine: the memory and cores that this process may use, and what its CPU can do.

A container or SLURM may limit both by control groups (man 7 cgroups). In each function `system` is the parent
folder of /proc and /sys.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def memory(system: Path = _ROOT) -> int:
    """Bytes of memory."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group, version in _groups("memory", system):
        limits += _numbers(group / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
    return min(limits)


def cores(system: Path = _ROOT) -> int:
    """Cores, rounded up."""
    limits = [float(len(os.sched_getaffinity(0)))]
    for group, version in _groups("cpu", system):
        names = ["cpu.max"] if version == 2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        numbers = [number for name in names for number in _numbers(group / name)]
        if len(numbers) == 2 and min(numbers) > 0:  # microseconds of computing in each period; -1 or max: any
            limits.append(numbers[0] / numbers[1])
    return math.ceil(min(limits))


def cpuinfo(name: str, system: Path = _ROOT) -> str:
    """A field of the first core in /proc/cpuinfo, such as `flags` or `vendor_id`; or an empty text."""
    fields = (line.partition(":") for line in (system / "proc/cpuinfo").read_text().splitlines())
    return next((value.strip() for key, _, value in fields if key.strip() == name), "")


def _groups(controller: str, system: Path) -> Iterator[tuple[Path, int]]:
    """The control groups of this process and their parents, and the version of their files.

    A line of /proc/self/cgroup is NUMBER:CONTROLLERS:PATH, without controllers in version 2. In a container
    the path may be one of the host; then the container's limits are at the root.
    """
    try:
        lines = (system / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # a kernel without control groups
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = system / "sys/fs/cgroup" / (controller if controllers else "")
        group = root / path.lstrip("/")
        for place in (group, *group.parents):
            if place.is_relative_to(root):
                yield place, 1 if controllers else 2


def _numbers(file: Path) -> list[int]:
    """The numbers in a group's file; none where there is no file, or "max"."""
    try:
        return [int(word) for word in file.read_text().split()]
    except (OSError, ValueError):
        return []
