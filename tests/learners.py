"""The trainer's learner without its loop: a session of one process, no folder, no display."""

from tfrl.run.console import Console
from tfrl.run.session import Session
from tfrl.run.stop import StopRequest
from tfrl.training import learner
from tfrl.workers import strategy
from tfrl.workers.watchdog import Watchdog


class Learner(learner.Learner):
    """Counts its updates itself."""

    def __init__(self, config):
        runtime = strategy.make(config, None)
        stop = StopRequest(config.run_dir / "stop")
        watchdog = Watchdog(config.run_dir / "heartbeats", ("here",), 0, stall_timeout=0.0)
        self.session = Session(config, runtime, Console(enabled=False), stop, watchdog, step_name="update")
        super().__init__(config, self.session)

    def learn(self, rollout):
        metrics = super().learn(rollout)
        self.session.step += 1
        return metrics
