"""The agent protocol: the interface of an algorithm for collectors, learners and trainers.

CONTRIBUTING.md says how to add an algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from tfrl.experience.collector import ActingPolicy
from tfrl.experience.rollout import Rollout


class Agent(Protocol):
    """A policy that learns, on one worker; the interface for all learners."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names of the metrics of an update, such as `train/NAME`, in the order of progress.csv."""

    @property
    def num_parameters(self) -> int:
        """The number of trained parameters."""

    @property
    def steps_per_update(self) -> int:
        """The number of gradient steps of an update; each has one all-reduce."""

    @property
    def summary(self) -> dict[str, str]:
        """Descriptions of an update by title, for the table that is printed before training."""

    @property
    def results(self) -> dict[str, object]:
        """The entries of results.json that only this algorithm has: JSON values by name."""

    def begin(self) -> None:
        """Loads the initial weights of a new run, if the settings name any."""

    def begin_with(self, state: Mapping[str, np.ndarray]) -> None:
        """Loads the weights, and if possible more, from the arrays of another run's `get_state`.

        Raises:
          ValueError, KeyError: they belong to another network.
        """

    def draw_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """The random numbers for T actions of one env, float32 [T, noise_size]."""

    def sample(self, observations: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Actions [B, *shape] for observations [B, *shape], drawn by noise [B, noise_size], for any B."""

    def greedy(self, observations: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """The most likely actions. It has the arguments of `sample`, but ignores `noise`."""

    def get_weights(self) -> dict[str, np.ndarray]:
        """The weights of all networks by name, for evaluations, exports and results."""

    def get_state(self) -> dict[str, np.ndarray]:
        """The whole state as arrays by name, equal on every worker and on any topology.

        The weights have the names `weights/NAME`, as readers of checkpoints expect.
        """

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Restores the arrays of `get_state`, also for another number of replicas, and ignores other arrays.

        Raises:
          ValueError, KeyError: they belong to another network.
        """


class RolloutAgent(Agent, ActingPolicy, Protocol):
    """An agent that learns from each rollout in one update."""

    def update(
        self, rollout: Rollout, number: int, on_step: Callable[[int], None] = lambda done: None
    ) -> dict[str, float]:
        """Learns from a rollout; a collective.

        Args:
          rollout: the steps of the envs, with normalised rewards. Its buffers are reused after the call.
          number: the number of earlier updates, which keys random numbers and decides schedules.
          on_step: called at intervals with the number of finished gradient steps.

        Returns:
          The metrics of `metric_names`, equal on every worker.

        Raises:
          TrainingError: a loss or gradient is not finite; raised on all workers.
        """

    def set_observation_scaling(self, mean: np.ndarray, scale: np.ndarray) -> None:
        """Sets the mean and deviation of observations, float32 [D] each, for standardising them."""
