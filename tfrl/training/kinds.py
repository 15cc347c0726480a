"""The learner of a run, by what its algorithm learns from and where that is made. Imports TensorFlow."""

from __future__ import annotations

from tfrl.config.run import RLSettings
from tfrl.run.session import Session
from tfrl.training.episodic import EpisodicLearner
from tfrl.training.learner import EnvLearner, MakeAgent
from tfrl.training.off_policy import OffPolicyLearner
from tfrl.training.on_policy import OnPolicyLearner, PrefetchingLearner
from tfrl.training.phasic import PhasicLearner


def make_learner(config: RLSettings, session: Session, make_agent: MakeAgent) -> EnvLearner:
    """Makes the learner of a run from its settings, its session, and the class of its agent."""
    if hasattr(config, "replay_size"):
        return OffPolicyLearner(config, session, make_agent)
    kinds = {"reinforce": EpisodicLearner, "ppg": PhasicLearner, "impala": PrefetchingLearner}
    kind = kinds.get(config.base, PrefetchingLearner if config.is_ahead else OnPolicyLearner)
    return kind(config, session, make_agent)
