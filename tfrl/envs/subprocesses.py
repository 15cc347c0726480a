"""Envs in separate processes, which never load TensorFlow and end with the process that started them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from tfrl.cli.endings import STOP_CODES
from tfrl.cli.errors import EnvError, UserError
from tfrl.envs.spec import EnvSpec, Step, Sums, VecEnv, joined

MakeVecEnv = Callable[[EnvSpec, Sequence[int]], VecEnv]

ENV_PROCESS = "TFRL_ENV_PROCESS"
"""An environment variable of these processes. A user's program that they import must not train."""

STEP = "step"
"""The message that takes actions; its answer is the result of `observe`."""
_CLOSED_WITHIN = 10.0  # seconds

# These processes import a user's program as a module, never as `__main__`.
_PROGRAM = """
import sys
sys.path[:] = {path!r}
from multiprocessing.connection import Connection
from tfrl.envs import subprocesses
subprocesses.serve(Connection({descriptor}))
"""


class SubprocessVecEnv:
    """A vector of envs that several processes step at the same time; implements `tfrl.envs.spec.VecEnv`.

    It speeds up slow envs. Envs that draw with OpenGL need it: Mesa's OpenGL and TensorFlow each contain an
    LLVM, and two LLVMs crash a process.

    Args:
      make: a class or function of a module that makes the envs in a process.
      spec, indices: the arguments of `make`; each process gets some of the indices, in order.
      processes: the number of processes.

    Raises:
      ValueError, EnvError: `make` or an env raised it, or a process has ended.
      UserError: a process that only draws has ended.
    """

    def __init__(self, make: MakeVecEnv, spec: EnvSpec, indices: Sequence[int], processes: int = 1) -> None:
        shares = np.array_split(np.asarray(indices), processes)
        self._processes = [_Process(make, spec, share.tolist()) for share in shares]
        ends = np.cumsum([len(share) for share in shares]).tolist()
        self._slices = [slice(end - len(share), end) for share, end in zip(shares, ends, strict=True)]
        self._step: Step | None = None
        try:
            facts = [process.answer() for process in self._processes]
            self._step = _joined(self._ask("observe"))
        except (ValueError, EnvError):
            self.close()
            raise
        self.num_envs = len(indices)
        self.observation_spec, self.action_spec, _ = facts[0]
        self.exact_state = all(exact for *_, exact in facts)

    def observe(self) -> Step:
        """Waits for the processes. A second call without `act` returns the same."""
        if self._step is None:
            self._step = _joined([process.answer() for process in self._processes])
        return self._step

    @property
    def levels(self) -> np.ndarray:
        """Implements `VecEnv.levels`."""
        return np.concatenate(self._ask("levels"))

    def act(self, actions: np.ndarray, levels: np.ndarray | None = None) -> None:
        """Starts a step in all processes, and returns."""
        self.observe()  # drops the answers of the step before
        self._step = None
        for process, own in zip(self._processes, self._slices, strict=True):
            process.send(STEP, actions[own], *(() if levels is None else (levels[own],)))

    def solved(self) -> np.ndarray:
        """Implements `VecEnv.solved`."""
        return np.concatenate(self._ask("solved"))

    def take_info(self) -> Sums:
        """Implements `VecEnv.take_info`."""
        return joined(list(zip(self._ask("take_info"), self._slices, strict=True)), self.num_envs)

    def render(self) -> Sequence[np.ndarray]:
        """Implements `VecEnv.render`."""
        return sum(self._ask("render"), [])

    def get_state(self) -> list[bytes]:
        """Implements `VecEnv.get_state`."""
        return sum(self._ask("get_state"), [])

    def set_state(self, states: Sequence[bytes]) -> None:
        """Implements `VecEnv.set_state`."""
        self._ask("set_state", states)
        self._step = _joined(self._ask("observe"))
        self.exact_state = all(self._ask("exact_state"))

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.close()

    def _ask(self, name: str, *shared: Sequence[Any]) -> list[Any]:
        """The answers of all processes to `name`, with each one's parts of `shared`."""
        if name != "observe":
            self.observe()
        for process, own in zip(self._processes, self._slices, strict=True):
            process.send(name, *(each[own] for each in shared))
        return [process.answer() for process in self._processes]


def _joined(steps: Sequence[Step]) -> Step:
    """Joins the steps of the parts of a vector."""
    final = [step.final_observation for step in steps if step.final_observation is not None]
    reward, observation, first, truncated = (
        np.concatenate(parts) for parts in zip(*(step[:4] for step in steps), strict=True)
    )
    return Step(reward, observation, first, truncated, np.concatenate(final) if final else None)


class _Process:
    """A process with some envs. `answer` returns the answers in the order of `send`."""

    def __init__(self, make: MakeVecEnv, spec: EnvSpec, indices: Sequence[int]) -> None:
        self._name, self._draws = spec.env, spec.render
        ours, theirs = socket.socketpair()
        path = [place or str(Path.cwd()) for place in sys.path]
        # Signals to a whole process group wait until the new process ignores them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_CODES)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM.format(path=path, descriptor=theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, ENV_PROCESS: "1"},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
        self._pipe = Connection(ours.detach())
        self._pipe.send((make, spec, indices))

    def send(self, name: str, *arguments: Any) -> None:
        """Asks the process to call a method of its envs, or to read an attribute."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `answer` reports it
            self._pipe.send((name, arguments))

    def answer(self) -> Any:
        """The answer to the oldest open `send`. Raises the errors of the envs."""
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            code = self._process.wait()
            if self._draws:  # this process only draws, so training can continue
                raise UserError(
                    f"{self._name} cannot be rendered here: the process that draws it ended with {code}."
                ) from None
            raise EnvError(f"the process that steps {self._name} has ended with {code}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """Closes the envs and ends the process; kills it if it hangs."""
        self._pipe.close()
        try:
            self._process.wait(_CLOSED_WITHIN)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(pipe: Connection) -> None:
    """Runs in the process: makes envs, and answers until the other end is closed."""
    for number in STOP_CODES:  # the starting process handles signals and then closes this one
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_CODES)  # what an env starts would inherit the mask
    make, spec, indices = pipe.recv()
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            env = make(spec, indices)
        except (ValueError, EnvError) as error:
            pipe.send(_sent(error))
            return
        pipe.send((env.observation_spec, env.action_spec, env.exact_state))
        while True:
            name, arguments = pipe.recv()
            try:
                if name == STEP:
                    env.act(*arguments)
                    name, arguments = "observe", ()
                found = getattr(env, name)
                answer = found(*arguments) if callable(found) else found
            except (ValueError, EnvError) as error:
                answer = _sent(error)
            pipe.send(answer)


def _sent(error: Exception) -> Exception:
    """An error that the other end can unpickle."""
    return (EnvError if isinstance(error, EnvError) else ValueError)(str(error))
