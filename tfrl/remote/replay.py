"""Replay in processes of their own: each holds that of some envs, and gives its share of every batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfrl.envs import registry
from tfrl.experience.actor import Collected, EnvStates
from tfrl.experience.replay import Batch, Replay
from tfrl.remote.cluster import end_with_parent, leave_stopping_to_driver, ray
from tfrl.run import rng


class ReplayServer:
    """The replay of some of the global envs, those of one actor say; `serve` makes one on Ray.

    A server's share of a batch depends on its envs alone, so all shares together, by `join`, are the batch
    of a single replay of all envs, whatever the number of servers.

    Args:
      config: the settings of an algorithm with replay.
      indices: the global indices of its envs.
    """

    def __init__(self, config: Any, indices: Sequence[int]) -> None:
        end_with_parent()
        leave_stopping_to_driver()
        self._seed, self._indices = config.seed, list(indices)
        observation, action = registry.specs(config.env)
        self._replay = Replay(
            self._indices,
            config.replay_size // config.num_envs,
            observation=observation,
            action=action,
            gamma=config.gamma,
            n_step=config.n_step,
            priority_exponent=config.priority_exponent if config.prioritized_replay else None,
        )

    def begin(self, at: EnvStates) -> None:
        """Takes where the envs stand before the first round."""
        self._replay.stand_at(at.observations, at.first)

    def add(self, collected: Collected) -> int:
        """Takes a round of its envs, as an `EnvActor` gives it; the transitions of each env that it holds."""
        for actions, step in collected.rollout.steps():
            self._replay.act(actions)
            self._replay.show(step)
        return len(self._replay)

    def least_share(self) -> float:
        """The least chance of a row to be drawn for its env; that of all servers scales the weights."""
        return self._replay.least_share()

    def sample(
        self, number: int, batches: int, rows_each: int, beta: float = 1.0, least: float | None = None
    ) -> Batch:
        """Its share of K batches [K, B, b, ...]: the gradient steps so far, `number`, decide the rows.

        With prioritised replay, `least` is the least `least_share` of all servers.
        """
        generators = [rng.generator(self._seed, rng.Use.REPLAY, number, i) for i in self._indices]
        return self._replay.sample(generators, batches, rows_each, beta=beta, least=least)

    def set_priorities(self, rows: np.ndarray, errors: np.ndarray) -> None:
        """Gives rows of its share of a batch the priorities of their errors, [K, B, b] each."""
        self._replay.set_priorities(rows, errors)


def join(shares: Sequence[Batch]) -> Batch:
    """The batch of all envs, of the servers' shares in the order of their envs."""
    return Batch(*(np.concatenate(arrays, axis=1) for arrays in zip(*shares, strict=True)))


def serve(config: Any, indices: Sequence[int]) -> Any:
    """Starts a `ReplayServer` on Ray, without a CPU of its own; the handle of it."""
    return ray.remote(num_cpus=0)(ReplayServer).remote(config, indices)
