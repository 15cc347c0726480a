"""Learners of algorithms that learn from rollouts, without the outer loop: no folder, no display."""

import importlib

from tfrl.run.console import Console
from tfrl.run.session import Session
from tfrl.run.stop import StopRequest
from tfrl.training import on_policy
from tfrl.workers import strategy
from tfrl.workers.watchdog import Watchdog

_AGENTS = {"ppo": "ppo:PPOAgent", "drac": "drac:DrACAgent", "ppg": "ppg:PPGAgent"}


def make(config, kind=on_policy.OnPolicyLearner):
    """The learner of these settings, with its session as `session`."""
    runtime = strategy.make(config, None)
    stop = StopRequest(config.run_dir / "stop")
    watchdog = Watchdog(config.run_dir / "heartbeats", ("here",), 0, stall_timeout=0.0)
    session = Session(config, runtime, Console(enabled=False), stop, watchdog, step_name="update")
    module, _, name = _AGENTS[config.algorithm].partition(":")
    agent = getattr(importlib.import_module(f"tfrl.agents.{module}"), name)
    learner = kind(config, session, agent)
    learner.session = session
    return learner


def updated(learner, updates):
    """The metrics of some updates, without times, and the weights after them."""
    history = []
    for _ in range(updates):
        metrics = learner.update().metrics
        history.append({k: v for k, v in metrics.items() if not k.startswith("time/")})
    return history, {name: weight.copy() for name, weight in learner.weights().items()}
