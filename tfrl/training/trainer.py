"""The outer loop of every algorithm: update, evaluate, log, save; and exact resume from what was saved."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tfrl import config as settings
from tfrl.algorithms.algorithm import Agent
from tfrl.envs.published import normalized_return
from tfrl.evaluation.levels import GAP, evaluation_columns, evaluation_results
from tfrl.networks.weights import export
from tfrl.run import results
from tfrl.run.console import Console
from tfrl.run.metrics import PROGRESS_FILE, logged_steps
from tfrl.run.pieces import Piece
from tfrl.run.session import Session, open_session
from tfrl.run.stop import Stopped
from tfrl.training import finished, summary
from tfrl.training.periodic import Periodic
from tfrl.workers.membership import join
from tfrl.workers.tf_config import TFConfig

WAITS = ("time/learner_wait_fraction", "time/actor_wait_fraction")
"""The metrics that say how learner and actors, side by side, waited for each other."""


@dataclass(frozen=True)
class Update:
    """The results of an update that are to be written; JSON in the checkpoint of one not yet evaluated."""

    metrics: dict[str, float]
    action_counts: list[int]


class Learner(Protocol):
    """The learner protocol: experience, an agent that learns from it, and their state, for the outer loop.

    Attributes:
      agent: the agent.
      columns: the metrics of `update` in the order of progress.csv.
    """

    agent: Agent
    columns: tuple[str, ...]

    def begin(self) -> None:
        """Gives a new run the weights that it starts from; one that goes on has its own."""

    def update(self) -> Update | None:
        """Takes `steps_per_update` env steps and learns; counts `session.step` and seconds. A collective.

        None where there is more to learn before the step counts, and the run may be saved or stopped first:
        the next call goes on.
        """

    def act(self, observations: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Actions of an evaluation [B, *shape] of observations [B, *shape], by noise [B, K]."""

    def draw_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """The noise of one evaluation env, float32 [steps, K]."""

    def weights(self) -> dict[str, np.ndarray]:
        """The agent's weights by name."""

    @property
    def env_steps(self) -> int:
        """Env steps of all finished updates, all workers together."""

    def episode_metrics(self) -> dict[str, float]:
        """The `rollout/` metrics of episodes by name, in the order of progress.csv."""

    @property
    def steps_within(self) -> int:
        """Env steps of the update that is under way, all workers together; 0 between two updates."""

    @property
    def place(self) -> str:
        """The place of the run, for people: "update 4", or within which one."""

    @property
    def position(self) -> float:
        """The env steps to show as done; within an update that takes long, how much of it is done."""

    def work(self, env_steps: float) -> float:
        """The time that a run of so many env steps takes, in any unit: the time left goes by it."""

    @property
    def is_over(self) -> bool:
        """True between two updates, the same on all workers, where no further one is to come."""

    @property
    def is_solved(self) -> bool:
        """True, the same on all workers, where the last 100 episodes have come to --solved-at."""

    def action_histograms(self, counts: Sequence[int]) -> dict[str, np.ndarray]:
        """The values to draw for an update's `action_counts`, by the end of the chart's name."""

    def get_state(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The arrays of a checkpoint: those that are the same on all workers, and this worker's own."""

    def pieces(self) -> Sequence[Piece]:
        """The parts of this worker's state that are written once, for this checkpoint and later ones."""

    def set_state(
        self,
        state: Mapping[str, np.ndarray],
        parts: Sequence[Mapping[str, np.ndarray]],
        pieces: Sequence[Piece] = (),
    ) -> None:
        """Continues from what `get_state` and `pieces` gave on all workers, be they more or fewer now."""

    def finish(self) -> None:
        """Removes, when the run is over, the files of its own that only older checkpoints need."""

    def close(self) -> None:
        """Stops what it has started."""


MakeLearner = Callable[[Any, Session], Learner]


def train(config: Any, cluster: TFConfig | None, make_learner: MakeLearner) -> int:
    """Runs or continues the run that `config` describes; the process's exit code.

    Args:
      config: checked settings.
      cluster: what TF_CONFIG says; None for a single process.
      make_learner: makes the algorithm's learner from the settings and the session.

    Raises:
      UserError: the settings do not fit this machine or cluster, or the checkpoints cannot be read.
      TrainingError: the run failed: a NaN, say.
    """
    console = Console(enabled=cluster is None or cluster.is_chief)
    names = {"step_name": "update", "saves": "at the end of this update"}
    with join(config, cluster) as (runtime, watchdog):
        config.check_topology(runtime.num_workers, runtime.local_replicas)
        with open_session(config, runtime, watchdog, console, **names) as session:
            followed = cluster is not None and cluster.evaluator is not None
            with contextlib.closing(make_learner(config, session)) as learner:
                return Trainer(config, session, learner, followed=followed).run()


class Trainer:
    """The loop of one process. All workers go through the same calls in the same order.

    Args:
      config, session: the run's.
      learner: the algorithm.
      followed: an evaluator follows the run, so that this process evaluates at the end only.
    """

    def __init__(self, config: Any, session: Session, learner: Learner, *, followed: bool) -> None:
        self._config = config
        self._followed = followed
        self._session = session
        self._learner = learner
        self._periodic = Periodic(config, session)
        self._unsaved = 0  # updates, and parts of them, since the last checkpoint or this process began
        self._pending: Update | None = None  # whose evaluation is not done
        self._steps_before = 0  # env steps before the last update
        self._evaluation: dict[str, float] = {}
        self._waits: dict[str, list[float]] = {}  # of this process's updates, where actors run beside it

    @property
    def _env_steps(self) -> int:
        return self._learner.env_steps

    @property
    def _episodes(self) -> float:
        return self._learner.episode_metrics()["rollout/episodes"]

    @property
    def _steps_taken(self) -> int:
        """Env steps so far, also those of the update that is under way."""
        return self._env_steps + self._learner.steps_within

    @property
    def _place(self) -> str:
        """The place of the run with its env steps, for people."""
        return f"{self._steps_taken:,} env steps ({self._learner.place})"

    @property
    def _columns(self) -> tuple[str, ...]:
        """The columns of progress.csv after `env_steps`, in order."""
        return (
            *self._learner.episode_metrics(),
            *self._learner.agent.metric_names,
            *evaluation_columns(self._config.level_sets),
            *self._learner.columns,
        )

    @property
    def _curves(self) -> list[str]:
        """The columns that this env fills: normalised scores and their gap need published ranges."""
        if normalized_return(self._config.env, self._config.distribution_mode, 0.0) is not None:
            return list(self._columns)
        return [name for name in self._columns if name != GAP and not name.endswith("/normalized_return")]

    def run(self) -> int:
        """Trains to the end or until told to stop; the exit code."""
        config, session = self._config, self._session
        self._restore()
        if self._learner.is_over and session.is_finished(self._learner.weights()):
            session.console.message(finished.sentence(config, self._env_steps, self._episodes))
            return session.leave(0)
        self._begin()
        try:
            self._train()
        except Stopped as stopped:
            self._save()
            return session.end_early(stopped.code, self._place)
        return self._finish()

    def _train(self) -> None:
        """Updates and evaluates to the end. Raises Stopped, with nothing to lose once the state is saved."""
        session = self._session
        if self._pending is not None:  # killed or stopped while it evaluated
            self._conclude(self._pending)
        while not self._learner.is_over:
            session.raise_if_stopped()
            self._steps_before = self._env_steps
            update = self._learner.update()
            if update is None:
                self._note_part()
            else:
                self._conclude(update)
        if not self._evaluation:  # an earlier process was stopped where --total-steps now ends
            self._evaluation = self._evaluate()
            session.writer.scalars(self._env_steps, self._evaluation)
            self._periodic.tell(self._env_steps, self._evaluation)

    def _note_part(self) -> None:
        """Saves as often among the parts of an update as among updates: they may take as long."""
        self._session.changed()
        self._session.console.taken(self._steps_taken)
        self._unsaved += 1
        if self._unsaved >= self._config.checkpoint_every:
            self._save()

    def _conclude(self, update: Update) -> None:
        """Evaluates if it is time, and writes what there is of the update, once; then saves if it is time."""
        config, session, metrics = self._config, self._session, update.metrics
        for name in WAITS:
            if name in metrics:
                self._waits.setdefault(name.removeprefix("time/"), []).append(metrics[name])
        last = self._learner.is_over
        since = session.step - 1, self._steps_before
        due = last or (not self._followed and config.evaluates_at(session.step, self._env_steps, since=since))
        # Not one whose evaluation a resume with another --eval-every leaves out.
        self._pending = update if due else None
        if due:
            # An evaluation takes long, so what it needs is saved first: a kill during it costs nothing else.
            self._save()
            self._evaluation = self._evaluate()
            self._pending = None
            metrics = metrics | self._evaluation
            self._periodic.tell(self._env_steps, metrics)
        if config.record_every and session.step % config.record_every == 0:
            self._periodic.record(self._learner, self._env_steps)
        for name, actions in self._learner.action_histograms(update.action_counts).items():
            session.writer.histogram(f"rollout/actions{name}", actions, self._env_steps)
        session.writer.write(self._env_steps, metrics)
        session.console.update(self._env_steps, metrics)
        self._unsaved += 1
        if session.step % config.checkpoint_every == 0 or self._unsaved >= config.checkpoint_every:
            self._save()

    def _evaluate(self) -> dict[str, float]:
        """Returns on all level sets; keeps the weights if they are the best so far.

        Raises Stopped where it is broken off; a resume does the whole evaluation.
        """
        metrics = self._periodic.evaluate(self._learner, self._env_steps)
        self._periodic.keep_best(self._learner.weights(), metrics["eval_test/return"], self._env_steps)
        return metrics

    # Beginning, checkpoints, end

    def _restore(self) -> None:
        session = self._session
        found = session.restore()
        if found is None:
            self._learner.begin()
            return
        finished.check_length(self._config, found.env_steps)
        self._learner.set_state(found.learner, found.parts, found.pieces)
        # An evaluation that was pending then has been done if the row that it belongs to is there.
        logged = logged_steps(self._config.run_dir / PROGRESS_FILE) if session.runtime.is_chief else 0
        done = session.runtime.any_worker(logged >= found.env_steps)
        pending = session.progress["pending"]
        self._steps_before = session.progress.get("steps_before", 0)
        # The last one is done once more, in place of what it wrote: results.json needs all it finds.
        if pending is not None and (not done or self._learner.is_over):
            self._pending = Update(**pending)

    def _begin(self) -> None:
        """Opens the run's folder, and tells what is about to be trained."""
        config, session = self._config, self._session
        logged = logged_steps(config.run_dir / PROGRESS_FILE)
        within = 0 if session.found is None else session.found.env_steps - self._env_steps
        session.open_folder(self._columns, again=within + (self._pending is not None))
        agent = self._learner.agent
        if session.found is None:
            resolved = dataclasses.replace(config, precision=session.runtime.precision)
            session.writer.layout(*settings.hyperparameters(resolved), agent.charts, self._curves)
        session.console.summary(summary.rows(config, session, agent, logged, self._place))
        for note in config.notes if session.runtime.is_chief and session.found is None else ():
            session.console.warn(note)
        learner = self._learner
        session.console.start(config.run_steps, learner.position, work=learner.work)
        session.console.taken(self._steps_taken)

    def _save(self) -> None:
        self._unsaved = 0
        if not self._session.is_saved:
            state, part = self._learner.get_state()
            pending = None if self._pending is None else dataclasses.asdict(self._pending)
            pieces = self._learner.pieces()
            progress = {"pending": pending, "steps_before": self._steps_before}
            self._session.save(self._steps_taken, state, part, progress, pieces)

    def _finish(self) -> int:
        """Exports, and writes and shows the results."""
        config, session = self._config, self._session
        self._learner.finish()
        with session.finishing():
            if session.runtime.is_chief:
                weights = self._learner.weights()
                outcome = self._results() | session.provenance(weights)
                export(config.run_dir / "export", config, weights, precision=session.runtime.precision)
                results.write(config.run_dir, outcome)
                self._periodic.draw_curve()
        if session.runtime.is_chief:
            if self._waits:
                learner, actors = (f"{outcome[name]:.0%}" for name in self._waits)
                session.console.message(f"The learner waited {learner} of the time, and the actors {actors}.")
            if outcome["solved"]:
                session.console.message(
                    f"Solved after {self._env_steps:,} env steps: the mean return of the last 100 episodes, "
                    f"{outcome['episode_return']:.2f}, has reached the threshold of {config.solved_at:g}."
                )
            elif config.max_episodes is not None and outcome["episodes"] >= config.max_episodes:
                session.console.message(
                    f"Ended after {self._env_steps:,} env steps: {outcome['episodes']:,} training episodes "
                    f"have reached --max-episodes {config.max_episodes:,}."
                )
            session.console.results(*results.table(outcome), summary.next_commands(config))
        return session.leave(0)

    def _results(self) -> dict[str, object]:
        """What is the algorithm's own in results.json."""
        config, session, episodes = self._config, self._session, self._learner.episode_metrics()
        return {
            "algorithm": config.algorithm,
            "env": config.env,
            "seed": config.seed,
            "env_steps": self._env_steps,
            "updates": session.step,
            "seconds": session.seconds,
            "env_steps_per_second": self._env_steps / session.seconds,
            "episodes": int(episodes["rollout/episodes"]),
            "episode_return": episodes["rollout/episode_return"],
            "normalized_return": episodes["rollout/normalized_return"],
            "solved": self._learner.is_solved,
            "solved_at": config.solved_at,
            "eval": evaluation_results(config, self._evaluation),
            "started_from": session.started_from,
            **{
                name: getattr(config, name)
                for name in ("actors", "lag", "observers")
                if hasattr(config, name)
            },
            **({"learners": session.runtime.num_workers} if hasattr(config, "learners") else {}),
            **{name: float(np.mean(shares)) for name, shares in self._waits.items()},
            **self._learner.agent.results,
        }
