"""Algorithms, one file each, and what collector, learner and trainer ask of any of them.

To add one: a class that follows `Agent`, and a line in `_make_agent` of `tfrl/learner.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from tfrl.actor_critic import ActorCritic
    from tfrl.rollout import Rollout


class Agent(Protocol):
    """A policy that learns, as one worker has it.

    Attributes:
      network: actor and critic; its weights by name are what evaluations, exports and results read.
    """

    network: ActorCritic

    @property
    def num_parameters(self) -> int:
        """How many numbers are trained."""

    @property
    def floats_per_minibatch(self) -> int:
        """What one minibatch sums over all replicas, in one collective: how many float32 numbers."""

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

    def update(self, rollout: Rollout, steps: np.ndarray, learning_rate: float) -> dict[str, float]:
        """Learns from a rollout with normalised rewards; a collective.

        Args:
          rollout: what the envs did.
          steps: int32 [R, E, M, B, T / M]: the time steps of each minibatch.
          learning_rate: of this update.

        Returns:
          The `train/` metrics, the same on every worker.

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
          ValueError: they belong to another network.
        """
