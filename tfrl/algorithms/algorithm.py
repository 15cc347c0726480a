"""The common part of all algorithms: a network that acts, learns and is saved.

CONTRIBUTING.md says how to add an algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tfrl.algorithms.acting import ActingNetwork
from tfrl.cli.errors import TrainingError
from tfrl.config.run import RLSettings
from tfrl.networks.weights import AGENT_PREFIX, PREFIX, weights_of
from tfrl.run.checkpoint import under, with_prefix
from tfrl.workers.data_parallel import DataParallel
from tfrl.workers.strategy import Runtime

if TYPE_CHECKING:
    from tfrl.networks.network import Network


class Agent:
    """A policy that learns, on one worker. A subclass makes `learning` and `acting`, and learns.

    Args:
      config: the settings.
      runtime: the strategy and this worker's place in it.

    Attributes:
      settings: the dataclass of its settings.
      defaults: settings that win over the presets, for an algorithm that shares the dataclass of another one.
      env: the env of a command line that names none.
      metric_names: the names of the metrics of an update, such as `train/NAME`, in the order of progress.csv.
      network: the network.
      learning: its weights and gradient steps.
      acting: chooses actions on one device, with the weights of `learning`.
    """

    settings: ClassVar[type[RLSettings]]
    defaults: ClassVar[Mapping[str, Any]] = {}
    env: ClassVar[str] = "CartPole-v1"
    metric_names: tuple[str, ...]
    network: Network
    learning: DataParallel
    acting: ActingNetwork

    def __init__(self, config: RLSettings, runtime: Runtime) -> None:
        self._config = config
        self._runtime = runtime
        with runtime.strategy.scope():
            self.network = config.make_network(runtime.precision)

    @property
    def num_parameters(self) -> int:
        """The number of trained parameters; a learned vector that belongs to no network counts as one."""
        functions = self.network.functions
        return sum(functions[n].num_parameters if n in functions else 1 for n in self.learning.learned)

    @property
    def summary(self) -> dict[str, str]:
        """Descriptions of an update by title, for the table that is printed before training."""
        raise NotImplementedError

    @property
    def results(self) -> dict[str, object]:
        """The entries of results.json that only this algorithm has: JSON values by name."""
        return {}

    # State

    def begin(self) -> None:
        """Loads the initial weights of a new run, if the settings name any."""

    def begin_with(self, state: Mapping[str, np.ndarray]) -> None:
        """Loads the weights, and if possible more, from the arrays of another run's `get_state`.

        Raises:
          ValueError, KeyError: they belong to another network.
        """
        self.set_state({**self.get_state(), **state})

    def get_weights(self) -> dict[str, np.ndarray]:
        """The weights of all networks by name, for evaluations, exports and results."""
        return self.network.split(self.learning.vectors())

    def get_state(self) -> dict[str, np.ndarray]:
        """The whole state as arrays by name, equal on every worker and on any topology.

        Weights are `weights/NETWORK/LAYER/NAME`, as readers of checkpoints expect.
        """
        state, functions = self.learning.get_state(), self.network.functions
        weights = self.network.split({name: state[name] for name in functions})
        others = {name: array for name, array in state.items() if name not in functions}
        return with_prefix(PREFIX, weights) | with_prefix(AGENT_PREFIX, others)

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Restores the arrays of `get_state`, also for another number of replicas, and ignores other arrays.

        Raises:
          ValueError, KeyError: they belong to another network.
        """
        self.learning.set_state({**under(AGENT_PREFIX, state), **self.network.join(weights_of(state))})
        self.acting.forget_weights()


def check_finite(values: Iterable[tuple[str, float]], where: str = "") -> None:
    """Raises TrainingError if a value is infinite or NaN; `where` is the end of its sentence."""
    for name, value in values:
        if not math.isfinite(value):
            raise TrainingError(f"{name} is not a finite number{where}")
