"""Policies as actors have them: a network of their own, without strategy or optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfrl import networks
from tfrl.agents.acting import ActingActorCritic, ActingNetwork
from tfrl.config.replay import ReplaySettings
from tfrl.envs import registry
from tfrl.experience import exploration
from tfrl.experience.actor import BehaviorPolicy
from tfrl.experience.rollout import Rollout
from tfrl.ops.lazy import tf
from tfrl.run import rng


class _Behavior:
    """A network with weights of its own on one device; a base of `experience.actor.BehaviorPolicy`s.

    Args:
      config: the run's settings.
      precision: of the torso, resolved.
      at_once: parts of a forward pass that CPUs compute at the same time.
    """

    extras: Mapping[str, tuple[int, ...]] = {}
    _acting_class: type[ActingNetwork] = ActingNetwork

    def __init__(self, config: Any, precision: str, *, at_once: int) -> None:
        gpus = tf.config.list_logical_devices("GPU")
        self._config = config
        self._device = "/gpu:0" if gpus else "/cpu:0"
        with tf.device(self._device):
            self._network = networks.of_settings(config, precision)
            initial = self._network.initial()
            self._variables = {
                name: tf.Variable(initial[name], trainable=False) for name in self._network.acting
            }
        self._acting = self._acting_class(
            self._network, self._weights, config.num_envs, on_gpu=bool(gpus), at_once=at_once
        )

    def _weights(self) -> dict[str, tf.Tensor]:
        return {name: variable.read_value() for name, variable in self._variables.items()}

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Acts by them from now on."""
        vectors = self._network.join(weights)
        for name, variable in self._variables.items():
            variable.assign(vectors[name])
        self._acting.forget()


class ActorCriticBehavior(_Behavior):
    """Acts on one device as `PPOAgent` does; follows `tfrl.experience.actor.BehaviorPolicy`."""

    _acting: ActingActorCritic
    _acting_class = ActingActorCritic

    def __init__(self, config: Any, precision: str, *, at_once: int) -> None:
        super().__init__(config, precision, at_once=at_once)
        self.extras = self._acting.extras

    def draw(self, number: int, indices: Sequence[int]) -> np.ndarray:
        """The random numbers of rollout `number`, float32 [T, B, K], of envs by their global indices."""
        config = self._config
        return rng.action_noise(config.seed, number, indices, config.num_steps, self._network.draw_noise)

    def act(self, observations: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Drawn actions [R, B, *shape] of observations [R, B, *shape], and the extras."""
        with tf.device(self._device):
            return self._acting.act_with_extras(observations, noise)

    def complete(self, rollout: Rollout) -> None:
        """Adds log-probabilities and values to a rollout that the present weights acted in NumPy."""
        self._acting.complete(rollout)


class ReplayBehavior(_Behavior):
    """Explores as `ReplayAgent` does; follows `tfrl.experience.actor.BehaviorPolicy`.

    A row of its noise decides the action by itself: it holds the noise of an action, the values of
    `config.exploration`, and, where the action is random, that action.
    """

    def __init__(self, config: Any, precision: str, *, at_once: int) -> None:
        super().__init__(config, precision, at_once=at_once)
        self._spec = registry.specs(config)[1]

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
            actions = self._acting.act(observations, rows[:, :width], rows[0, width : width + further])
        return actions.reshape(*size, *actions.shape[1:]), {}

    def complete(self, rollout: Rollout) -> None:
        """Does nothing: nothing is said of actions."""


def of_settings(config: Any, precision: str, *, at_once: int) -> BehaviorPolicy:
    """Makes the policy that a run's actors act by; arguments are those of `ActorCriticBehavior`."""
    kind = ReplayBehavior if isinstance(config, ReplaySettings) else ActorCriticBehavior
    return kind(config, precision, at_once=at_once)
