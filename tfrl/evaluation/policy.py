"""A trained policy that acts on one device, without a strategy or an optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from tfrl import networks
from tfrl.cli.errors import UserError
from tfrl.cli.settings import Precision
from tfrl.envs import registry
from tfrl.envs.spec import ArraySpec
from tfrl.evaluation.policy_files import PolicySource
from tfrl.experience import memory
from tfrl.experience.memory import Memory
from tfrl.networks.network import Network
from tfrl.ops.graph import graph
from tfrl.workers import parts
from tfrl.workers.strategy import resolve_precision, set_up_tensorflow


class Policy:
    """Acts on observations [B, *shape], for any B; implements `tfrl.evaluation.episodes.Player`.

    Args:
      network: the network; `set_weights` gives it weights.
      observation_spec: of the observations.
      precision: of the torso, "float32" or "bfloat16".
      greedy: take the most likely actions instead of drawing them.
      memory: makes the memory of a number of envs, if the network is recurrent.
    """

    def __init__(
        self,
        network: Network,
        observation_spec: ArraySpec,
        precision: str,
        *,
        greedy: bool,
        memory: Callable[[int], Memory | None] = lambda envs: None,
    ) -> None:
        self.precision = precision
        self.memory = memory
        self.observation_spec = observation_spec
        self.draw_noise = network.draw_noise
        self._network = network
        on_gpu = bool(tf.config.list_logical_devices("GPU"))
        initial = network.initial()
        self._weights = {name: tf.Variable(initial[name], trainable=False) for name in network.acting}
        self._forward = network.forward_pass(on_gpu=on_gpu, at_once=parts.cores())
        self._choose = (lambda outputs, noise: network.greedy(outputs)) if greedy else network.sample
        # One trace for all batch sizes: a trace takes seconds, and the batch shrinks as envs finish.
        observations = tf.TensorSpec((None, *observation_spec.shape), observation_spec.dtype)
        noise = tf.TensorSpec((None, network.noise_size), tf.float32)
        one = memory(1)
        remembered = [] if one is None else [tf.TensorSpec((None, one.values.shape[1]), tf.float32)]
        self._act = graph(self._chosen, input_signature=[observations, noise, *remembered])
        self._shows_probabilities = network.has_probabilities and one is None
        self._probabilities = graph(
            lambda o: network.probabilities(self._outputs(o)), input_signature=[observations]
        )

    @property
    def probabilities(self) -> Any:
        """A function from observations to the probabilities of all actions, float32 [B, A].

        None for continuous actions and recurrent policies.
        """
        return (lambda o: self._probabilities(o).numpy()) if self._shows_probabilities else None

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Acts with these weights from now on. Raises UserError if they belong to another network."""
        try:
            vectors = self._network.join(weights)
        except ValueError as error:
            raise UserError(f"{error}, so they do not fit the settings of this run.") from None
        for name, variable in self._weights.items():
            variable.assign(vectors[name])

    def _outputs(self, *rows: tf.Tensor) -> Sequence[tf.Tensor]:
        weights = {name: variable.read_value() for name, variable in self._weights.items()}
        return self._forward(weights, *rows)

    def _chosen(self, observations: tf.Tensor, noise: tf.Tensor, *memory: tf.Tensor) -> tuple[tf.Tensor, ...]:
        outputs = self._outputs(observations, *memory)
        return self._choose(outputs, noise), *(outputs[-1:] if memory else ())

    def act(self, observations: np.ndarray, noise: np.ndarray, *memory: np.ndarray) -> Any:
        """Actions [B, *shape] for observations [B, *shape] and noise float32 [B, K].

        A recurrent policy also takes its memory [B, M], and returns a pair: actions, and states [B, S].
        """
        chosen = tuple(x.numpy() for x in self._act(observations, noise, *memory))
        return chosen if memory else chosen[0]


def load(
    source: PolicySource, precision: Precision | Literal["run"] = "run", *, greedy: bool = False
) -> Policy:
    """Makes a policy from the weights and settings of a run.

    Raises UserError if the settings describe another network than the weights belong to.
    """
    set_up_tensorflow()
    if not tf.config.list_physical_devices("GPU"):
        parts.one_thread_each()
    config = source.config
    wanted = config.precision if precision == "run" else precision
    resolved = resolve_precision(wanted, small=config.small_network)
    network = networks.of_settings(config, resolved)
    remembered = functools.partial(memory.of_settings, config)
    policy = Policy(network, registry.specs(config)[0], resolved, greedy=greedy, memory=remembered)
    policy.set_weights(source.weights)
    return policy
