"""A vector of envs in a process of its own, for envs whose pictures OpenGL draws.

Mesa's OpenGL and TensorFlow each bring an LLVM: in one process, whichever is loaded second crashes it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tfrl.cli.errors import EnvError, UserError
from tfrl.envs.spec import EnvSpec
from tfrl.envs.vec_env import Step, VecEnv

MakeEnv = Callable[[EnvSpec, Sequence[int]], VecEnv]


class Apart:
    """Follows `VecEnv` by asking a process that never loads TensorFlow; it ends with this one.

    Args:
      make: makes the envs there; a class or function of a module.
      spec, indices: what it is given.

    Raises:
      ValueError, EnvError: one sentence, as `make` and the envs raise it.
      UserError: the process has ended.
    """

    def __init__(self, make: MakeEnv, spec: EnvSpec, indices: Sequence[int]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._name = spec.env
        self._process = context.Process(target=_serve, args=(theirs, make, spec, list(indices)), daemon=True)
        self._process.start()
        theirs.close()
        facts = self._answer()
        self.num_envs, self.observation_spec, self.action_spec, self.exact_state = facts

    def observe(self) -> Step:
        """Implements `VecEnv.observe`."""
        return self._ask("observe")

    def act(self, actions: np.ndarray) -> None:
        """Implements `VecEnv.act`."""
        self._ask("act", actions)

    def solved(self) -> np.ndarray:
        """Implements `VecEnv.solved`."""
        return self._ask("solved")

    def render(self) -> Sequence[np.ndarray]:
        """Implements `VecEnv.render`."""
        return self._ask("render")

    def get_state(self) -> list[bytes]:
        """Implements `VecEnv.get_state`."""
        return self._ask("get_state")

    def set_state(self, states: Sequence[bytes]) -> None:
        """Implements `VecEnv.set_state`."""
        self._ask("set_state", list(states))

    def close(self) -> None:
        """Ends the process."""
        self._pipe.close()
        self._process.join()

    def _ask(self, method: str, *arguments: Any) -> Any:
        with contextlib.suppress(BrokenPipeError):  # the answer says so
            self._pipe.send((method, arguments))
        return self._answer()

    def _answer(self) -> Any:
        try:
            kind, answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            raise UserError(  # whatever it was asked for: nobody but a drawing needs it
                f"{self._name} cannot be rendered here: the process that draws it ended with "
                f"{self._process.exitcode}."
            ) from None
        if kind is not None:
            raise kind(answer)
        return answer


def _serve(pipe: Connection, make: MakeEnv, spec: EnvSpec, indices: Sequence[int]) -> None:
    """Answers until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the other end, which then closes this one
    try:
        env = make(spec, indices)
    except (ValueError, EnvError) as error:
        pipe.send(_sent(error))
        return
    pipe.send((None, (env.num_envs, env.observation_spec, env.action_spec, env.exact_state)))
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            method, arguments = pipe.recv()
            try:
                answer = None, getattr(env, method)(*arguments)
            except (ValueError, EnvError) as error:
                answer = _sent(error)
            pipe.send(answer)
    env.close()


def _sent(error: Exception) -> tuple[type[Exception], str]:
    """An error as it goes to the other end: by its sentence."""
    return EnvError if isinstance(error, EnvError) else ValueError, str(error)
