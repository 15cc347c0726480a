"""Two machines in one: network namespaces with their own addresses, joined by a cable of a given rate.

Needs root, and Linux with `ip` and `tc`. Delays (netem) are a kernel module that many machines lack, so only
the rate is limited (a token bucket).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

ADDRESSES = ("10.77.13.1", "10.77.13.2")


def available() -> bool:
    """True if this machine lets us make network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"tfrl-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        _run("ip", "netns", "del", name)
    return made


@contextlib.contextmanager
def two_machines(gigabits: float | None = None) -> Iterator[list[list[str]]]:
    """Yields for each of the two the beginning of a command that runs there; addresses are `ADDRESSES`.

    Args:
      gigabits: what the cable carries a second in each direction; None: what the kernel manages.
    """
    names = [f"tfrl-{os.getpid()}-{side}" for side in "ab"]
    links = [f"tfrl{os.getpid() % 100000}{side}" for side in "ab"]  # 15 characters at most
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for name, link, address in zip(names, links, ADDRESSES, strict=True):
            _run("ip", "link", "set", link, "netns", name)
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", link)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", link, "up")
            if gigabits is not None:
                limit = ["rate", f"{gigabits}gbit", "burst", "1mb", "latency", "100ms"]
                _run("tc", "-n", name, "qdisc", "add", "dev", link, "root", "tbf", *limit)
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:  # the cable goes with them
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
