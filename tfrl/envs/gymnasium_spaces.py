"""Gymnasium's spaces and calls: the specs of spaces, and one sentence where an env's call fails.

To support another action space: a function here like `_discrete`, and its line in `_ACTIONS`.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from tfrl.cli import signals
from tfrl.cli.errors import EnvError
from tfrl.envs.spec import ActionSpec, ArraySpec, Box, Discrete


class Actions(NamedTuple):
    """An action space as agents see it, and the way back.

    Attributes:
      spec: the spec of its actions.
      inputs: gives what each of N envs' `step` takes, for agents' actions [N, *spec.shape].
    """

    spec: ActionSpec
    inputs: Callable[[np.ndarray], Sequence[Any]]


def observation_spec(env_id: str, space: spaces.Space) -> ArraySpec:
    """The spec of an env's observations. Raises ValueError, a sentence, if there is none for this space."""
    if isinstance(space, spaces.Box):
        if len(space.shape) == 1 and np.issubdtype(space.dtype, np.number):
            return ArraySpec(space.shape, "float32")
        if len(space.shape) == 3 and space.dtype == np.uint8:
            return _image_spec(env_id, space)
    raise ValueError(
        f"{env_id} shows {_describe(space)}, which cannot be learned from: "
        "observations must be vectors of numbers, or images [H, W, C] or [C, H, W] of uint8"
    )


_FEW = 16  # channels; an image's width is more


def _image_spec(env_id: str, space: spaces.Box) -> ArraySpec:
    """The spec of images, whose shape tells where their channels are. Raises ValueError if it does not."""
    first, middle, last = shape = space.shape
    channels_last = last < min(first, middle) or first == middle != last
    channels_first = first <= _FEW < last and first < middle or middle == last != first
    if channels_last:  # wins where a board of few cells has fewer layers still
        return ArraySpec(shape, "uint8")
    if channels_first:
        return ArraySpec((middle, last, first), "uint8", channels_first=True)
    raise ValueError(
        f"{env_id} shows {_describe(space)}, and this shape does not tell whether the first or the last "
        "number counts the channels: give images [H, W, C] with fewer channels than rows and columns"
    )


def actions_of(env_id: str, space: spaces.Space) -> Actions:
    """The actions of an env. Raises ValueError, a sentence, if this space is not supported."""
    for kind, make in _ACTIONS.items():
        if isinstance(space, kind) and (actions := make(env_id, space)):
            return actions
    raise ValueError(
        f"{env_id} takes {_describe(space)}, which is not supported: "
        "actions must be Discrete, or a Box that is a vector of real numbers"
    )


def _discrete(env_id: str, space: spaces.Discrete) -> Actions:
    start = int(space.start)
    # ints: faster than NumPy's
    return Actions(
        Discrete(int(space.n), start), lambda actions: (actions + start if start else actions).tolist()
    )


def _box(env_id: str, space: spaces.Box) -> Actions | None:
    if len(space.shape) != 1 or not np.issubdtype(space.dtype, np.floating):
        return None
    if not space.is_bounded():
        raise ValueError(f"{env_id} takes actions without bounds, and agents here act between bounds")
    low, high = (np.asarray(x, space.dtype) for x in (space.low, space.high))
    middle, half = low / 2 + high / 2, high / 2 - low / 2  # in this order no bound overflows by itself
    if (half > np.finfo(np.float32).max / 2).any():
        raise ValueError(
            f"{env_id} takes actions between {low.min():.2g} and {high.max():.2g}, which is as good as "
            "without bounds, and agents here act between bounds"
        )

    def inputs(actions: np.ndarray) -> np.ndarray:
        scaled = actions * half
        scaled += middle
        np.maximum(scaled, low, out=scaled)
        return np.minimum(scaled, high, out=scaled)

    return Actions(Box(tuple(space.low.tolist()), tuple(space.high.tolist())), inputs)


_ACTIONS: dict[type[spaces.Space], Callable[[str, Any], Actions | None]] = {
    spaces.Discrete: _discrete,
    spaces.Box: _box,
}


def _describe(space: spaces.Space) -> str:
    kind = type(space).__name__
    return f"a {kind} of {space.dtype} {list(space.shape)}" if isinstance(space, spaces.Box) else f"a {kind}"


RESET = "reset(seed=..., options=...)"
STEP = "step(action)"
_GIVES = {RESET: "(observation, info)", STEP: "(observation, reward, terminated, truncated, info)"}


def check_calls(env_id: str, env: gymnasium.Env, spec: ArraySpec) -> bool:
    """Calls `reset` and `step` once each; True if an info has an "action_mask".

    Raises EnvError if they fail, or do not give what they must.
    """
    has_mask = False
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
        has_mask |= "action_mask" in info
        observation = fitting(env_id, parts.pop("observation"), spec)
        for name, value in parts.items():
            if not _is_number(value):
                raise _breach(env_id, call, f"gives {_kind(value)} as {name}", "must give a number")
        with np.errstate(over="ignore"):  # said in a sentence
            numbers = np.float32(parts.get("reward", 0)), observation.astype(spec.dtype)
        check_finite(env_id, *numbers)
    return has_mask


def _breach(env_id: str, call: str, does: str, must: str) -> EnvError:
    return EnvError(f"{env_id} does not keep to Gymnasium's interface: its {call} {does}, and {must}")


def _kind(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _is_number(value: Any) -> bool:
    """True for one real number or truth value, of Python's types or NumPy's."""
    array = np.asarray(value)
    return array.size == 1 and array.dtype.kind in "biuf"


def fitting(env_id: str, shown: Any, spec: ArraySpec) -> np.ndarray:
    """The array of what an env has shown, [*spec.shape]: uint8, or any numbers for float32.

    Raises EnvError if it is of another shape, or no uint8 where the space says so: a cast would wrap it.
    """
    array = np.asarray(shown)
    of_its_kind = array.dtype == np.uint8 if spec.dtype == "uint8" else array.dtype.kind in "biuf"
    if array.shape == spec.env_shape and of_its_kind:
        return np.moveaxis(array, 0, -1) if spec.channels_first else array
    numbers = "uint8" if spec.dtype == "uint8" else "numbers"
    what = "None" if shown is None else f"{array.dtype} {list(array.shape)}"
    raise EnvError(
        f"{env_id} shows an observation of {what} where its observation_space says {numbers} "
        f"{list(spec.env_shape)}"
    )


def check_finite(env_id: str, reward: np.ndarray, observation: np.ndarray) -> None:
    """Raise EnvError if a reward, or a number of an observation, float32 [...], is NaN or infinite."""
    for name, numbers in (("a reward", reward), ("an observation", observation)):
        bad = numbers[~np.isfinite(numbers)] if numbers.dtype.kind == "f" else ()
        if len(bad):
            what = "not a number (NaN)" if np.isnan(bad[0]) else "infinite, or too large for float32"
            raise EnvError(f"{env_id} gave {name} that is {what}")


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
