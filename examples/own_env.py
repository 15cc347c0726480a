"""An env of one's own: a class, or a function that makes it with its wrappers.

    python examples/own_env.py

or, in this folder: tfrl ppo --env own_env:make_env. Each episode has its own seed, from which a resume
repeats it, so all randomness must come from `self.np_random`.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import TimeLimit

import tfrl


class Thermostat(gymnasium.Env):
    """Keeps a room at 20 degrees: heat or do not, while the weather changes."""

    observation_space = gymnasium.spaces.Box(-50.0, 50.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begins an episode with a cold room."""
        super().reset(seed=seed)
        self.room, self.outside = self.np_random.uniform(5.0, 15.0), 0.0
        return self._show(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """A minute: the room loses heat to the outside, and the heating gives some."""
        self.outside += self.np_random.normal()
        self.room += 0.1 * (self.outside - self.room) + 4.0 * action
        return self._show(), 1.0 - abs(self.room - 20.0) / 10.0, False, False, {}

    def _show(self) -> np.ndarray:
        return np.array([self.room - 20.0, self.outside], np.float32)


def make_env(minutes: int = 100) -> gymnasium.Env:
    """Returns an env with episodes of this many minutes; `env_kwargs={"minutes": 200}` changes the number."""
    return TimeLimit(Thermostat(), minutes)


if __name__ == "__main__":
    run = tfrl.train("ppo", env=make_env, total_steps=20_000, seed=1)
    policy = tfrl.load(run.folder)
    longer = tfrl.evaluate(policy, env=lambda: make_env(minutes=300), episodes=32, seed=1)
    print(f"after {run.results['env_steps']:,} steps: {run.results['eval']['test']['return']:.1f} of 100")
    print(f"episodes of 300 minutes: {longer.mean:.1f}, 95 % interval {longer.interval}")
