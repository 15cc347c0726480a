"""The outer loop: collect, update, log, evaluate, save; and exact resume from what was saved."""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from tfrl.agents import Agent
from tfrl.config.ppo import Config, check_topology, hyperparameters
from tfrl.evaluation.episodes import LEVEL_SETS
from tfrl.networks.export import export
from tfrl.run import results
from tfrl.run.console import Console
from tfrl.run.metrics import PROGRESS_FILE, logged_steps
from tfrl.run.session import Session, open_session
from tfrl.run.stop import Stopped
from tfrl.training import summary
from tfrl.training.learner import Learner
from tfrl.training.periodic import Periodic
from tfrl.workers.membership import join
from tfrl.workers.tf_config import TFConfig


def train(config: Config, cluster: TFConfig | None) -> int:
    """Runs or continues the run that `config` describes; the process's exit code.

    Raises:
      UserError: the settings do not fit this machine or cluster, or the checkpoints cannot be read.
      TrainingError: the run failed: a NaN, say.
    """
    console = Console(enabled=cluster is None or cluster.is_chief)
    names = {"step_name": "update", "saves": "at the end of this update"}
    with join(config, cluster) as (runtime, watchdog):
        check_topology(config, runtime.num_workers, runtime.local_replicas)
        with open_session(config, runtime, watchdog, console, **names) as session:
            followed = cluster is not None and bool(cluster.cluster.get("evaluator"))
            return Trainer(config, session, eval_every=0 if followed else config.eval_every).run()


def columns(agent: Agent) -> tuple[str, ...]:
    """The columns of progress.csv after `env_steps`, in order."""
    rollout = ("episode_return", "episode_length", "normalized_return", "episodes")
    seconds = ("rollout_seconds", "update_seconds", "allreduce_seconds")
    return (
        *(f"rollout/{name}" for name in rollout),
        *agent.metric_names,
        *(f"eval_{s}/{name}" for s in LEVEL_SETS for name in ("return", "normalized_return")),
        "eval/generalization_gap",
        *(f"time/{name}" for name in ("env_steps_per_second", *seconds, "env_wait_fraction")),
    )


@dataclasses.dataclass(frozen=True)
class _Update:
    """What an update leaves to be written; as JSON in the checkpoint of one whose evaluation is not done."""

    metrics: dict[str, float]
    action_counts: list[int]


class Trainer:
    """The loop of one process. All workers go through the same calls in the same order.

    Args:
      config, session: the run's.
      eval_every: updates between evaluations here, 0 where an evaluator follows the run.
    """

    def __init__(self, config: Config, session: Session, *, eval_every: int) -> None:
        self._config = config
        self._eval_every = eval_every
        self._session = session
        self._learner = Learner(config, session)
        self._periodic = Periodic(config, session)
        self._pending: _Update | None = None  # whose evaluation is not done
        self._evaluation: dict[str, float] = {}

    @property
    def _env_steps(self) -> int:
        return self._session.step * self._config.batch_size

    def run(self) -> int:
        """Trains to the end or until told to stop; the exit code."""
        config, session = self._config, self._session
        self._restore()
        if session.step >= config.num_updates and session.is_finished(self._learner.weights()):
            session.console.message(f"{config.run_dir} is complete; more --total-steps would go on with it.")
            return self._leave(0)
        self._begin()
        try:
            self._train()
        except Stopped as stopped:
            self._save()
            self._learner.close()
            return session.end_early(stopped.code, f"{self._env_steps:,} env steps")
        return self._finish()

    def _train(self) -> None:
        """Updates and evaluates to the end. Raises Stopped, with nothing to lose once the state is saved."""
        config, session = self._config, self._session
        if self._pending is not None:  # killed or stopped while it evaluated
            self._conclude(self._pending)
        while session.step < config.num_updates:
            self._conclude(self._update())
        if not self._evaluation:  # an earlier process was stopped where --total-steps now ends
            self._evaluation = self._evaluate()
            session.writer.scalars(self._env_steps, self._evaluation)

    def _update(self) -> _Update:
        """Collects and learns."""
        config, session, began = self._config, self._session, time.perf_counter()
        rollout, metrics = self._learner.update()
        seconds = time.perf_counter() - began
        session.watchdog.measured(seconds)
        session.step, session.seconds = session.step + 1, session.seconds + seconds
        agent = self._learner.agent
        metrics |= session.runtime.communication(session.step, agent.floats_per_sum, agent.sums_per_update)
        metrics |= {
            "time/env_steps_per_second": config.batch_size / seconds,
            "time/rollout_seconds": rollout.seconds,
            "time/update_seconds": seconds - rollout.seconds,
            "time/env_wait_fraction": rollout.env_wait_seconds / rollout.seconds,
        }
        return _Update(metrics, self._learner.action_counts(rollout))

    def _conclude(self, update: _Update) -> None:
        """Evaluates if it is time, and writes what there is of the update, once; then obeys, and saves."""
        config, session, metrics = self._config, self._session, update.metrics
        last = session.step == config.num_updates
        due = last or (self._eval_every and session.step % self._eval_every == 0)
        self._pending = (
            update if due else None
        )  # not of one that a resume with another --eval-every leaves out
        if due:
            # An evaluation takes long, so what it needs is saved first: a kill during it costs nothing else.
            self._save()
            self._evaluation = self._evaluate()
            self._pending = None
            metrics = metrics | self._evaluation
        if config.record_every and session.step % config.record_every == 0:
            self._periodic.record(self._learner.sample, self._env_steps)
        actions = np.repeat(np.arange(len(update.action_counts)), update.action_counts)
        session.writer.histogram("rollout/actions", actions, self._env_steps)
        session.writer.write(self._env_steps, metrics)
        session.console.update(self._env_steps, metrics)
        if not last:  # else what remains takes seconds
            session.obey()
        if session.step % config.checkpoint_every == 0:
            self._save()

    def _evaluate(self) -> dict[str, float]:
        """Returns on training and unseen levels; keeps the weights if they are the best so far.

        Raises Stopped where it is broken off; a resume does the whole evaluation.
        """
        metrics = self._periodic.evaluate(self._learner.sample, self._env_steps)
        self._periodic.keep_best(self._learner.weights(), metrics["eval_test/return"], self._env_steps)
        return metrics

    # Beginning, checkpoints, end

    def _restore(self) -> None:
        session = self._session
        found = session.restore()
        if found is None:
            return
        self._learner.set_state(found.learner, found.parts)
        # An evaluation that was pending then has been done if the row that it belongs to is there.
        logged = logged_steps(self._config.run_dir / PROGRESS_FILE) if session.runtime.is_chief else 0
        done = session.runtime.any_says(logged >= found.env_steps)
        pending = session.progress["pending"]
        # The last one is done once more, in place of what it wrote: results.json needs all it finds.
        if pending is not None and (not done or session.step >= self._config.num_updates):
            self._pending = _Update(**pending)

    def _begin(self) -> None:
        """Opens the run's folder, and tells what is about to be trained."""
        config, session = self._config, self._session
        logged = logged_steps(config.run_dir / PROGRESS_FILE)
        session.open_folder(columns(self._learner.agent), again=self._pending is not None)
        if session.found is None:
            precision = session.runtime.precision
            session.writer.layout(*hyperparameters(dataclasses.replace(config, precision=precision)))
        parameters = self._learner.agent.num_parameters
        session.console.summary(summary.rows(config, session.runtime, parameters, session.found, logged))
        session.console.start(config.num_updates * config.batch_size, self._env_steps)

    def _save(self) -> None:
        if not self._session.is_saved:
            state, part = self._learner.get_state()
            pending = None if self._pending is None else dataclasses.asdict(self._pending)
            self._session.save(self._env_steps, state, part, {"pending": pending})

    def _finish(self) -> int:
        """Exports, and writes and shows the results."""
        config, session, collector = self._config, self._session, self._learner.collector
        with session.finishing():
            if session.runtime.is_chief:
                weights = self._learner.weights()
                outcome = self._results() | session.provenance(weights)
                export(
                    config.run_dir / "export",
                    config,
                    weights,
                    observation_shape=collector.observation_shape,
                    num_actions=collector.num_actions,
                    precision=session.runtime.precision,
                )
                results.write(config.run_dir, outcome)
        if session.runtime.is_chief:
            session.console.results(*results.table(outcome), [summary.tensorboard(config)])
        return self._leave(0)

    def _results(self) -> dict[str, object]:
        """What is the algorithm's own in results.json."""
        config, session, episodes = self._config, self._session, self._learner.episode_metrics()
        return {
            "env": config.env,
            "seed": config.seed,
            "env_steps": self._env_steps,
            "updates": session.step,
            "seconds": session.seconds,
            "env_steps_per_second": self._env_steps / session.seconds,
            "episode_return": episodes["rollout/episode_return"],
            "normalized_return": episodes["rollout/normalized_return"],
            "eval": results.evaluation(self._evaluation, config.eval_episodes),
        }

    def _leave(self, code: int) -> int:
        self._learner.close()
        return self._session.leave(code)
