"""Policies with their own copy of the weights: those of actors, and those of finished runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from tfrl.algorithms.acting import ActingActorCritic
from tfrl.algorithms.exploring import ExploringNetwork
from tfrl.cli.errors import UserError
from tfrl.cli.settings import Precision
from tfrl.config.run import RLSettings
from tfrl.experience import memory
from tfrl.experience.collector import Collected, Collector, Versioned
from tfrl.experience.levels import LevelSampler
from tfrl.experience.memory import Memory
from tfrl.experience.replay import BufferSettings
from tfrl.networks.weights import PolicySource
from tfrl.ops.graph import graph, tf
from tfrl.workers import machine
from tfrl.workers.strategy import resolve_precision, set_up_tensorflow


class Behavior:
    """A network on one device with its own copy of the weights, for actors and the policies of finished runs.

    Args:
      config: the run's settings.
      precision: the precision of the torso, float32 or bfloat16.
      at_once: parts of a forward pass that CPUs compute at the same time.

    Attributes:
      acting: chooses the actions.
    """

    def __init__(self, config: RLSettings, precision: str, *, at_once: int) -> None:
        gpus = tf.config.list_logical_devices("GPU")
        self._config = config
        self._device = "/gpu:0" if gpus else "/cpu:0"
        with tf.device(self._device):
            network = config.make_network(precision)
            initial = network.initial()
            self._variables = {name: tf.Variable(initial[name], trainable=False) for name in network.acting}
        kind = ExploringNetwork if isinstance(config, BufferSettings) else ActingActorCritic
        self.acting: ActingActorCritic | ExploringNetwork = kind(
            network, config, self._read, on_gpu=bool(gpus), at_once=at_once
        )

    def _read(self) -> dict[str, tf.Tensor]:
        return {name: variable.read_value() for name, variable in self._variables.items()}

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Acts with these weights, float32 by name, from now on. Raises UserError for another network's."""
        try:
            vectors = self.acting.network.join(weights)
        except ValueError as error:
            raise UserError(f"{error}, so they do not fit the settings of this run.") from None
        for name, variable in self._variables.items():
            variable.assign(vectors[name])
        self.acting.forget_weights()


class RolloutActor(Behavior):
    """Collects rollouts. Each depends only on its number, the weights and the rollout before it.

    Args:
      collector: the envs.
      config, precision, at_once: those of `Behavior`.
    """

    def __init__(self, config: RLSettings, collector: Collector, precision: str, *, at_once: int) -> None:
        super().__init__(config, precision, at_once=at_once)
        self.collector = collector
        self._levels = LevelSampler.of(config)
        self._ended: float | None = None  # the end time of the last rollout

    def collect(
        self, number: int, weights: Versioned, on_step: Callable[[int], None] = lambda t: None
    ) -> Collected:
        """Collects rollout `number` with `weights`; `on_step` gets the number of finished steps."""
        began = time.perf_counter()
        idle = 0.0 if self._ended is None else began - self._ended
        self.set_weights(weights.weights)
        indices, levels = self.collector.indices, None
        noise = self.acting.draw(number, indices)
        if self._levels is not None:
            levels = self._levels.draw(number, indices, self._config.steps_per_env, weights.probabilities)
        with tf.device(self._device):
            rollout = self.collector.collect(self.acting, noise, on_step, levels)
        rollout.idle_seconds, rollout.version = idle, float(weights.version)
        after = self.collector.get_state()
        self._ended = time.perf_counter()
        return Collected(rollout, after)


class SavedPolicy(Behavior):
    """Acts with the weights of a run, for any number of envs; an `ActingPolicy` (tfrl.experience.episodes).

    Args:
      source: the weights and settings.
      precision: of the torso; "run": that of the run.
      greedy: take the most likely actions instead of drawing them.

    Attributes:
      greedy: the same; it may change.
      precision: the same, "float32" or "bfloat16".
      probabilities: a function from observations to the probabilities of all actions, float32 [B, A]; None
        for continuous actions and recurrent policies.

    Raises UserError if the settings describe another network than the weights belong to.
    """

    def __init__(
        self, source: PolicySource, precision: Precision | Literal["run"] = "run", *, greedy: bool = False
    ) -> None:
        set_up_tensorflow()
        if not machine.gpus():
            machine.one_thread_each()
        config = source.config
        wanted = config.precision if precision == "run" else precision
        self.precision = resolve_precision(wanted, small=config.small_network)
        machine.note_float16(self.precision)
        super().__init__(config, self.precision, at_once=machine.threads())
        self.draw_noise = self.acting.network.draw_noise
        self.greedy = greedy
        self.probabilities: Callable[[np.ndarray], np.ndarray] | None = None
        if self.acting.network.has_probabilities and self.memory(1) is None:
            of_rows = graph(lambda o: self.acting.network.probabilities(self.acting.outputs(o)))
            self.probabilities = lambda observations: of_rows(tf.convert_to_tensor(observations)).numpy()
        self.set_weights(source.weights)

    def memory(self, envs: int) -> Memory | None:
        """Makes the memory of this number of envs; None if the network is not recurrent."""
        return memory.of_settings(self._config, envs)

    def act(self, observations: np.ndarray, noise: np.ndarray, *memory: np.ndarray) -> Any:
        """Actions [B, *shape] for observations [B, *shape] and noise float32 [B, K].

        A recurrent policy also takes its memory [B, M], and returns a pair: actions, and states [B, S].
        """
        with tf.device(self._device):
            return self.acting.act(observations, None if self.greedy else noise, *memory)
