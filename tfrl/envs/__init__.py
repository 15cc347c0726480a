"""Vectorised environments. `make` gives any slice of the global vector, the same envs on every topology.

To add a family of games that show images and take one of A actions: a module with a class that follows
`VecEnv`, and a `Family` in `tfrl/envs/registry.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tfrl.envs.registry import distribution_modes, family


class VecEnv(Protocol):
    """A vector of B environments that restart by themselves, in gym3's order of calls.

    `act(a_t)` may return while the environments still step; `observe()` waits for them and gives
    (r_{t-1}, o_t, first_t): the reward of the last action, and whether o_t begins a new episode. The last
    frame of an episode is not seen: o_t then already belongs to the next one.

    A class that follows it is made from an `EnvSpec` and B, which stands for the spec's `num_envs`.
    """

    num_envs: int
    num_actions: int
    observation_shape: tuple[int, int, int]

    def observe(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rewards float32 [B], observations uint8 [B, H, W, C], first bool [B]."""

    def act(self, actions: np.ndarray) -> None:
        """Starts one step with actions int32 [B]."""

    def solved(self) -> np.ndarray:
        """Whether the episode that ended last in each env solved its level, bool [B]."""

    def render(self) -> Sequence[np.ndarray]:
        """What people see, uint8 [512, 512, 3] per env; needs `EnvSpec.render`."""

    def get_state(self) -> list[bytes]:
        """One opaque state per env: everything that decides its future."""

    def set_state(self, states: Sequence[bytes]) -> None:
        """Puts states from `get_state` in place; `observe` then shows their observations."""

    def close(self) -> None:
        """Frees threads and memory."""


@dataclass(frozen=True)
class EnvSpec:
    """What decides a global vector of envs: the same spec gives the same envs everywhere.

    `num_levels=0` is the full distribution of levels. `num_threads` changes speed alone, and `render`, which
    makes `VecEnv.render` possible, as well.
    """

    name: str
    num_envs: int
    seed: int
    distribution_mode: str = "easy"
    num_levels: int = 200
    start_level: int = 0
    num_threads: int = 2
    render: bool = False


def make(spec: EnvSpec, indices: Sequence[int] | None = None) -> VecEnv:
    """Envs `indices` of the global vector that `spec` describes (all of them when None).

    A seed seeds a whole procgen vector, so the global vector is made once and the states of the wanted envs
    are set into a vector of their own: env i is the same env whichever worker holds it.

    Raises:
      ValueError: there is no such game, or not in this distribution mode.
    """
    whole = _build(spec, spec.num_envs)
    if indices is None or list(indices) == list(range(spec.num_envs)):
        return whole
    states = whole.get_state()
    whole.close()
    part = _build(spec, len(indices))
    part.set_state([states[i] for i in indices])
    return part


def _build(spec: EnvSpec, num_envs: int) -> VecEnv:
    known = family(spec.name)
    if spec.distribution_mode not in distribution_modes(spec.name):  # procgen's C++ would end the process
        raise ValueError(f"{spec.name} has no distribution mode {spec.distribution_mode!r}")
    # Imported when it is played: procgen's library takes a while.
    return getattr(importlib.import_module(known.module), known.kind)(spec, num_envs)
