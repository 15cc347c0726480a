"""The randomness of exploring actions of algorithms with replay, by (seed, iteration, env) alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfrl.envs import registry
from tfrl.run import rng


def noise(
    config: Any,
    iteration: int,
    indices: Sequence[int],
    draw: Callable[[np.random.Generator, int], np.ndarray],
) -> np.ndarray:
    """Noise of the actions of an iteration, float32 [T, B, K], of unit variance where it is correlated.

    Args:
      config: the settings.
      iteration: its number.
      indices: of the envs, global.
      draw: gives the numbers of one env, float32 [T, K], from a generator and T.
    """
    found = rng.action_noise(config.seed, iteration, indices, config.steps_per_env, draw)
    correlation = getattr(config, "noise_correlation", 0.0)
    if correlation:
        rest = np.float32((1.0 - correlation**2) ** 0.5)
        for t in range(1, len(found)):
            found[t] = np.float32(correlation) * found[t - 1] + rest * found[t]
    return found


def first_actions(config: Any, iteration: int, indices: Sequence[int]) -> np.ndarray | None:
    """Random actions of the steps before --learning-starts, [T, B, *shape]; None where there are none."""
    if iteration * config.iteration_steps >= config.learning_starts:
        return None
    spec = registry.specs(config.env)[1]
    generators = (rng.generator(config.seed, rng.Use.EXPLORATION, iteration, i) for i in indices)
    return np.stack([spec.uniform(g, config.steps_per_env) for g in generators], axis=1)


def is_random(config: Any, iteration: int, t: int) -> bool:
    """True if step `t` of an iteration is one of those before --learning-starts."""
    return env_steps(config, iteration, t) < config.learning_starts


def env_steps(config: Any, iteration: int, t: int) -> int:
    """Env steps, all workers together, before step `t` of an iteration."""
    return iteration * config.iteration_steps + t * config.num_envs
