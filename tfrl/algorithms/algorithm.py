"""The agent protocol: all that collectors, learners and trainers ask of an algorithm.

To add one: a file here with a class that follows `Agent`, its settings in `tfrl/config/`, and its command.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from tfrl.experience.collector import ActingPolicy
from tfrl.experience.rollout import Rollout


class Agent(Protocol):
    """A policy that learns, as one worker has it: what all learners ask of it."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metrics of its updates, in the order of progress.csv: `train/NAME`."""

    @property
    def num_parameters(self) -> int:
        """The number of trained parameters."""

    @property
    def allreduce_floats(self) -> int:
        """The number of float32 values that one gradient step sums over all replicas."""

    @property
    def steps_per_update(self) -> int:
        """Gradient steps of an update, each with one such sum."""

    @property
    def summary(self) -> dict[str, str]:
        """Descriptions of an update, by title: rows of the table that is printed before training."""

    @property
    def results(self) -> dict[str, object]:
        """The entries of results.json that are this algorithm's alone, by name, as JSON values."""

    def begin(self) -> None:
        """Takes the weights that a new run is to start from, where the settings name some."""

    def begin_with(self, state: Mapping[str, np.ndarray]) -> None:
        """Takes the weights among arrays of another run's `get_state`, and of the rest what is there.

        Raises:
          ValueError, KeyError: they belong to another network.
        """

    def draw_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """The random numbers of one env's actions in T steps, float32 [T, noise_size]."""

    def sample(self, observations: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Drawn actions [B, *shape] of observations [B, *shape], by noise [B, noise_size]; any B."""

    def greedy(self, observations: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """The most likely actions; takes `noise` to stand in for `sample`, and ignores it."""

    def get_weights(self) -> dict[str, np.ndarray]:
        """The weights of all networks by name: what evaluations, exports and results read."""

    def get_state(self) -> dict[str, np.ndarray]:
        """All that decides its future, as arrays by name, the same on every worker and on any topology.

        The weights are there as `weights/NAME`, where those who read checkpoints look for them.
        """

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from arrays of `get_state`, also on another number of replicas; further ones are ignored.

        Raises:
          ValueError, KeyError: they belong to another network.
        """


class RolloutAgent(Agent, ActingPolicy, Protocol):
    """An agent that learns from each rollout as it comes."""

    def update(
        self, rollout: Rollout, number: int, on_step: Callable[[int], None] = lambda done: None
    ) -> dict[str, float]:
        """Learns from a rollout; a collective.

        Args:
          rollout: what the envs did, with normalised rewards; its buffers are used again.
          number: the updates before this one: what is random keys by it, and a schedule reads it.
          on_step: called now and then with the number of gradient steps done.

        Returns:
          The metrics of `metric_names`, the same on every worker.

        Raises:
          TrainingError: a loss or gradient is not finite, on all workers alike.
        """

    def set_observation_scaling(self, mean: np.ndarray, scale: np.ndarray) -> None:
        """Standardises observations by float32 [D] each from now on."""
