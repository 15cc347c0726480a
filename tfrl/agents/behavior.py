"""The policy of an actor-critic as actors have it: a network of its own, without strategy or optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfrl import networks


class ActorCriticBehavior:
    """Acts on one device; follows `tfrl.experience.actor.BehaviorPolicy`.

    Args:
      config: the run's settings.
      precision: of the torso, resolved.
      at_once: parts of a forward pass that CPUs compute at the same time.
    """

    extras = {"log_prob": (), "value": ()}

    def __init__(self, config: Any, precision: str, *, at_once: int) -> None:
        gpus = tf.config.list_logical_devices("GPU")
        self._device = "/gpu:0" if gpus else "/cpu:0"
        with tf.device(self._device):
            self._network = networks.of_settings(config, precision)
        self._forward = self._network.forward_pass(on_gpu=bool(gpus), at_once=at_once)
        self.draw_noise = self._network.draw_noise

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Acts by them from now on."""
        self._network.set_weights(weights)

    def act(self, observations: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Drawn actions [R, B, *shape] of observations [R, B, *shape], their log-probabilities and values."""
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
