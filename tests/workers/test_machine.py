"""The memory and the cores that a process may have."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfrl.workers import machine

PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
GROUPS = Path("/sys/fs/cgroup")
QUOTA, NONE = {"quota": "300000\n", "period": "100000\n"}, {"quota": "-1\n"}


def system(folder, membership, limits):
    """A tree like the system's: the text of /proc/self/cgroup, and files under /sys/fs/cgroup."""
    for name, text in {"proc/self/cgroup": membership, **limits}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("membership", "limits", "expected"),
    [
        ("0::/\n", {"sys/fs/cgroup/memory.max": "300000\n"}, 300_000),
        ("0::/\n", {"sys/fs/cgroup/memory.max": "max\n"}, PHYSICAL),
        ("0::/job/step\n", {"sys/fs/cgroup/job/memory.max": "200000\n"}, 200_000),
        ("0::/of/the/host\n", {"sys/fs/cgroup/memory.max": "100000\n"}, 100_000),
        ("3:cpu:/a\n4:memory:/a\n", {"sys/fs/cgroup/memory/a/memory.limit_in_bytes": "4096\n"}, 4096),
        ("3:cpu:/a\n4:memory:/b\n", {"sys/fs/cgroup/memory/a/memory.limit_in_bytes": "4096\n"}, PHYSICAL),
        ("4:memory:/\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63}\n"}, PHYSICAL),
    ],
)
def test_the_smallest_limit_counts(tmp_path, membership, limits, expected):
    assert machine.memory(system(tmp_path, membership, limits)) == expected


def test_without_control_groups_it_is_the_machines_memory(tmp_path):
    assert machine.memory(tmp_path) == PHYSICAL


@pytest.mark.parametrize(
    ("membership", "limits", "expected"),
    [
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ("0::/a/b\n", {"sys/fs/cgroup/a/cpu.max": "50000 100000\n"}, 1),
        ("2:cpu,cpuacct:/a\n", {f"sys/fs/cgroup/cpu/a/cpu.cfs_{k}_us": v for k, v in QUOTA.items()}, 3),
        ("2:cpu:/\n", {f"sys/fs/cgroup/cpu/cpu.cfs_{k}_us": v for k, v in (QUOTA | NONE).items()}, 8),
    ],
)
def test_a_quota_of_computing_counts_in_cores(monkeypatch, tmp_path, membership, limits, expected):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert machine.cores(system(tmp_path, membership, limits)) == expected


def test_a_limit_that_the_kernel_holds_this_process_to_is_found():
    """Uses a real control group, as a container has, if this user may make one."""
    old = GROUPS / "memory"
    group, name = (old, "memory.limit_in_bytes") if old.is_dir() else (GROUPS, "memory.max")
    group /= f"tfrl-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no right to make a control group")
    try:
        if not (group / name).exists():
            pytest.skip("this control group has no memory controller")
        (group / name).write_text(str(2**30))
        code = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        code += "from tfrl.workers import machine; print(machine.memory())"
        command = [sys.executable, "-c", code, str(group / "cgroup.procs")]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
        assert done.stdout.split() == [str(2**30)], done.stderr
    finally:
        group.rmdir()
