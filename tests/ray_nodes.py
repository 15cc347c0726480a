"""Machines of Ray for the tests: `ray start` in processes of their own, on the loopback address."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from launching import alive, family, until

# On the loopback address alone, as the runs' own; a lost node is found in seconds.
ENVIRON = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Node:
    """`ray start` in the foreground, with its processes."""

    def __init__(self, folder, *flags, cpus, **environ):
        command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"]
        command += ["--num-cpus", str(cpus), "--object-store-memory", str(200 * 2**20), *flags]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **environ},
            stdout=(folder / "node.txt").open("w"),
            stderr=subprocess.STDOUT,
        )
        self._said = folder / "node.txt"

    def wait(self):
        """Waits until it runs."""
        end = time.monotonic() + 180
        while "runtime started" not in self._said.read_text():
            assert self.process.poll() is None and time.monotonic() < end, self._said.read_text()
            time.sleep(0.1)

    def actors(self):
        """The process numbers of the envs' actors on it."""
        return self.processes(b"ray::RemoteActor")

    def processes(self, begins):
        """Those of its processes whose command begins so."""
        found = []
        for pid in family(self.process.pid)[1:]:
            with contextlib.suppress(OSError):
                name = Path(f"/proc/{pid}/cmdline").read_bytes()
                found += [pid] if name.startswith(begins) else []
        return found

    def end(self):
        """Kills it and all of its processes."""
        pids = family(self.process.pid)
        for pid in reversed(pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        until(lambda: not any(map(alive, pids)), 60)
