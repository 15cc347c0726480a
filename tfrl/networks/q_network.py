"""DQN's network: the values of all actions, from a torso of the zoo and a head, or two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfrl.envs import registry
from tfrl.networks.network import Head, Network, seeds_of, torso_for
from tfrl.ops import q_learning
from tfrl.workers.data_parallel import Weights


class Dueling(keras.layers.Layer):
    """Values of actions from the value of an observation and the advantage of each (`q_learning.dueling`)."""

    def call(self, value: tf.Tensor, advantages: tf.Tensor) -> tf.Tensor:
        """Values float32 [B, A] of float32 [B, 1] and [B, A]."""
        return q_learning.dueling(value[:, 0], advantages)


class QNetwork(Network):
    """Q(o, a) of A actions.

    Args:
      model: values float32 [B, A] of observations [B, *shape].
      epsilon: the share of random actions among those that are drawn and not greedy.
    """

    noise_size = 2
    has_probabilities = True

    def __init__(self, model: keras.Model, *, epsilon: float) -> None:
        self.num_actions = model.output_shape[-1]
        super().__init__({"q": model}, acting=["q"], signature=[tf.TensorSpec([self.num_actions])])
        self._epsilon = epsilon

    def outputs(self, weights: Weights, observations: tf.Tensor) -> Sequence[tf.Tensor]:
        """Values of all actions, [float32 [B, A]], of observations [B, *shape]."""
        return [self.functions["q"](weights["q"], observations)]

    def draw_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """Uniform numbers in [0, 1), float32 [steps, 2]: whether to act at random, and how."""
        return generator.random((steps, 2), np.float32)

    def sample(
        self, outputs: Sequence[tf.Tensor], noise: tf.Tensor, epsilon: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Actions int32 [B]: random ones with probability epsilon, the best ones otherwise."""
        epsilon = self._epsilon if epsilon is None else epsilon
        at_random = tf.cast(noise[:, 1] * self.num_actions, tf.int32)
        # Of float32 below 1 the largest may round up.
        at_random = tf.minimum(at_random, self.num_actions - 1)
        return tf.where(noise[:, 0] < epsilon, at_random, self.greedy(outputs))

    def greedy(self, outputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """The best actions, int32 [B]."""
        return tf.argmax(outputs[0], axis=-1, output_type=tf.int32)

    def act(self, outputs: np.ndarray, noise: np.ndarray, epsilon: float | None = None) -> np.ndarray:
        """The actions of `sample`, from outputs float32 [B, A], in NumPy."""
        epsilon = np.float32(self._epsilon if epsilon is None else epsilon)
        at_random = np.minimum((noise[:, 1] * self.num_actions).astype(np.int32), self.num_actions - 1)
        return np.where(noise[:, 0] < epsilon, at_random, self.act_greedily(outputs))

    def act_greedily(self, outputs: np.ndarray) -> np.ndarray:
        """The actions of `greedy`, from outputs float32 [B, A], in NumPy."""
        return outputs.argmax(axis=1).astype(np.int32)

    def probabilities(self, outputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """The probability of each action when drawn, float32 [B, A]."""
        best = tf.one_hot(self.greedy(outputs), self.num_actions)
        return (1.0 - self._epsilon) * best + self._epsilon / self.num_actions

    def exported(self, outputs: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
        """The best `action`, and the `q` of all."""
        return {"action": self.greedy(outputs), "q": outputs[0]}


def of_settings(config: Any, precision: str) -> QNetwork:
    """Makes the network that a DQN run's settings describe.

    Raises:
      ValueError: the zoo cannot build its torso.
    """
    observation_spec, action_spec = registry.specs(config)
    seeds = seeds_of(config.seed, 3)
    torso = torso_for(config, observation_spec, precision, seeds[0])
    features = torso.output_shape[-1]
    q = Head(action_spec.n, features=features, gain=1.0, seed=seeds[1])(torso.output)
    if config.dueling:
        value = Head(1, features=features, gain=1.0, seed=seeds[2], name="value")(torso.output)
        q = Dueling(name="dueling", dtype="float32")(value, q)
    return QNetwork(keras.Model(torso.input, q, name="q"), epsilon=config.exploration_end)
