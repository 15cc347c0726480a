"""The trainer's learner without its loop: a session of one process, no folder, no display."""

from tfrl.agents.ppo import PPOAgent
from tfrl.run.console import Console
from tfrl.run.session import Session
from tfrl.run.stop import StopRequest
from tfrl.training import trainer
from tfrl.training.on_policy import OnPolicyLearner
from tfrl.workers import strategy
from tfrl.workers.watchdog import Watchdog


class Learner(OnPolicyLearner):
    """Counts its updates itself, also those that a test takes in two parts, and keeps the last rollout."""

    def __init__(self, config):
        runtime = strategy.make(config, None)
        stop = StopRequest(config.run_dir / "stop")
        watchdog = Watchdog(config.run_dir / "heartbeats", ("here",), 0, stall_timeout=0.0)
        self.session = Session(config, runtime, Console(enabled=False), stop, watchdog, step_name="update")
        super().__init__(config, self.session, PPOAgent)

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


def train(config):
    """Trains with PPO as the command does, in this process; the exit code."""
    return trainer.train(config, None, lambda c, session: OnPolicyLearner(c, session, PPOAgent))
