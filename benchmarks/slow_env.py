"""A Gymnasium env that sleeps a millisecond each step: `--env benchmarks.slow_env:tfrl/Slow-v0`."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

_SLEEP = 1e-3  # seconds
_LENGTH = 100  # steps of an episode


class Slow(gymnasium.Env):
    """Shows drawn numbers and pays for the action that the first of them names."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        """Begins an episode."""
        super().reset(seed=seed)
        self._steps = 0
        return self._draw(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Sleeps, and pays 1 for the right action."""
        time.sleep(_SLEEP)
        reward = float(action == (self._shown[0] > 0))
        self._steps += 1
        return self._draw(), reward, self._steps == _LENGTH, False, {}

    def _draw(self) -> np.ndarray:
        self._shown = self.np_random.standard_normal(4, np.float32)
        return self._shown


gymnasium.register("tfrl/Slow-v0", "benchmarks.slow_env:Slow")
