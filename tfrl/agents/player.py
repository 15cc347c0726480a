"""The part of algorithms with replay that acts: one network, by whichever vector of weights it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrl.config.network import activations
from tfrl.networks import array_policy
from tfrl.networks.functional import FunctionalNetworks
from tfrl.ops.graph import graph


class Player:
    """Acts by a vector of weights; in NumPy where few envs meet a small network.

    Args:
      config: the settings of an algorithm with replay.
      network: its networks, whose `player` acts.
      read: gives the player's weights, float32 [size].
      on_gpu: whether a GPU computes.
      at_once: parts of a forward pass that CPUs compute at the same time.

    Attributes:
      in_arrays: whether NumPy may act: the settings and the device decide it.
    """

    def __init__(
        self,
        config: Any,
        network: FunctionalNetworks,
        read: Callable[[], tf.Tensor],
        *,
        on_gpu: bool,
        at_once: int,
    ) -> None:
        self._config, self._network, self._read = config, network, read
        self._forward = network.player_pass(on_gpu=on_gpu, at_once=at_once)
        # For a few envs a call of TensorFlow takes longer than the arithmetic of a small network.
        one_head = not getattr(config, "dueling", False)
        known = array_policy.ACTIVATIONS.keys() >= {*activations(config)}
        fits = config.torso == "mlp" and known and one_head
        self.in_arrays = fits and network.functions[network.player].in_float32 and not on_gpu
        self._array_pass: Callable[[np.ndarray], np.ndarray] | None = None

    def forget(self) -> None:
        """Takes note that the weights change."""
        self._array_pass = None

    def act(
        self, observations: np.ndarray, noise: np.ndarray, exploration: Sequence[np.float32]
    ) -> np.ndarray:
        """Exploring actions [B, *shape] of observations [B, *shape], by noise and `config.exploration`."""
        if self.in_arrays and self._config.num_envs <= array_policy.MOST_ENVS:
            return self._network.act(self._arrays()(observations), noise, *exploration)
        return self._sample(*map(tf.convert_to_tensor, (observations, noise, *exploration))).numpy()

    def sample(self, observations: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Drawn actions [B, *shape] of observations [B, *shape], by noise [B, K], on one device."""
        if self.in_arrays:
            return self._network.act(self._arrays()(observations), noise)
        return self._sample(*map(tf.convert_to_tensor, (observations, noise))).numpy()

    @graph(reduce_retracing=True)
    def _sample(self, observations: tf.Tensor, noise: tf.Tensor, *exploration: tf.Tensor) -> tf.Tensor:
        return self._network.sample(self._outputs(observations), noise, *exploration)

    def greedy(self, observations: np.ndarray) -> np.ndarray:
        """The best actions [B, *shape] of observations [B, *shape]."""
        if self.in_arrays:
            return self._network.act_greedily(self._arrays()(observations))
        return self._greedy(tf.convert_to_tensor(observations)).numpy()

    @graph(reduce_retracing=True)
    def _greedy(self, observations: tf.Tensor) -> tf.Tensor:
        return self._network.greedy(self._outputs(observations))

    def _arrays(self) -> Callable[[np.ndarray], np.ndarray]:
        """The forward pass in NumPy by the weights of now."""
        if self._array_pass is None:
            self._array_pass = self._network.array_pass(self._read().numpy(), activations(self._config))
        return self._array_pass

    def _outputs(self, observations: tf.Tensor) -> Sequence[tf.Tensor]:
        return self._forward(self._read(), observations)
