"""How much memory there is: what plainly cannot fit is refused before it is tried."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def limit(system: Path = Path("/")) -> int:
    """Bytes that this process may have: the machine's memory, or what a container or SLURM leaves it.

    `system` is where /proc and /sys are.
    """
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_cgroup_limits(system)])


def _cgroup_limits(system: Path) -> Iterator[int]:
    """What the control groups of this process, and the ones around them, allow (man 7 cgroups).

    A line of /proc/self/cgroup is NUMBER:CONTROLLERS:PATH, without controllers in version 2. In a container
    the path may be one of the host's; what the container has is at the root then.
    """
    try:
        lines = (system / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    mount = system / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = mount, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = mount / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents[: len(group.parts) - len(root.parts)]):
            try:
                yield int((folder / name).read_text())
            except (OSError, ValueError):  # no such group here, or "max"
                continue


def in_words(size: float) -> str:
    """A number of bytes for people: 2.8 GB."""
    units = ["bytes", "kB", "MB", "GB", "TB", "PB"]
    while size >= 1000 and len(units) > 1:
        size, _ = size / 1000, units.pop(0)
    return f"{size:.3g} {units[0]}"
