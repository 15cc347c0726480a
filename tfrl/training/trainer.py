"""The loop of every algorithm: update, evaluate, call the callbacks, save; and exact resume."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfrl import config as settings
from tfrl.config.run import RLSettings
from tfrl.envs.published import normalized_return
from tfrl.evaluation.episodes import GAP, evaluation_columns, evaluation_results
from tfrl.experience.memory import Memory
from tfrl.networks.weights import export
from tfrl.run import results
from tfrl.run.callbacks import Callback, get_states, set_states
from tfrl.run.console import Console
from tfrl.run.metrics import PROGRESS_FILE, logged_steps
from tfrl.run.session import Session, open_session
from tfrl.run.stop import Stopped
from tfrl.training import callbacks as own_callbacks
from tfrl.training import command, summary
from tfrl.training.episodic import EpisodicLearner
from tfrl.training.learner import Learner, MakeAgent, Update
from tfrl.training.off_policy import OffPolicyLearner
from tfrl.training.on_policy import OnPolicyLearner, PrefetchingLearner
from tfrl.training.phasic import PhasicLearner
from tfrl.workers.membership import join
from tfrl.workers.tf_config import TFConfig

MakeLearner = Callable[[Any, Session], Learner]


def train(
    config: RLSettings,
    cluster: TFConfig | None,
    make_learner: MakeLearner,
    callbacks: Sequence[Callback] = (),
) -> int:
    """Runs or continues the run that `config` describes; the process's exit code.

    Args:
      config: checked settings.
      cluster: what TF_CONFIG says; None for a single process.
      make_learner: makes the algorithm's learner from the settings and the session.
      callbacks: the user's, the same on all workers; called after the product's own.

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
                return Run(config, session, learner, callbacks, followed=followed).run()


def make_learner(config: RLSettings, session: Session, make_agent: MakeAgent) -> Learner:
    """Makes the learner of a run by what its algorithm learns from, and where that is made."""
    if hasattr(config, "replay_size"):
        return OffPolicyLearner(config, session, make_agent)
    kinds = {"reinforce": EpisodicLearner, "ppg": PhasicLearner, "impala": PrefetchingLearner}
    kind = kinds.get(config.algorithm, PrefetchingLearner if config.is_ahead else OnPolicyLearner)
    return kind(config, session, make_agent)


class Run:
    """One run in one process, and its loop. All workers go through the same calls in the same order.

    Callbacks see it as `tfrl.run.callbacks.RunOfCallback`.

    Args:
      config, session: the run's.
      learner: the algorithm's.
      callbacks: the user's.
      followed: an evaluator follows the run, so that this process evaluates at the end only.

    Attributes:
      config, folder: the settings; the run's folder.
      metrics: of the last update, by name; empty before the first one in this process.
      evaluation: metrics of the last evaluation in this process.
    """

    def __init__(
        self,
        config: RLSettings,
        session: Session,
        learner: Learner,
        callbacks: Sequence[Callback] = (),
        *,
        followed: bool,
    ) -> None:
        self.config, self.folder = config, config.run_dir
        self.metrics: dict[str, float] = {}
        self.evaluation: dict[str, float] = {}
        self._session, self._learner, self._followed = session, learner, followed
        self._evaluator = own_callbacks.Evaluation(config, session)
        self._waits = own_callbacks.Waits()
        self._users = callbacks
        self._callbacks = [*own_callbacks.of_run(config, session), self._waits, *callbacks]
        self._unsaved = 0  # updates, and parts of them, since the last checkpoint or this process began
        self._pending: Update | None = None  # whose evaluation is not done
        self._steps_before = 0  # env steps before the last update
        self._evaluated_at = -1  # env steps
        self._stopped: str | None = None  # why a callback has stopped the run

    # For callbacks

    @property
    def updates(self) -> int:
        """Finished updates."""
        return self._session.step

    @property
    def env_steps(self) -> int:
        """Env steps of all finished updates, all workers together."""
        return self._learner.env_steps

    @property
    def seconds(self) -> float:
        """Seconds of training, in all processes of the run."""
        return self._session.seconds

    def weights(self) -> dict[str, np.ndarray]:
        """The agent's weights by name, float32."""
        return self._learner.weights()

    def act(self, observations: np.ndarray, noise: np.ndarray, *memory: np.ndarray) -> Any:
        """Actions [B, *shape] of observations [B, *shape], by noise float32 [B, K].

        A recurrent policy takes its memory [B, M], and gives a pair: the actions, and states [B, S].
        """
        return self._learner.act(observations, noise, *memory)

    def memory(self, envs: int) -> Memory | None:
        """The memory of so many envs, if the policy is recurrent."""
        return self._learner.memory(envs)

    def draw_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """The noise of one env, float32 [steps, K]."""
        return self._learner.draw_noise(generator, steps)

    def stop(self, why: str) -> None:
        """Ends the run after the present update, on all workers though one alone may have called this."""
        self._stopped = self._stopped or why

    # The loop

    def run(self) -> int:
        """Trains to the end or until told to stop; the exit code."""
        session, learner = self._session, self._learner
        logged = logged_steps(self.folder / PROGRESS_FILE)
        self._restore(logged)
        if self._is_over and session.is_finished(self.weights()):
            episodes = learner.episode_metrics()["rollout/episodes"]
            ended = command.complete_sentence(self.config, self.env_steps, episodes, self._stopped)
            session.console.message(ended)
            return session.leave(0)
        self._begin(logged)
        try:
            if self._pending is not None:  # killed or stopped while it evaluated
                self._conclude(self._pending)
            while not self._is_over:
                session.raise_if_stopped()
                self._steps_before = self.env_steps
                update = learner.update()
                if update is None:  # there is more of it
                    self._note_part()
                else:
                    self._conclude(update)
            if self._stopped is not None:
                self._save()
            if self._evaluated_at != self.env_steps:  # stopped by a callback, or where --total-steps now ends
                self.metrics = {}
                self._evaluate()
                session.writer.scalars(self.env_steps, self.evaluation)
        except Stopped as stopped:
            self._save()
            return session.end_early(stopped.code, self._place)
        return self._finish()

    def _conclude(self, update: Update) -> None:
        """Evaluates if it is time, calls the callbacks, writes the metrics, and saves if it is time."""
        config, session = self.config, self._session
        self.metrics = update.metrics
        since = session.step - 1, self._steps_before
        due = not self._followed and config.evaluates_at(session.step, self.env_steps, since=since)
        # A pending evaluation is left out where the run goes on with another --eval-every.
        self._pending = update if due or self._is_over else None
        if self._pending is not None:
            # An evaluation takes long, so what it needs is saved first: a kill during it costs nothing else.
            self._save()
            self._evaluate()
            self.metrics = update.metrics | self.evaluation
            self._pending = None
        for callback in self._callbacks:
            callback.on_update(self, self.metrics)
        if self._users and session.runtime.any_worker(self._stopped is not None):
            self._stopped = self._stopped or "a callback of another worker asked for it"
            session.changed()  # the checkpoint before the evaluation does not know of it
        for name, actions in self._learner.action_histograms(update.action_counts).items():
            session.writer.histogram(f"rollout/actions{name}", actions, self.env_steps)
        session.writer.write(self.env_steps, self.metrics)
        session.console.update(self.env_steps, self.metrics)
        self._unsaved += 1
        if session.step % config.checkpoint_every == 0 or self._unsaved >= config.checkpoint_every:
            self._save()

    def _evaluate(self) -> None:
        """Plays all level sets. Raises Stopped where it is broken off; a resume does the whole evaluation."""
        self.evaluation = self._evaluator.evaluate(self._learner, self.env_steps)
        self._evaluated_at = self.env_steps
        for callback in self._callbacks:
            callback.on_evaluation(self, self.evaluation)

    def _note_part(self) -> None:
        """Saves as often among the parts of an update as among updates: they may take as long."""
        self._session.changed()
        self._session.console.taken(self._steps_taken)
        self._unsaved += 1
        if self._unsaved >= self.config.checkpoint_every:
            self._save()

    @property
    def _is_over(self) -> bool:
        """True, on all workers, between two updates of which there is to be no further one."""
        return self._learner.is_over or (self._stopped is not None and not self._learner.steps_within)

    @property
    def _steps_taken(self) -> int:
        """Env steps so far, also those of the update that is under way."""
        return self.env_steps + self._learner.steps_within

    @property
    def _place(self) -> str:
        """The place of the run with its env steps, for people."""
        return f"{self._steps_taken:,} env steps ({self._learner.place})"

    # Checkpoints

    def _save(self) -> None:
        self._unsaved = 0
        if self._session.is_saved:
            return
        state, part = self._learner.get_state()
        progress = {
            "pending": None if self._pending is None else dataclasses.asdict(self._pending),
            "steps_before": self._steps_before,
            "stopped": self._stopped,
        }
        state |= get_states(self._users)
        self._session.save(self._steps_taken, state, part, progress, self._learner.shards())

    def _restore(self, logged: int) -> None:
        """Goes on from the newest checkpoint, or begins; `logged` is where progress.csv ends."""
        session = self._session
        found = session.restore()
        if found is None:
            self._learner.begin()
            return
        command.check_length(self.config, found.env_steps)
        self._learner.set_state(found.learner, found.parts, found.shards)
        set_states(self._users, found.learner)
        self._steps_before = session.progress["steps_before"]
        self._stopped = session.progress["stopped"] if self._users else None  # else the user wants more
        # An evaluation that was pending then has been done if the row that it belongs to is there.
        done = session.runtime.any_worker(session.runtime.is_chief and logged >= found.env_steps)
        pending = session.progress["pending"]
        # The last one is done once more, in place of what it wrote: results.json needs all it finds. So is
        # one whose update the callbacks of this checkpoint have not seen.
        if pending is not None and (not done or self._is_over or self._users):
            self._pending = Update(**pending)

    # Beginning and end

    def _begin(self, logged: int) -> None:
        """Opens the run's folder, and tells what is about to be trained."""
        config, session, learner = self.config, self._session, self._learner
        columns = (
            *learner.episode_metrics(),
            *learner.agent.metric_names,
            *evaluation_columns(config.level_sets),
            *learner.columns,
        )
        within = 0 if session.found is None else session.found.env_steps - self.env_steps
        session.open_folder(columns, again=within + (self._pending is not None))
        if session.found is None:
            curves = list(columns)
            if normalized_return(config.env, config.distribution_mode, 0.0) is None:  # no published range
                curves = [c for c in columns if c != GAP and not c.endswith("/normalized_return")]
            resolved = dataclasses.replace(config, precision=session.runtime.precision)
            session.writer.layout(*settings.hyperparameters(resolved), learner.agent.charts, curves)
        session.console.summary(summary.rows(config, session, learner.agent, logged, self._place))
        for note in config.notes if session.runtime.is_chief and session.found is None else ():
            session.console.warn(note)
        session.console.start(config.run_steps, learner.position, work=learner.work)
        session.console.taken(self._steps_taken)
        for callback in self._callbacks:
            callback.on_start(self)

    def _finish(self) -> int:
        """Exports, and writes and shows the results."""
        config, session, weights = self.config, self._session, self.weights()
        self._learner.finish()
        with session.finishing():
            outcome = self._results() | session.provenance(weights)
            if session.runtime.is_chief:
                export(self.folder / "export", config, weights, precision=session.runtime.precision)
                results.write(self.folder, outcome)
        for callback in self._callbacks:
            callback.on_end(self, outcome)
        tell = session.console.message
        if waits := self._waits.means():
            learner, actors = (f"{share:.0%}" for share in waits.values())
            tell(f"The learner waited {learner} of the time, and the actors {actors}.")
        if outcome["solved"]:
            tell(
                f"Solved after {self.env_steps:,} env steps: the mean return of the last 100 episodes, "
                f"{outcome['episode_return']:.2f}, has reached the threshold of {config.solved_at:g}."
            )
        elif config.max_episodes is not None and outcome["episodes"] >= config.max_episodes:
            tell(
                f"Ended after {self.env_steps:,} env steps: {outcome['episodes']:,} training episodes "
                f"have reached --max-episodes {config.max_episodes:,}."
            )
        elif self._stopped is not None:
            tell(f"Ended after {self.env_steps:,} env steps: {self._stopped}.")
        session.console.results(*results.table(outcome), summary.next_commands(config))
        return session.leave(0)

    def _results(self) -> dict[str, Any]:
        """The entries of results.json that tell how the run was trained and what it came to."""
        config, session, episodes = self.config, self._session, self._learner.episode_metrics()
        found = {
            "algorithm": config.algorithm,
            "env": config.env,
            "seed": config.seed,
            "env_steps": self.env_steps,
            "updates": session.step,
            "seconds": session.seconds,
            "env_steps_per_second": self.env_steps / session.seconds,
            "episodes": int(episodes["rollout/episodes"]),
            "episode_return": episodes["rollout/episode_return"],
            "normalized_return": episodes["rollout/normalized_return"],
            "solved": self._learner.is_solved,
            "solved_at": config.solved_at,
            "eval": evaluation_results(config, self.evaluation),
            "started_from": session.started_from,
        }
        found |= {n: getattr(config, n) for n in ("actors", "lag", "observers") if hasattr(config, n)}
        if hasattr(config, "learners"):
            found["learners"] = session.runtime.num_workers
        if self._stopped is not None:
            found["stopped"] = self._stopped
        return found | self._waits.means() | self._learner.agent.results
