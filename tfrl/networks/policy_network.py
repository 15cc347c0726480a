"""The part of an algorithm's network that plays: what evaluations, videos and exports ask of any of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import keras
import numpy as np
import tensorflow as tf


class PolicyNetwork(Protocol):
    """A network that chooses actions.

    A forward pass comes first, in parts where a CPU computes it, and the rest is told of its outputs.

    Attributes:
      noise_size: K, random numbers of one action.
      has_probabilities: whether each of a few actions has a probability to show.
      models: its parts, actor and critic say, by name, as functional Keras models.
    """

    noise_size: int
    has_probabilities: bool
    models: Mapping[str, keras.Model]

    def draw_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """The numbers that choose one env's actions, float32 [steps, K]."""

    def forward_pass(self, *, on_gpu: bool, at_once: int) -> Callable[[tf.Tensor], Sequence[tf.Tensor]]:
        """Gives the network's outputs, [B, ...] each, of observations [B, *shape]."""

    def sample(self, outputs: Sequence[tf.Tensor], noise: tf.Tensor) -> tf.Tensor:
        """Drawn actions [B, *shape], by noise float32 [B, K]."""

    def greedy(self, outputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """The most likely, or best, actions [B, *shape]."""

    def probabilities(self, outputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """The probability of each action, float32 [B, A]."""

    def exported(self, outputs: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
        """The outputs of the SavedModel, by name."""

    def get_weights(self) -> dict[str, np.ndarray]:
        """All weights as float32 arrays by name."""

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Assigns arrays of `get_weights`. Raises ValueError where they are of another network."""
