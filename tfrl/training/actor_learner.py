"""Algorithms that learn from each rollout as it comes, and whose envs are stepped while they learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfrl.experience.rollout import Rollout
from tfrl.run.pieces import Piece
from tfrl.run.session import Session
from tfrl.training.ahead import COLUMNS, Ahead, AheadCollector, make_ahead_collector
from tfrl.training.episodic import EpisodicLearner
from tfrl.training.learner import LearnerBase, MakeAgent
from tfrl.training.off_policy import OffPolicyLearner
from tfrl.training.on_policy import OnPolicyLearner, make_collector
from tfrl.training.phasic import PhasicLearner


class ActorLearner(OnPolicyLearner):
    """Learns from rollouts that are `lag` updates behind; follows `tfrl.training.trainer.Learner`.

    Args:
      config: the settings, with the sections Ahead and Actors.
      session: this process's part of the run.
      make_agent: makes the agent from the settings and the runtime.
    """

    columns = (*OnPolicyLearner.columns, *COLUMNS)
    collector: AheadCollector

    def __init__(self, config: Any, session: Session, make_agent: MakeAgent) -> None:
        super().__init__(config, session, make_agent)
        self._ahead = Ahead(config, self.collector)

    def _make_collector(self) -> AheadCollector:
        config, runtime = self._config, self._runtime
        make = {"replicas": runtime.local_replicas, "make": lambda: make_collector(config, runtime)}
        return make_ahead_collector(config, self._session, **make)

    def collect(self) -> Rollout:
        """The rollout of this update, with normalised rewards; the actors go on by the weights of now."""
        self._session.phase("collecting")
        rollout = self._ahead.take(self._session.step, self.agent.get_weights())
        self._take_in_rewards(rollout)
        return rollout

    def _shares(self, rollout: Rollout, seconds: float) -> dict[str, float]:
        """How learner and actors, side by side, spent an update that took the learner `seconds`."""
        times = {"time/update_seconds": seconds - self._ahead.waited}
        return times | self._ahead.metrics(self._session.step, rollout, seconds)

    # State

    def get_state(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The arrays that are the same on all workers, older weights among them, and this worker's envs."""
        state, part = super().get_state()
        return state | self._ahead.get_state(self._session.step), part

    def set_state(
        self,
        state: Mapping[str, np.ndarray],
        parts: Sequence[Mapping[str, np.ndarray]],
        pieces: Sequence[Piece] = (),
    ) -> None:
        """Continues from what `get_state` gave. Raises UserError as `OnPolicyLearner`'s does."""
        super().set_state(state, parts, pieces)
        self._ahead.set_state(state)


def make_learner(config: Any, session: Session, make_agent: MakeAgent) -> LearnerBase:
    """Makes the learner of a run: whatever its algorithm learns from, made here, ahead, or on Ray."""
    if hasattr(config, "replay_size"):
        return OffPolicyLearner(config, session, make_agent)
    kinds = {"reinforce": EpisodicLearner, "ppg": PhasicLearner, "impala": ActorLearner}
    kind = kinds.get(config.algorithm, ActorLearner if config.is_ahead else OnPolicyLearner)
    return kind(config, session, make_agent)
