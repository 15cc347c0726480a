"""Procgen's 16 games through its own vectorised C++ implementation (Cobbe et al. 2020, arXiv:1912.01588).

Procgen reports its own time-outs like other ends of episodes and does not return their last frame, so they
count as terminal, as in the published results.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfrl.envs.spec import ArraySpec, Discrete, EnvSpec, Step

with contextlib.redirect_stderr(io.StringIO()):  # procgen imports the old gym, which prints a banner
    from procgen import ProcgenGym3Env


class Procgen:
    """A vector of procgen envs; implements `VecEnv`. `act` returns while C++ threads step.

    A seed belongs to a whole procgen vector. So for a slice, the global vector is made, and the states of the
    wanted envs are copied to a smaller vector. Env i is then the same env on every worker.

    Args:
      spec: the global vector; `spec.render` makes `render` give 512 x 512 frames, at some cost in speed.
      indices: the global indices of the wanted envs.
    """

    exact_state = True
    observation_spec = ArraySpec((64, 64, 3), "uint8")
    action_spec = Discrete(15)

    def __init__(self, spec: EnvSpec, indices: Sequence[int]) -> None:
        self.num_envs = len(indices)
        whole = list(indices) == list(range(spec.num_envs))
        states = [] if whole else _initial_states(spec, indices)
        self._env = _vector(spec, self.num_envs)
        if states:
            self._env.callmethod("set_state", states)

    def observe(self) -> Step:
        """Waits for the step; observations are uint8 [B, 64, 64, 3]."""
        reward, observation, first = self._env.observe()
        return Step(reward, observation["rgb"], first, np.zeros(self.num_envs, bool), None)

    def act(self, actions: np.ndarray) -> None:
        """Starts one step with actions int32 [B]."""
        self._env.act(actions)

    def get_state(self) -> list[bytes]:
        """One state per env, 20 to 40 kB: level, objects, timer, random generators."""
        return self._env.callmethod("get_state")

    def set_state(self, states: Sequence[bytes]) -> None:
        """Continues exactly from `states`."""
        self._env.callmethod("set_state", list(states))

    def info(self) -> list[dict[str, Any]]:
        """Procgen's own facts per env: `level_seed`, `prev_level_seed`, `prev_level_complete`."""
        return self._env.get_info()

    def solved(self) -> np.ndarray:
        """Procgen's `prev_level_complete`, bool [B]."""
        return np.array([info["prev_level_complete"] for info in self._env.get_info()], bool)

    def render(self) -> list[np.ndarray]:
        """Frames uint8 [512, 512, 3] per env; needs `spec.render`."""
        return [info["rgb"] for info in self._env.get_info()]

    def close(self) -> None:
        """Stops the C++ threads."""
        self._env.close()


def _initial_states(spec: EnvSpec, indices: Sequence[int]) -> list[bytes]:
    whole = _vector(spec, spec.num_envs)
    states = whole.callmethod("get_state")
    whole.close()
    return [states[i] for i in indices]


def _vector(spec: EnvSpec, num_envs: int) -> ProcgenGym3Env:
    levels = {"num_levels": spec.num_levels, "start_level": spec.start_level}
    if spec.distribution_mode == "exploration":  # in this mode, procgen chooses a single level
        levels = {}
    return ProcgenGym3Env(
        num=num_envs,
        env_name=spec.env,
        distribution_mode=spec.distribution_mode,
        rand_seed=spec.seed,  # otherwise it would come from the system's random source
        num_threads=spec.num_threads,
        render_mode="rgb_array" if spec.render else None,
        **levels,
    )
