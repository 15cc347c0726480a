"""Learners without the outer loop: a session of one process, no folder, no display. Imports TensorFlow."""

import importlib

from tfrl.run.console import Console
from tfrl.run.session import Session
from tfrl.run.stop import StopRequest
from tfrl.training import trainer
from tfrl.training.on_policy import OnPolicyLearner
from tfrl.workers import strategy
from tfrl.workers.watchdog import Watchdog

_AGENTS = {"ppo": "PPOAgent", "drac": "DrACAgent", "ppg": "PPGAgent", "impala": "ImpalaAgent"}
_AGENTS |= {name: f"{name.upper()}Agent" for name in ("dqn", "ddpg", "td3", "sac")}


class Stepwise(OnPolicyLearner):
    """Counts its updates itself, also those that a test takes in two parts, and keeps the last rollout."""

    def collect(self):
        self.rollout = super().collect()
        return self.rollout

    def learn(self, rollout):
        metrics = super().learn(rollout)
        self.session.step += 1
        return metrics

    def update(self):
        done = super().update()
        self.session.step -= 1  # counted there, too
        return done


def make(config, kind=OnPolicyLearner):
    """The learner of these settings, with its session as `session`."""
    runtime = strategy.make(config, None)
    stop = StopRequest(config.run_dir / "stop")
    watchdog = Watchdog(config.run_dir / "heartbeats", ("here",), 0, stall_timeout=0.0)
    session = Session(config, runtime, Console(enabled=False), stop, watchdog, step_name="update")
    learner = kind(config, session, _agent_class(config.algorithm))
    learner.session = session
    return learner


def updated(learner, updates):
    """The metrics of some updates, without times, and the weights after them."""
    history = []
    for _ in range(updates):
        metrics = learner.update().metrics
        history.append({k: v for k, v in metrics.items() if not k.startswith("time/")})
    return history, {name: weight.copy() for name, weight in learner.weights().items()}


def train(config, kind=OnPolicyLearner):
    """Trains as the algorithm's command does, in this process; the exit code."""
    agent = _agent_class(config.algorithm)
    return trainer.train(config, None, lambda c, session: kind(c, session, agent))


def _agent_class(algorithm):
    return getattr(importlib.import_module(f"tfrl.agents.{algorithm}"), _AGENTS[algorithm])
