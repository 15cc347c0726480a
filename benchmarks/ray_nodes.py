"""Nodes of Ray on this machine, which stand for machines: `ray start` in processes of their own."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.process_tree import ACTOR, kill_family, named, wait_until_gone

ENVIRON = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
"""Variables of `ray start` that runs on a Ray of their own set, too."""
_HOST = "127.0.0.1"
_START = 180.0  # seconds


class Node:
    """A node of Ray, `ray start` in the foreground; `Nodes` makes it.

    Args:
      folder: where its output goes.
      address: of the Ray.
      flags: of `ray start`.
      environ: variables beside those of this process.
    """

    def __init__(self, folder: Path, address: str, flags: list[str], environ: Mapping[str, str]) -> None:
        self.address = address
        self._said = folder / "node.txt"
        command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"]
        command += ["--node-ip-address", _HOST, "--object-store-memory", str(200 * 2**20), *flags]
        with self._said.open("w") as output:
            self.process = subprocess.Popen(
                command, env={**os.environ, **environ}, stdout=output, stderr=subprocess.STDOUT
            )

    def wait(self) -> None:
        """Waits until it runs. RuntimeError: it does not."""
        end = time.monotonic() + _START
        while "runtime started" not in self._said.read_text():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"a node of Ray could not be started:\n{self._said.read_text()[-2000:]}")
            time.sleep(0.1)

    def actors(self) -> list[int]:
        """The process numbers of the envs' actors on it."""
        return self.processes(ACTOR)

    def processes(self, begins: bytes) -> list[int]:
        """Process numbers of its processes whose command begins with `begins`."""
        return named(self.process.pid, begins)

    def kill(self) -> None:
        """Kills all of its processes at once, as if a machine were lost, and waits for their end."""
        if self.process.poll() is not None:
            return
        pids = kill_family(self.process.pid)
        self.process.wait()
        wait_until_gone(pids)


class Nodes:
    """Nodes of one Ray, which wants a token; the first that is started is its head.

    Args:
      folder: where their output and the token go.
      environ: variables of `ray start`.

    Attributes:
      environ: variables of the processes that join it.
    """

    def __init__(self, folder: Path, environ: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._place = tempfile.mkdtemp(prefix="r")  # short: sockets have names of 107 characters at most
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        self.environ = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        self._environ = {**ENVIRON, **self.environ, **(environ or {})}
        self._port = free_port()
        self._nodes: list[Node] = []

    @property
    def address(self) -> str:
        """The address of the Ray."""
        return f"{_HOST}:{self._port}"

    def start(self, cpus: int = 1, gpus: int = 0) -> Node:
        """Starts a node of so many CPUs and GPUs (Ray does not look for them), and waits until it runs."""
        flags = ["--num-cpus", str(cpus), "--num-gpus", str(gpus)]
        if self._nodes:
            flags += ["--address", self.address]
        else:
            flags += ["--head", "--port", str(self._port), "--include-dashboard", "false"]
            flags += ["--temp-dir", self._place]
        folder = self._folder / f"n{len(self._nodes)}"
        folder.mkdir()
        seen = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus)))} if gpus else {}
        self._nodes.append(Node(folder, self.address, flags, {**self._environ, **seen}))
        self._nodes[-1].wait()
        return self._nodes[-1]

    def close(self) -> None:
        """Kills all of them."""
        for node in reversed(self._nodes):
            node.kill()
        shutil.rmtree(self._place, ignore_errors=True)


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as one:
        one.bind((_HOST, 0))
        return one.getsockname()[1]
