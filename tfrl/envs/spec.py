"""Specs: shape and type of what an env shows and takes; networks, buffers and noise are sized by them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

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


class ActionSpec(ABC):
    """An action space: what an action is, and what needs to be known of it outside of its distribution.

    Attributes:
      dtype: NumPy's name of the type of an action's numbers.
      kind: what its actions are called in sentences: "discrete".
    """

    dtype: ClassVar[str]
    kind: ClassVar[str]

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of one action; () of a single number."""

    @abstractmethod
    def uniform(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """Uniform actions, [count, *shape]."""

    @abstractmethod
    def from_uniform(self, numbers: np.ndarray) -> np.ndarray:
        """Uniform actions [B, *shape] by numbers in [0, 1), float32 [B, K], one for each of an action's."""

    def scaled(self, action: np.ndarray) -> np.ndarray:
        """The numbers of one action [K] in [-1, 1], for pictures; those of other ranges override this."""
        return action


@dataclass(frozen=True)
class Discrete(ActionSpec):
    """One of `n` actions: an int32 scalar, 0 ... n - 1."""

    n: int

    dtype: ClassVar[str] = "int32"
    kind: ClassVar[str] = "discrete"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one action: a scalar."""
        return ()

    def uniform(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """Uniform actions, int32 [count]."""
        return generator.integers(self.n, size=count, dtype=np.int32)

    def from_uniform(self, numbers: np.ndarray) -> np.ndarray:
        """Uniform actions, int32 [B], by numbers in [0, 1), float32 [B, 1]."""
        return (numbers[:, 0] * self.n).astype(np.int32)


@dataclass(frozen=True)
class Box(ActionSpec):
    """D real numbers, float32 [D], between `low` and `high` in the env.

    Agents act in [-1, 1]; the env family rescales that to [low, high].
    """

    low: tuple[float, ...]
    high: tuple[float, ...]

    dtype: ClassVar[str] = "float32"
    kind: ClassVar[str] = "continuous"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one action: (D,)."""
        return (len(self.low),)

    def uniform(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """Uniform actions, float32 [count, D] in [-1, 1)."""
        return generator.uniform(-1.0, 1.0, (count, *self.shape)).astype(np.float32)

    def from_uniform(self, numbers: np.ndarray) -> np.ndarray:
        """Uniform actions, float32 [B, D] in [-1, 1), by numbers in [0, 1), float32 [B, D]."""
        return 2 * numbers - 1


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
