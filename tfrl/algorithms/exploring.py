"""The actions of algorithms with replay: with noise, or at random."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tfrl.algorithms.acting import ActingNetwork
from tfrl.envs import registry
from tfrl.experience.replay import BufferSettings
from tfrl.experience.rollout import Rollout
from tfrl.ops.graph import tf
from tfrl.run import rng


class ExploringNetwork(ActingNetwork):
    """An ActingNetwork that explores, for algorithms with replay."""

    _config: BufferSettings

    def draw(self, number: int, indices: Sequence[int]) -> np.ndarray:
        """The rows of iteration `number` for envs with these global indices, float32 [T, B, ...].

        A row decides an action without further state. It holds the noise of the action, the values of
        `config.exploration`, the random action itself, and 1 if the action is random, before
        --learning-starts. With action masks, it holds numbers in [0, 1) instead of the random action.
        """
        config, noise = self._config, super().draw(number, indices)
        observation, action = registry.specs(config)
        steps, envs = noise.shape[:2]
        env_steps = number * config.iteration_steps + config.num_envs * np.arange(steps)  # before each step
        shares = np.array([config.exploration(before) for before in env_steps.tolist()], np.float32)
        random, actions = env_steps < config.learning_starts, np.zeros((steps, envs, math.prod(action.shape)))
        for column, i in enumerate(indices if random[0] else ()):
            generator = rng.generator(config.seed, rng.Use.EXPLORATION, number, i)
            if observation.num_actions:
                drawn = generator.random((steps, *action.shape), np.float32)
            else:
                drawn = action.uniform(generator, steps)
            actions[:, column] = drawn.reshape(steps, -1)
        explored, at_random = (
            np.broadcast_to(x[:, None], (steps, envs, x.shape[1])) for x in (shares, random[:, None])
        )
        return np.concatenate((noise, explored, actions, at_random), axis=2, dtype=np.float32)

    def explore(self, observations: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Exploring actions [B, *shape] for observations [B, *shape], by rows [B, ...] of `draw`."""
        if rows[0, -1]:
            observation, action = registry.specs(self._config)
            drawn = rows[:, -1 - math.prod(action.shape) : -1]
            allowed = observation.allowed(observations)
            if allowed is not None:
                return action.from_uniform(drawn, allowed)
            # exact, because actions are float32 or small integers
            return drawn.reshape(-1, *action.shape).astype(action.dtype)
        width = self.network.noise_size
        noise = rows[:, :width]
        exploration = rows[0, width : width + len(self._config.exploration(0))]
        if self.training_policy is not None:
            return self.training_policy.act(self.array_pass(observations), noise, *exploration)
        observations, noise, *further = map(tf.convert_to_tensor, (observations, noise, *exploration))
        return self._act(observations, noise, None, *further).numpy()

    def sample(
        self, observations: np.ndarray, noise: np.ndarray, memory: np.ndarray | None = None
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Actions [R, B, *shape] for observations [R, B, *shape], by rows [R, B, ...] of `draw`."""
        actions = self.explore(*(x.reshape(-1, *x.shape[2:]) for x in (observations, noise)))
        return actions.reshape(*observations.shape[:2], *actions.shape[1:]), {}

    def complete(self, rollout: Rollout) -> None:
        """Does nothing: an exploring network has no extras."""
