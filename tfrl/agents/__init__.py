"""Algorithms, one file each, and what collector, learner and trainer ask of any of them.

To add one: a class that follows `Agent`, and a line in `_make_agent` of `tfrl/training/learner.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from tfrl.experience.rollout import Rollout
    from tfrl.networks.actor_critic import ActorCritic


class Agent(Protocol):
    """A policy that learns, as one worker has it.

    Attributes:
      network: actor and critic; its weights by name are what evaluations, exports and results read.
      metric_names: what `update` gives, in the order of progress.csv: `train/NAME`.
    """

    network: ActorCritic
    metric_names: tuple[str, ...]

    @property
    def num_parameters(self) -> int:
        """How many numbers are trained."""

    @property
    def floats_per_sum(self) -> int:
        """How many float32 numbers are summed over all replicas at a time, with every gradient step."""

    @property
    def sums_per_update(self) -> int:
        """How many such sums an update has."""

    def act(
        self, observations: np.ndarray, uniforms: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Actions of the training envs, of half of them at a time.

        Args:
          observations: uint8 [R, B, H, W, C], B envs for each of this worker's R replicas.
          uniforms: float32 [R, B] in [0, 1): all randomness there is.

        Returns:
          Actions int32, their log-probabilities float32 and state values float32, each [R, B].
        """

    def sample(self, observations: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
        """Actions int32 [B] of observations uint8 [B, H, W, C], by uniforms float32 [B]; any B."""

    def update(self, rollout: Rollout, number: int) -> dict[str, float]:
        """Learns from a rollout; a collective.

        Args:
          rollout: what the envs did, with normalised rewards; its buffers are used again.
          number: the updates before this one: what is random keys by it, and a schedule reads it.

        Returns:
          The metrics of `metric_names`, the same on every worker.

        Raises:
          TrainingError: a loss or gradient is not finite, on all workers alike.
        """

    def get_state(self) -> dict[str, np.ndarray]:
        """All that decides its future, as arrays by name, the same on every worker and on any topology.

        The network's weights are there as `weights/NAME`, where those who read checkpoints look for them.
        """

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from arrays of `get_state`, also on another number of replicas; further ones are ignored.

        Raises:
          ValueError, KeyError: they belong to another network.
        """
