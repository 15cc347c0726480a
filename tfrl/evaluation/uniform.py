"""The policy that draws all actions alike: a look at an env, and data sets, without a run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tfrl.cli.errors import UserError
from tfrl.config.task import Task, check, has_unseen_levels, own_name
from tfrl.envs.spec import ActionSpec, Discrete


class UniformPolicy:
    """Uniform actions, whatever is seen; follows `tfrl.evaluation.episodes.Player`."""

    def __init__(self, action_spec: ActionSpec) -> None:
        self._spec = action_spec

    def draw_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """A number from [0, 1) for each number of an action, float32 [steps, K]."""
        return generator.random((steps, *(self._spec.shape or (1,))), np.float32)

    def act(self, observations: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Actions [B, *shape] by noise float32 [B, K]."""
        return self._spec.from_uniform(noise)

    @property
    def probabilities(self) -> Callable[[np.ndarray], np.ndarray] | None:
        """Gives those of each action, float32 [B, A], of observations; None unless they are discrete."""
        if not isinstance(self._spec, Discrete):
            return None
        n = self._spec.n
        return lambda observations: np.full((len(observations), n), 1 / n, np.float32)


def task_without_run(env: str, seed: int | None) -> Task:
    """The task of playing an env, on all of its levels, for which no run is needed. Seed None: 1.

    Raises:
      UserError: there is no such env.
    """
    task = Task(env=own_name(env), seed=1 if seed is None else seed)
    check(task)
    return Task(env=task.env, seed=task.seed, num_levels=0) if has_unseen_levels(task) else task


def check_no_run(words: list[str]) -> None:
    """Raise UserError where a run is given beside --random."""
    if words:
        raise UserError(f"--random takes no run; got {words[0]}.")
