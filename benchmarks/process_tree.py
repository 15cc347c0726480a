"""Processes of this machine and their descendants, as /proc has them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

ACTOR = b"ray::RemoteActor"
"""The beginning of the command of a process that steps envs on Ray."""


def family(pid: int) -> list[int]:
    """Process numbers of a process, its children, theirs, and so on."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):  # it has ended
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
            found += [int(child) for child in children.split()]
    return found


def named(parent: int, begins: bytes) -> list[int]:
    """Process numbers of the descendants whose command begins with `begins`."""
    found = []
    for pid in family(parent)[1:]:
        with contextlib.suppress(OSError):
            found += [pid] if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(begins) else []
    return found


def alive(pid: int) -> bool:
    """True while the process runs or is stopped; False once it has ended, waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill_family(pid: int) -> list[int]:
    """Kills a process and its descendants at once, as if their machine were lost; their process numbers."""
    pids = family(pid)
    for each in reversed(pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    return pids


def wait_until_gone(pids: Iterable[int], seconds: float = 60.0) -> None:
    """Waits until all of these processes have ended. RuntimeError: some have not in so many seconds."""
    end = time.monotonic() + seconds
    while left := [pid for pid in pids if alive(pid)]:
        if time.monotonic() > end:
            raise RuntimeError(f"processes {left} have not ended in {seconds:.0f} s")
        time.sleep(0.02)
