"""Policies as actors have them: a network of their own, without strategy or optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrl import networks
from tfrl.agents.player import Player
from tfrl.config.replay import ReplaySettings
from tfrl.envs import registry
from tfrl.experience import exploration
from tfrl.experience.actor import BehaviorPolicy
from tfrl.experience.rollout import Rollout
from tfrl.networks import array_policy
from tfrl.ops.graph import graph
from tfrl.run import rng


class ActorCriticBehavior:
    """Acts on one device as `PPOAgent` does; follows `tfrl.experience.actor.BehaviorPolicy`.

    Args:
      config: the run's settings.
      precision: of the torso, resolved.
      at_once: parts of a forward pass that CPUs compute at the same time.
    """

    def __init__(self, config: Any, precision: str, *, at_once: int) -> None:
        gpus = tf.config.list_logical_devices("GPU")
        self._config = config
        self._device = "/gpu:0" if gpus else "/cpu:0"
        with tf.device(self._device):
            self._network = networks.of_settings(config, precision)
        self._forward = self._network.forward_pass(on_gpu=bool(gpus), at_once=at_once)
        self._arrays = array_policy.Cache(self._network, config.num_envs)
        self.extras = self._arrays.extras

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Acts by them from now on."""
        self._network.set_weights(weights)
        self._arrays.forget()

    def draw(self, number: int, indices: Sequence[int]) -> np.ndarray:
        """The random numbers of rollout `number`, float32 [T, B, K], of envs by their global indices."""
        config = self._config
        return rng.action_noise(config.seed, number, indices, config.num_steps, self._network.draw_noise)

    def act(self, observations: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Drawn actions [R, B, *shape] of observations [R, B, *shape], and the extras."""
        if self._arrays.acts:
            return self._arrays.act(observations, noise)
        size = observations.shape[:2]
        with tf.device(self._device):
            results = self._act(
                *(tf.convert_to_tensor(x.reshape(-1, *x.shape[2:])) for x in (observations, noise))
            )
        actions, log_probs, values = (x.numpy().reshape(*size, *x.shape[1:]) for x in results)
        return actions, {"log_prob": log_probs, "value": values}

    def complete(self, rollout: Rollout) -> None:
        """Adds log-probabilities and values to a rollout that the weights of now have acted in NumPy."""
        if self._arrays.acts:
            parameters = rollout.extras["parameters"]
            rollout.extras |= self._arrays.said_of(rollout.observations[:, :-1], rollout.actions, parameters)

    @graph(reduce_retracing=True)
    def _act(self, observations: tf.Tensor, noise: tf.Tensor) -> tuple[tf.Tensor, ...]:
        parameters, values = self._forward(observations)
        policy = self._network.distribution(parameters)
        actions = policy.sample(noise)
        return actions, policy.log_prob(actions), values


class ReplayBehavior:
    """Explores as `ReplayAgent` does; follows `tfrl.experience.actor.BehaviorPolicy`.

    A row of its noise decides the action by itself: it holds the noise of an action, the values of
    `config.exploration`, and where one is still to be taken at random, that action.

    Args: those of `ActorCriticBehavior`.
    """

    extras: Mapping[str, tuple[int, ...]] = {}

    def __init__(self, config: Any, precision: str, *, at_once: int) -> None:
        gpus = tf.config.list_logical_devices("GPU")
        self._config = config
        self._spec = registry.specs(config)[1]
        self._device = "/gpu:0" if gpus else "/cpu:0"
        with tf.device(self._device):
            self._network = networks.of_settings(config, precision)
            initial = self._network.functions[self._network.player].initial()
            self._vector = tf.Variable(initial, trainable=False)
        sizes = {"on_gpu": bool(gpus), "at_once": at_once}
        self._player = Player(config, self._network, self._vector.read_value, **sizes)

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Acts by them from now on."""
        self._vector.assign(self._network.join(weights)[self._network.player])
        self._player.forget()

    def draw(self, number: int, indices: Sequence[int]) -> np.ndarray:
        """The rows of round `number`, float32 [T, B, ...], of envs by their global indices."""
        config = self._config
        draw = self._network.draw_noise
        noise = rng.action_noise(config.seed, number, indices, config.steps_per_env, draw)
        steps, envs = noise.shape[:2]
        explored = [config.exploration(exploration.env_steps(config, number, t)) for t in range(steps)]
        explored = np.broadcast_to(np.array(explored, np.float32)[:, None], (steps, envs, len(explored[0])))
        actions = exploration.first_actions(config, number, indices)
        actions = np.zeros((steps, envs, *self._spec.shape)) if actions is None else actions
        at_random = [exploration.is_random(config, number, t) for t in range(steps)]
        at_random = np.broadcast_to(np.array(at_random)[:, None, None], (steps, envs, 1))
        parts = (noise, explored, actions.reshape(steps, envs, -1), at_random)
        return np.concatenate(parts, axis=2, dtype=np.float32)

    def act(self, observations: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Actions [R, B, *shape] of observations [R, B, *shape], by rows [R, B, ...] of `draw`."""
        size, rows = observations.shape[:2], noise.reshape(-1, noise.shape[-1])
        if rows[0, -1]:  # exact: actions are float32, or small numbers
            action_size = int(np.prod(self._spec.shape))
            actions = rows[:, -1 - action_size : -1].astype(self._spec.dtype)
            return actions.reshape(*size, *self._spec.shape), {}
        width = self._network.noise_size
        further = len(self._config.exploration(0))
        observations = observations.reshape(-1, *observations.shape[2:])
        with tf.device(self._device):
            actions = self._player.act(observations, rows[:, :width], rows[0, width : width + further])
        return actions.reshape(*size, *actions.shape[1:]), {}

    def complete(self, rollout: Rollout) -> None:
        """Does nothing: nothing is said of actions."""


def of_settings(config: Any, precision: str, *, at_once: int) -> BehaviorPolicy:
    """Makes the policy that a run's actors act by; arguments are those of `ActorCriticBehavior`."""
    kind = ReplayBehavior if isinstance(config, ReplaySettings) else ActorCriticBehavior
    return kind(config, precision, at_once=at_once)
