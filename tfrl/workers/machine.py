"""The machine, as far as this process may use it: memory, cores, and what they can do.

A container or SLURM may leave it less than there is, by control groups (man 7 cgroups).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


def memory(system: Path = Path("/")) -> int:
    """Bytes of memory. `system` is where /proc and /sys are."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group, version in _groups("memory", system):
        name = "memory.max" if version == 2 else "memory.limit_in_bytes"
        limits += _numbers(group / name)
    return min(limits)


def cores(system: Path = Path("/")) -> int:
    """Cores, rounded up. `system` is where /proc and /sys are."""
    limits = [
        float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    ]
    for group, version in _groups("cpu", system):
        names = ["cpu.max"] if version == 2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        numbers = [number for name in names for number in _numbers(group / name)]
        if len(numbers) == 2 and min(numbers) > 0:  # microseconds of computing in each period; -1 or max: any
            limits.append(numbers[0] / numbers[1])
    return math.ceil(min(limits))


def cpu_features(system: Path = Path("/")) -> frozenset[str]:
    """The features of the CPU by Linux's names, `avx2` say; none where it does not tell.

    `system` is where /proc is.
    """
    return frozenset(_cpuinfo("flags", system).split())


def cpu_maker(system: Path = Path("/")) -> str:
    """The CPU's maker, as it says itself: `GenuineIntel`, `AuthenticAMD`; "" where Linux does not tell."""
    return _cpuinfo("vendor_id", system)


def _cpuinfo(name: str, system: Path) -> str:
    """What /proc/cpuinfo says of the first core under that name, or nothing."""
    try:
        lines = (system / "proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return ""
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in fields if key.strip() == name), "")


def _groups(controller: str, system: Path) -> Iterator[tuple[Path, int]]:
    """The control groups that hold this process, each with those around it, and the version of their files.

    A line of /proc/self/cgroup is NUMBER:CONTROLLERS:PATH, without controllers in version 2. In a container
    the path may be one of the host's; what the container has is at the root then.
    """
    try:
        lines = (system / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        root, version = system / "sys/fs/cgroup", 2
        if controllers:
            if controller not in controllers.split(","):
                continue
            root, version = root / controller, 1
        group = root / path.lstrip("/")
        yield group, version
        yield from ((outer, version) for outer in group.parents if outer.is_relative_to(root))


def _numbers(file: Path) -> list[int]:
    """What a group's file says; nothing where there is none, or "max"."""
    try:
        return [int(word) for word in file.read_text().split()]
    except (OSError, ValueError):
        return []
