"""States that a user's env saves with `get_state()` and `set_state(state)`, instead of a replay."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import TimeLimit

_PREFIX = "own/"


def is_saved(env: gymnasium.Env) -> bool:
    """True if the env has both methods, below time limits only, because other wrappers may have a state."""
    inner, _ = _below_limits(env)
    return all(callable(getattr(type(inner), name, None)) for name in ("get_state", "set_state"))


def _below_limits(env: gymnasium.Env) -> tuple[Any, list[TimeLimit]]:
    """The env below its time limits, and these, the outermost first."""
    limits = []
    while isinstance(env, TimeLimit):
        limits.append(env)
        env = env.env
    return env, limits


def get(env: gymnasium.Env) -> dict[str, np.ndarray]:
    """The state as arrays. Raises TypeError if it is not a dict of JSON values and arrays."""
    inner, limits = _below_limits(env)
    state = inner.get_state()
    if not isinstance(state, Mapping):
        raise TypeError("get_state() must give a dict")
    arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    rest = {name: value for name, value in state.items() if name not in arrays}
    about = np.array(json.dumps({"limits": [limit._elapsed_steps for limit in limits], "rest": rest}))
    return {_PREFIX: about} | {f"{_PREFIX}{name}": value.copy() for name, value in arrays.items()}


def put(env: gymnasium.Env, arrays: Mapping[str, np.ndarray]) -> None:
    """Restores a state of `get` in an env that has been reset."""
    inner, limits = _below_limits(env)
    about = json.loads(str(arrays[_PREFIX]))
    for limit, steps in zip(limits, about["limits"], strict=True):
        limit._elapsed_steps = steps
    own = {name.removeprefix(_PREFIX): a for name, a in arrays.items() if name.startswith(_PREFIX)}
    inner.set_state(about["rest"] | {name: array.copy() for name, array in own.items() if name})


def is_exact(env: gymnasium.Env, other: gymnasium.Env) -> bool:
    """True if a second env, restored from the state of the first, takes ten equal steps."""
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(15)]
    with contextlib.suppress(Exception):  # its methods may raise anything; then the episode is replayed
        env.reset(seed=1)
        for action in actions[:5]:
            if any(env.step(action)[2:4]):
                return False
        other.reset(seed=2)
        put(other, get(env))
        return all(_show(env, action) == _show(other, action) for action in actions[5:])
    return False


def _show(env: gymnasium.Env, action: Any) -> tuple[Any, ...]:
    shown, reward, terminated, truncated, _ = env.step(action)
    return np.asarray(shown).tobytes(), float(reward), bool(terminated), bool(truncated)
