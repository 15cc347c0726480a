"""The calls of an env of anybody's: what they must give, and one sentence where they fail or do not."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from functools import partial
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any

import gymnasium
import numpy as np

from tfrl.cli import signals
from tfrl.cli.errors import EnvError
from tfrl.envs.spec import ArraySpec

RESET = "reset(seed=..., options=...)"
STEP = "step(action)"
_GIVES = {RESET: "(observation, info)", STEP: "(observation, reward, terminated, truncated, info)"}


def check_calls(env_id: str, env: gymnasium.Env, spec: ArraySpec) -> None:
    """Calls `reset` and `step` once each. Raises EnvError if they fail, or do not give what they must."""
    # Its own step: Gymnasium's time limit would stumble over what it gives, in words of its own.
    inner = env.env if isinstance(env, gymnasium.wrappers.TimeLimit) else env
    env.action_space.seed(0)
    calls = {RESET: partial(env.reset, seed=1), STEP: partial(inner.step, env.action_space.sample())}
    for call, make in calls.items():
        with Calling(env_id, env, call):
            given = make()
        names = _GIVES[call].strip("()").split(", ")
        if not isinstance(given, tuple) or len(given) != len(names):
            what = f"{len(given)} values" if isinstance(given, tuple) else _kind(given)
            raise _breach(env_id, call, f"gives {what}", f"must give {_GIVES[call]}")
        parts = dict(zip(names, given, strict=True))
        if not isinstance(info := parts.pop("info"), Mapping):
            raise _breach(env_id, call, f"gives {_kind(info)} as info", "must give a dict")
        observation = fitting(env_id, parts.pop("observation"), spec)
        for name, value in parts.items():
            if not _is_number(value):
                raise _breach(env_id, call, f"gives {_kind(value)} as {name}", "must give a number")
        check_finite(env_id, np.float32(parts.get("reward", 0)), observation)


def _breach(env_id: str, call: str, does: str, must: str) -> EnvError:
    return EnvError(f"{env_id} does not keep to Gymnasium's interface: its {call} {does}, and {must}")


def _kind(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _is_number(value: Any) -> bool:
    """True for one real number or truth value, of Python's types or NumPy's."""
    array = np.asarray(value)
    return array.size == 1 and array.dtype.kind in "biuf"


def fitting(env_id: str, shown: Any, spec: ArraySpec) -> np.ndarray:
    """The array of what an env has shown, which `spec` can take as it is: [*shape], any numbers for float32.

    Raises EnvError if it is of another shape, or no uint8 where the space says so: a cast would wrap it.
    """
    array = np.asarray(shown)
    of_its_kind = array.dtype == np.uint8 if spec.dtype == "uint8" else array.dtype.kind in "biuf"
    if array.shape == spec.shape and of_its_kind:
        return array
    numbers = "uint8" if spec.dtype == "uint8" else "numbers"
    what = "None" if shown is None else f"{array.dtype} {list(array.shape)}"
    raise EnvError(
        f"{env_id} shows an observation of {what} where its observation_space says {numbers} "
        f"{list(spec.shape)}"
    )


def check_finite(env_id: str, reward: np.ndarray, observation: np.ndarray) -> None:
    """Raise EnvError if a reward, or a number of an observation, is NaN or infinite."""
    for name, numbers in (("a reward", reward), ("an observation", observation)):
        bad = numbers[~np.isfinite(numbers)] if numbers.dtype.kind == "f" else ()
        if len(bad):
            raise EnvError(f"{env_id} gave {name} that is not a finite number: {bad[0]}")


def all_finite(numbers: np.ndarray) -> bool:
    """True if float32 [...] are all finite and none is so large that its square is not; 0.5 us for a few."""
    flat = numbers.ravel()
    return isfinite(flat.dot(flat))


class Calling:
    """The calls of one kind of an env: `with calling: ...` turns what they raise into an EnvError.

    The sentence has the last line of the env's own code. May be used again and again: it costs 0.2 us.

    Args:
      env_id: its name.
      env: the env, or one of several of its kind.
      call: what is called, RESET or STEP.
    """

    def __init__(self, env_id: str, env: gymnasium.Env, call: str) -> None:
        self._env_id, self._env, self._call = env_id, env, call

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """Raises EnvError in place of an exception, but for one, and for too little memory."""
        # An env that quits, as games do once their window is closed, would end a run as if it were done.
        quits = isinstance(error, SystemExit) and not signals.OURS.first
        if not (quits or isinstance(error, Exception)) or isinstance(error, EnvError | MemoryError):
            return
        lines = str(error).strip().splitlines()
        says = f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
        home, frames = _home(self._env), traceback.extract_tb(trace)[1:]  # the first is the caller's
        own = [frame for frame in frames if home and Path(frame.filename).is_relative_to(home)]
        places = [f" ({frame.filename}:{frame.lineno})" for frame in own or frames]
        where = f"{self._call}{places[-1] if places else ''}"
        raise EnvError(f"{self._env_id} raised {says}, in {where}") from error


def _home(env: gymnasium.Env) -> Path | None:
    """The folder of the env's own package, or of the file that has it."""
    package = sys.modules.get(type(env.unwrapped).__module__.partition(".")[0])
    file = getattr(package, "__file__", None)
    return Path(file).parent if file else None
