"""Chooses the learner of a run by its algorithm and its settings. Imports TensorFlow."""

from __future__ import annotations

from tfrl.algorithms import impala, ppg, reinforce
from tfrl.algorithms.actor_critic import RolloutSettings
from tfrl.algorithms.replay import ReplaySettings
from tfrl.run.session import Session
from tfrl.training.episodic import EpisodicLearner
from tfrl.training.learner import EnvLearner, MakeAgent
from tfrl.training.off_policy import OffPolicyLearner
from tfrl.training.on_policy import OnPolicyLearner, PrefetchingLearner
from tfrl.training.phasic import PhasicLearner


def make_learner(
    config: ReplaySettings | RolloutSettings | reinforce.Config, session: Session, make_agent: MakeAgent
) -> EnvLearner:
    """Makes the learner of a run from its settings, its session, and the class of its agent."""
    if isinstance(config, ReplaySettings):
        return OffPolicyLearner(config, session, make_agent)
    if isinstance(config, reinforce.Config):
        return EpisodicLearner(config, session, make_agent)
    if isinstance(config, ppg.Config):
        return PhasicLearner(config, session, make_agent)
    if isinstance(config, impala.Config) or config.is_ahead:
        return PrefetchingLearner(config, session, make_agent)
    return OnPolicyLearner(config, session, make_agent)
