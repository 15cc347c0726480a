"""A trained policy that acts on one device, without a strategy or an optimizer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from tfrl.cli.errors import UserError
from tfrl.config.ppo import Config
from tfrl.envs.registry import family
from tfrl.evaluation.policy_files import PolicySource
from tfrl.networks import actor_critic
from tfrl.workers import parts
from tfrl.workers.strategy import resolve_precision, set_up_tensorflow


class Policy:
    """Acts on observations uint8 [B, H, W, C], any B.

    Args:
      network: actor and critic, whose weights may change.
      observation_shape: (H, W, C).
      precision: of the torso, "float32" or "bfloat16".
    """

    def __init__(
        self, network: actor_critic.ActorCritic, observation_shape: tuple[int, ...], precision: str
    ) -> None:
        self.precision = precision
        self.observation_shape = observation_shape
        self._network = network
        on_gpu = bool(tf.config.list_logical_devices("GPU"))
        self._forward = network.forward_pass(on_gpu=on_gpu, at_once=parts.cores())
        # Any batch by one trace: a trace takes seconds, and envs that have played all drop out of the batch.
        observations = tf.TensorSpec((None, *observation_shape), tf.uint8)
        uniforms = tf.TensorSpec((None,), tf.float32)
        self._sample = tf.function(self._choose_by, input_signature=[observations, uniforms])
        self._logits = tf.function(lambda o: self._forward(o)[0], input_signature=[observations])

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Acts by other weights from now on.

        Raises:
          UserError: they are not of this network.
        """
        try:
            self._network.set_weights(weights)
        except ValueError as error:
            raise UserError(f"{error}, which the settings of this run describe.") from None

    def _choose_by(self, observations: tf.Tensor, uniforms: tf.Tensor) -> tf.Tensor:
        return self._network.distribution(self._forward(observations)[0]).sample(uniforms)

    def sample(self, observations: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
        """Actions int32 [B], drawn by uniforms float32 [B] in [0, 1)."""
        return self._sample(observations, uniforms).numpy()

    def greedy(self, observations: np.ndarray, uniforms: np.ndarray | None = None) -> np.ndarray:
        """The most likely actions, int32 [B]; takes `uniforms` to stand in for `sample`, and ignores them."""
        return self._network.distribution(self._logits(observations)).mode().numpy()

    def probabilities(self, observations: np.ndarray) -> np.ndarray:
        """Of each action, float32 [B, A]."""
        return tf.nn.softmax(self._logits(observations)).numpy()


def load(source: PolicySource, precision: str = "run") -> Policy:
    """The policy of found weights.

    Raises:
      UserError: they are not of the network that the settings describe.
    """
    if precision == "run":
        precision = source.config.precision
    policy = _build(source.config, precision)
    policy.set_weights(source.weights)
    return policy


def untrained(config: Config) -> Policy:
    """The policy that a run of these settings starts from: close to uniform."""
    return _build(config, config.precision)


def _build(config: Config, precision: str) -> Policy:
    set_up_tensorflow()
    if not tf.config.list_physical_devices("GPU"):
        parts.one_thread_each()
    precision = resolve_precision(precision)
    game = family(config.env)
    network = actor_critic.build(
        torso=config.torso,
        torso_options=config.torso_options,
        observation_shape=game.observation_shape,
        num_actions=game.num_actions,
        share_torso=config.share_torso,
        precision=precision,
        seed=config.seed,
    )
    return Policy(network, game.observation_shape, precision)
