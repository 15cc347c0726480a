"""Policies as actors have them: a network of their own, without strategy or optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrl import networks
from tfrl.experience.actor import BehaviorPolicy
from tfrl.networks import array_policy
from tfrl.run import rng


class ActorCriticBehavior:
    """Acts on one device as `PPOAgent` does; follows `tfrl.experience.actor.BehaviorPolicy`.

    Args:
      config: the run's settings.
      precision: of the torso, resolved.
      at_once: parts of a forward pass that CPUs compute at the same time.
    """

    extras = {"log_prob": (), "value": ()}

    def __init__(self, config: Any, precision: str, *, at_once: int) -> None:
        gpus = tf.config.list_logical_devices("GPU")
        self._config = config
        self._device = "/gpu:0" if gpus else "/cpu:0"
        with tf.device(self._device):
            self._network = networks.of_settings(config, precision)
        self._forward = self._network.forward_pass(on_gpu=bool(gpus), at_once=at_once)
        self._arrays = array_policy.Cache(self._network)
        self._in_arrays = config.num_envs <= array_policy.MOST_ENVS and self._arrays.fits

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Acts by them from now on."""
        self._network.set_weights(weights)
        self._arrays.forget()

    def draw(self, number: int, indices: Sequence[int]) -> np.ndarray:
        """The random numbers of rollout `number`, float32 [T, B, K], of envs by their global indices."""
        config = self._config
        return rng.action_noise(config.seed, number, indices, config.num_steps, self._network.draw_noise)

    def act(self, observations: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Drawn actions [R, B, *shape] of observations [R, B, *shape], their log-probabilities and values."""
        if self._in_arrays:
            return self._arrays.act(observations, noise)
        size = observations.shape[:2]
        with tf.device(self._device):
            results = self._act(
                *(tf.convert_to_tensor(x.reshape(-1, *x.shape[2:])) for x in (observations, noise))
            )
        actions, log_probs, values = (x.numpy().reshape(*size, *x.shape[1:]) for x in results)
        return actions, {"log_prob": log_probs, "value": values}

    @tf.function(reduce_retracing=True)
    def _act(self, observations: tf.Tensor, noise: tf.Tensor) -> tuple[tf.Tensor, ...]:
        parameters, values = self._forward(observations)
        policy = self._network.distribution(parameters)
        actions = policy.sample(noise)
        return actions, policy.log_prob(actions), values


def of_settings(config: Any, precision: str, *, at_once: int) -> BehaviorPolicy:
    """Makes the policy that a run's actors act by; arguments are those of `ActorCriticBehavior`."""
    return ActorCriticBehavior(config, precision, at_once=at_once)
