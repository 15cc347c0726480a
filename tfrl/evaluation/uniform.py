"""Policies that draw actions alike, always or now and then: a look at an env without a run, and data sets."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tfrl.cli.errors import UserError
from tfrl.config.task import Task, check
from tfrl.envs import registry
from tfrl.envs.observations import ArraySpec
from tfrl.envs.spec import ActionSpec, Discrete
from tfrl.evaluation.episodes import Player
from tfrl.experience.memory import Memory


class UniformPolicy:
    """Uniform actions of those allowed, whatever else is seen; follows `tfrl.evaluation.episodes.Player`."""

    def __init__(self, observation_spec: ArraySpec, action_spec: ActionSpec) -> None:
        self._seen, self._spec = observation_spec, action_spec

    def draw_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """A number from [0, 1) for each number of an action, float32 [steps, K]."""
        return generator.random((steps, *(self._spec.shape or (1,))), np.float32)

    def act(self, observations: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Actions [B, *shape] by noise float32 [B, K]."""
        return self._spec.from_uniform(noise, self._seen.allowed(observations))

    def memory(self, envs: int) -> None:
        """Remembers nothing."""

    @property
    def probabilities(self) -> Callable[[np.ndarray], np.ndarray] | None:
        """Gives those of each action, float32 [B, A], of observations; None unless they are discrete."""
        if not isinstance(self._spec, Discrete):
            return None
        n = self._spec.n

        def of_each(observations: np.ndarray) -> np.ndarray:
            allowed = self._seen.allowed(observations)
            allowed = np.ones((len(observations), n), bool) if allowed is None else allowed
            return (allowed / allowed.sum(axis=1, keepdims=True)).astype(np.float32)

        return of_each


class EpsilonGreedyPolicy:
    """Now and then a uniform action, else another policy's; follows `tfrl.evaluation.episodes.Player`.

    Args:
      player: the other policy.
      observation_spec, action_spec: of the env.
      epsilon: the share of uniform actions.
    """

    def __init__(
        self, player: Player, observation_spec: ArraySpec, action_spec: ActionSpec, epsilon: float
    ) -> None:
        self._player = player
        self._uniform = UniformPolicy(observation_spec, action_spec)
        self._epsilon = epsilon
        self._shape = (-1, *(1,) * len(action_spec.shape))
        self._own = 1 + math.prod(action_spec.shape)  # numbers of noise before the other policy's

    def draw_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """Numbers by which it is random or not, and how, and the other policy's own, float32 [steps, K]."""
        whether = generator.random((steps, 1), np.float32)
        parts = [whether, self._uniform.draw_noise(generator, steps)]
        return np.concatenate([*parts, self._player.draw_noise(generator, steps)], axis=1)

    def act(self, observations: np.ndarray, noise: np.ndarray, *memory: np.ndarray) -> Any:
        """Actions [B, *shape] of observations [B, *shape], by noise [B, K]; with memory, also states."""
        chosen = self._player.act(observations, noise[:, self._own :], *memory)
        best, *states = chosen if memory else (chosen,)
        at_random = (noise[:, 0] < self._epsilon).reshape(self._shape)
        actions = np.where(at_random, self._uniform.act(observations, noise[:, 1 : self._own]), best)
        return (actions, *states) if memory else actions

    def memory(self, envs: int) -> Memory | None:
        """The other policy's."""
        return self._player.memory(envs)


def task_without_run(env: str, seed: int | None) -> Task:
    """The task of playing an env, on all of its levels, for which no run is needed. Seed None: 1.

    Raises:
      UserError: there is no such env.
    """
    task = Task(env=registry.own_name(env), seed=1 if seed is None else seed)
    check(task)
    return Task(env=task.env, seed=task.seed, num_levels=0) if task.has_unseen_levels else task


def check_no_run(words: list[str]) -> None:
    """Raise UserError where a run is given beside --random."""
    if words:
        raise UserError(f"--random takes no run; got {words[0]}.")
