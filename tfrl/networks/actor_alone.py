"""REINFORCE's network: an actor, a part of whose features may be left out at every step."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfrl.envs import registry
from tfrl.envs.spec import ActionSpec
from tfrl.networks.actor_and_critics import StochasticActor
from tfrl.networks.distributions import distribution_for
from tfrl.networks.network import Functional, Head, seeds_of, torso_for


class ActorAlone(StochasticActor):
    """An actor without critics. It acts without dropout.

    Args:
      torso: gives features float32 [B, D] of observations [B, *shape].
      head: gives the parameters of the distribution, float32 [B, P], of them.
      dropout: the share of features that are left out of `thinned`'s.
    """

    def __init__(
        self, torso: keras.Model, head: keras.layers.Layer, action_spec: ActionSpec, dropout: float
    ) -> None:
        actor = keras.Model(torso.input, head(torso.output), name="actor")
        super().__init__(actor, (), action_spec)
        factors = keras.Input(torso.output_shape[1:], name="factors")
        thinned = keras.layers.Multiply(dtype="float32", name="thinned")([torso.output, factors])
        self._thinned = Functional(keras.Model([torso.input, factors], head(thinned), name="thinned_actor"))
        self._dropout = np.float32(dropout)
        self.dropped_size = torso.output_shape[-1] if dropout else 0

    def draw_training_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """The numbers of `draw_noise` and, with dropout, of each feature in [0, 1), float32 [steps, K]."""
        noise = self.draw_noise(generator, steps)
        return np.concatenate([noise, generator.random((steps, self.dropped_size), np.float32)], axis=1)

    def parameters(self, weights: tf.Tensor, observations: tf.Tensor, noise: tf.Tensor) -> tf.Tensor:
        """Parameters of the distribution, float32 [B, P], with the dropout that the noise decides.

        As Srivastava et al. 2014 in its usual form: features that stay are divided by the share that does.

        Args:
          weights: float32 [size].
          observations: [B, *shape].
          noise: of `draw_training_noise`, float32 [B, K].
        """
        if not self.dropped_size:
            return self.functions["actor"](weights, observations)
        stays = tf.cast(noise[:, self.noise_size :] >= self._dropout, tf.float32)
        return self._thinned(weights, observations, stays / (1.0 - self._dropout))


def of_settings(config: Any, precision: str) -> ActorAlone:
    """Makes the network that a REINFORCE run's settings describe.

    Raises:
      ValueError: the zoo cannot build its torso.
    """
    observation_spec, action_spec = registry.specs(config)
    seeds = seeds_of(config.seed, 2)
    torso = torso_for(config, observation_spec, precision, seeds[0])
    size = distribution_for(action_spec).parameters_size
    head = Head(size, features=torso.output_shape[-1], gain=0.01, seed=seeds[1])
    return ActorAlone(torso, head, action_spec, config.dropout)
