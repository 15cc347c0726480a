"""Specs: shape and type of what an env shows and takes; networks, buffers and noise are sized by them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ArraySpec:
    """An array of one env, without the batch.

    Attributes:
      shape: (H, W, C) of images or (D,) of vectors, when it is an observation.
      dtype: NumPy's name: "uint8" of images, "float32" of vectors.
    """

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Discrete:
    """One of `n` actions: an int32 scalar, 0 ... n - 1."""

    n: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one action: a scalar."""
        return ()

    @property
    def dtype(self) -> str:
        """The type of an action."""
        return "int32"


@dataclass(frozen=True)
class Box:
    """D real numbers, float32 [D], between `low` and `high` in the env.

    Agents act in [-1, 1]; the env family rescales that to [low, high].
    """

    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one action: (D,)."""
        return (len(self.low),)

    @property
    def dtype(self) -> str:
        """The type of an action's numbers."""
        return "float32"


ActionSpec = Discrete | Box


def random_actions(spec: ActionSpec, generator: np.random.Generator, count: int) -> np.ndarray:
    """Uniform actions of the spec, [count, *shape]."""
    if isinstance(spec, Discrete):
        return generator.integers(spec.n, size=count, dtype=np.int32)
    return generator.uniform(-1.0, 1.0, (count, *spec.shape)).astype(np.float32)


@dataclass(frozen=True)
class EnvSpec:
    """The description of a global vector of envs: the same spec gives the same envs everywhere.

    `num_levels=0` is the full distribution of levels; envs without levels ignore these fields.
    `num_threads`, and `render`, which makes `VecEnv.render` possible, change the speed alone.
    """

    name: str
    num_envs: int
    seed: int
    distribution_mode: str = "easy"
    num_levels: int = 200
    start_level: int = 0
    num_threads: int = 2
    render: bool = False
