"""A trained policy that acts on one device, without a strategy or an optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrl import networks
from tfrl.cli.errors import UserError
from tfrl.config.run import RLSettings
from tfrl.envs import registry
from tfrl.envs.spec import ArraySpec
from tfrl.evaluation.policy_files import PolicySource
from tfrl.networks.network import Network
from tfrl.ops.graph import graph
from tfrl.workers import parts
from tfrl.workers.strategy import resolve_precision, set_up_tensorflow


class Policy:
    """Acts on observations [B, *shape], any B; follows `tfrl.evaluation.episodes.Player`.

    Args:
      network: the network, whose weights may change.
      observation_spec: of what it sees.
      precision: of the torso, "float32" or "bfloat16".
      greedy: take the most likely actions instead of drawn ones.
    """

    def __init__(
        self, network: Network, observation_spec: ArraySpec, precision: str, *, greedy: bool
    ) -> None:
        self.precision = precision
        self.observation_spec = observation_spec
        self.draw_noise = network.draw_noise
        self._network = network
        on_gpu = bool(tf.config.list_logical_devices("GPU"))
        initial = network.initial()
        self._weights = {name: tf.Variable(initial[name], trainable=False) for name in network.acting}
        self._forward = network.forward_pass(on_gpu=on_gpu, at_once=parts.cores())
        choose = self._greedy if greedy else self._drawn
        # Any batch by one trace: a trace takes seconds, and envs that have played all drop out of the batch.
        observations = tf.TensorSpec((None, *observation_spec.shape), observation_spec.dtype)
        noise = tf.TensorSpec((None, network.noise_size), tf.float32)
        self._act = graph(choose, input_signature=[observations, noise])
        self._probabilities = graph(
            lambda o: network.probabilities(self._outputs(o)), input_signature=[observations]
        )

    @property
    def probabilities(self) -> Any:
        """Gives those of each action, float32 [B, A], of observations; None where actions are continuous."""
        return (lambda o: self._probabilities(o).numpy()) if self._network.has_probabilities else None

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Acts by other weights from now on.

        Raises:
          UserError: they are not of this network.
        """
        try:
            vectors = self._network.join(weights)
        except ValueError as error:
            raise UserError(f"{error}, which the settings of this run describe.") from None
        for name, variable in self._weights.items():
            variable.assign(vectors[name])

    def _outputs(self, observations: tf.Tensor) -> Sequence[tf.Tensor]:
        weights = {name: variable.read_value() for name, variable in self._weights.items()}
        return self._forward(weights, observations)

    def _greedy(self, observations: tf.Tensor, noise: tf.Tensor) -> tf.Tensor:
        return self._network.greedy(self._outputs(observations))

    def _drawn(self, observations: tf.Tensor, noise: tf.Tensor) -> tf.Tensor:
        return self._network.sample(self._outputs(observations), noise)

    def act(self, observations: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Actions [B, *shape] of observations [B, *shape], drawn by noise float32 [B, K]."""
        return self._act(observations, noise).numpy()


def load(source: PolicySource, precision: str = "run", *, greedy: bool = False) -> Policy:
    """The policy of found weights.

    Raises:
      UserError: they are not of the network that the settings describe.
    """
    if precision == "run":
        precision = source.config.precision
    policy = _build(source.config, precision, greedy=greedy)
    policy.set_weights(source.weights)
    return policy


def _build(config: RLSettings, precision: str, *, greedy: bool) -> Policy:
    set_up_tensorflow()
    if not tf.config.list_physical_devices("GPU"):
        parts.one_thread_each()
    precision = resolve_precision(precision, small=config.small_network)
    network = networks.of_settings(config, precision)
    return Policy(network, registry.specs(config)[0], precision, greedy=greedy)
