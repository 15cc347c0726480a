"""Gymnasium's spaces: the specs of those that can be learned from, and how agents' actions go to an env.

To support another action space: a function here like `_discrete`, and its line in `_ACTIONS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

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
            return ArraySpec(space.shape, "uint8")
    raise ValueError(
        f"{env_id} shows {_describe(space)}, which cannot be learned from: "
        "observations must be vectors of numbers, or images [H, W, C] of uint8"
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
    return Actions(Discrete(int(space.n)), lambda actions: (actions + start if start else actions).tolist())


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
