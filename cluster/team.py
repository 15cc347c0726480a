"""One attempt of the launcher: all workers, started together, each behind an agent."""

import contextlib
import json
import os
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.agent import SAVED, STARTED, STOPS, handed_down
from cluster.output import Output
from cluster.places import Place
from tfrl.cli.errors import UserError

AGENT = str(Path(__file__).with_name("agent.py"))
# What a remote worker gets of our environment: what decides how training runs and which programs it finds.
# The rest belongs to the machine.
PASSED = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "TERM")
PASSED_PREFIXES = ("CUDA_", "GRPC_", "KERAS_", "NCCL_", "OMP_", "PYTHON", "TF_", "TFDS_", "TFRL_", "XLA_")
# Batch mode, because a question cannot be answered here; the others notice a dead connection within a minute.
SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
# Seconds that a worker has to save when its launcher is gone, as many as with SLURM and Kubernetes: the
# update that it finishes first may take minutes on a CPU. One that hangs is ended by its own watchdog.
ORPHAN_GRACE = 300.0
NOTICE = 1.0  # seconds in which a worker that lost another may say so and end by itself, before it is told to
LOST = 255  # the exit code of an ssh that failed, and of whatever else led to a worker
_REST = 1.0  # seconds to read the rest of the output of an agent that has ended


class Team:
    """The running workers. Their output goes to `output`.

    Attributes:
        codes: their exit codes; None while they run.
        started: the workers whose agents have started them.
        saved: whether a worker has said that the run has made a checkpoint.
    """

    def __init__(
        self,
        places: Sequence[Place],
        command: Sequence[str],
        output: Output,
        terminal: tuple[int, int] | None,
    ) -> None:
        """Starts all workers; worker 0 gets a terminal of (rows, columns), if any. UserError: no ssh here."""
        self.codes: list[int | None] = [None] * len(places)
        self.saved = False
        self.started: set[int] = set()
        self._output = output
        self._selector = selectors.DefaultSelector()
        self._agents: list[Any] = []
        try:
            for index, place in enumerate(places):
                self._start(place, command, terminal if index == 0 else None)
        except BaseException:
            self.close()
            raise

    @property
    def running(self) -> bool:
        """True while any worker still runs."""
        return None in self.codes

    def pump(self, seconds: float) -> None:
        """Passes output on for at most `seconds`, less if something happens, and notes who has ended."""
        self._copy(seconds)
        for index, agent in enumerate(self._agents):
            if self.codes[index] is None and agent.poll() is not None:
                end = time.monotonic() + _REST
                while self._listening(index) and time.monotonic() < end:
                    self._copy(0.1)
                self._output.end(index)
                self.codes[index] = self._code(index)

    def send(self, letter: bytes) -> None:
        """Sends a signal to all workers: b"T", b"I" or b"K", as SIGTERM, SIGINT and SIGKILL."""
        for agent in self._agents:
            _send(agent, letter)

    def settle(self, seconds: float = NOTICE) -> None:
        """Waits until all have ended by themselves, for that long at most."""
        end = time.monotonic() + seconds
        while self.running and time.monotonic() < end:
            self.pump(0.1)

    def stop(self, grace: float, *, told: bool) -> None:
        """Ends all workers: SIGTERM unless they were `told` before, and after `grace` seconds SIGKILL."""
        for letter, seconds in ((b"" if told else b"T", grace), (b"K", 5.0)):
            if not self.running:
                break
            self.send(letter)
            self.settle(seconds)
        for agent in self._agents:
            agent.kill()  # an ssh whose other end does not answer; those that have ended are not touched
        self.close()

    def close(self) -> None:
        """Hangs up on the agents: a worker that still runs is stopped by its own, with time to save."""
        for agent in self._agents:
            agent.stdin.close()
        self._selector.close()

    def _start(self, place: Place, command: Sequence[str], terminal: tuple[int, int] | None) -> None:
        environment = {"PYTHONUNBUFFERED": "1", **place.environment}
        if place.host is not None:
            environment = {**passed_on(os.environ), **environment}
        order = {
            "command": list(command),
            "environment": environment,
            "directory": str(Path.cwd()),
            "terminal": terminal,
            "grace": ORPHAN_GRACE,
        }
        agent = place.start() if place.start else _start_agent(place.host)
        index = len(self._agents)
        self._agents.append(agent)
        _send(agent, json.dumps(order).encode() + b"\n")
        self._selector.register(agent.stdout, selectors.EVENT_READ, (index, "stdout"))
        self._selector.register(agent.stderr, selectors.EVENT_READ, (index, "stderr"))

    def _copy(self, seconds: float) -> None:
        if not self._selector.get_map():
            time.sleep(min(seconds, 0.05))  # all have closed their output, and are about to end
        for key, _ in self._selector.select(seconds if self._selector.get_map() else 0):
            index, stream = key.data
            data = key.fileobj.read(1 << 16)
            if not data:
                self._selector.unregister(key.fileobj)
            elif data := self._heard(index, data) if stream == "stderr" else data:
                self._output.write(index, stream, data)

    def _heard(self, index: int, data: bytes) -> bytes:
        """What is left of a piece of stderr without the agent's own words."""
        if STARTED in data:
            self.started.add(index)
        self.saved = self.saved or SAVED in data
        return data.translate(None, STARTED + SAVED)

    def _code(self, index: int) -> int:
        """The exit code of a worker whose agent has ended."""
        code = self._agents[index].returncode
        if code == 0 and index not in self.started:  # of an ssh, or a shell there, that did nothing
            return LOST
        return code if code >= 0 else 128 - code

    def _listening(self, index: int) -> bool:
        return any(key.data[0] == index for key in self._selector.get_map().values())


def _start_agent(host: str | None) -> subprocess.Popen[bytes]:
    """Starts an agent here, or the ssh to it. UserError: the program is missing.

    It begins with signals blocked, because those that reach the whole job are for us to pass on: an agent
    lets them through once it has a worker to tell, ssh never does, and keeps the connection while that saves.
    """
    command = [sys.executable, "-IS", AGENT]
    if host is not None:
        command = [*SSH, "--", host, f"exec {shlex.join(command)}"]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pass_fds=handed_down() if host is None else (),
            start_new_session=True,  # the terminal's Ctrl-C comes to the launcher alone
        )
    except OSError as error:
        raise UserError(f"cannot start {command[0]!r} on this machine: {error.strerror}") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _send(agent: subprocess.Popen[bytes], data: bytes) -> None:
    with contextlib.suppress(OSError):  # it has ended, and `pump` finds out how
        agent.stdin.write(data)


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of the environment that remote workers get."""
    return {
        name: value for name, value in environ.items() if name in PASSED or name.startswith(PASSED_PREFIXES)
    }
