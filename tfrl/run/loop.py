"""The loop of every run: update, evaluate, call the callbacks, save; and exact resume."""

from __future__ import annotations

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfrl.cli.settings import Settings
from tfrl.run import results
from tfrl.run.callbacks import Callback, get_states, set_states
from tfrl.run.checkpoint import CheckpointShard
from tfrl.run.console import Console
from tfrl.run.metrics import PROGRESS_FILE, MetricsWriter, NullMetricsWriter, logged_steps
from tfrl.run.session import Session, open_session
from tfrl.run.stop import Stopped
from tfrl.workers.membership import join
from tfrl.workers.tf_config import TFConfig


@dataclass(frozen=True)
class Update:
    """The results of an update that are to be written; JSON in the checkpoint of one not yet evaluated."""

    metrics: dict[str, float]


class Learner(ABC):
    """An algorithm and the data that it learns from, as the loop uses them. All workers make the same calls.

    The loop counts nothing itself: `session.step` is the number of finished updates, or gradient steps of a
    supervised run, and `steps_done` is the place on the x-axis of all curves.

    Attributes:
      step_column: the first column of progress.csv: `env_steps`, or `images`.
      unit: what it counts, for people.
      highlights: gives the texts of the progress line for an update's metrics; None: speed and return.
      notes: warnings about the settings of a new run.
      callbacks: the product's own, called before the user's.
    """

    step_column = "env_steps"
    unit = "env steps"
    highlights: Callable[[Mapping[str, float]], list[str]] | None = None
    notes: Sequence[str] = ()
    callbacks: Sequence[Callback] = ()

    # Learning

    def begin(self) -> None:
        """Gives a new run its first weights; a run that goes on has its own. A collective."""

    @abstractmethod
    def update(self) -> Update | None:
        """Learns for one row of progress.csv; counts `session.step` and seconds. A collective.

        None where there is more to learn before the step counts, and the run may be saved or stopped first:
        the next call goes on.

        Raises:
          Stopped: on all workers, of which one was told to stop.
        """

    @abstractmethod
    def is_evaluation_due(self, before: tuple[int, int]) -> bool:
        """True if an evaluation is due after an update that began at `before`: step and steps done."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """The metrics of an evaluation of the present weights. A collective. Raises Stopped as `update`."""

    @abstractmethod
    def weights(self) -> dict[str, np.ndarray]:
        """The weights by name, float32."""

    # Acting, of learners from envs; `Run` has these methods, too

    def act(self, observations: np.ndarray, noise: np.ndarray, *memory: np.ndarray) -> Any:
        """Actions of an evaluation."""
        raise NotImplementedError

    def memory(self, envs: int) -> Any:
        """The memory of so many envs, if the policy is recurrent."""
        raise NotImplementedError

    def draw_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """The noise of one env."""
        raise NotImplementedError

    # How far the run is

    @property
    @abstractmethod
    def steps_done(self) -> int:
        """Env steps of all finished updates, or images, all workers together."""

    @property
    def steps_within(self) -> int:
        """Env steps of the update that is under way, all workers together; 0 between two updates."""
        return 0

    @property
    @abstractmethod
    def total_steps(self) -> int:
        """The steps at which the run ends."""

    @property
    @abstractmethod
    def place(self) -> str:
        """The place of the run, for people: "update 4", say."""

    @property
    def position(self) -> float:
        """The steps to show as done; within an update that takes long, how much of it is done."""
        return self.steps_done

    def work(self, steps: float) -> float:
        """The time that a run of so many steps takes, in any unit: the time left goes by it."""
        return steps

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """True, on all workers, if no update is to follow. An update under way is never the end."""

    def check_length(self, found_steps: int) -> None:
        """Raises UserError where the run's checkpoint is at more steps than the settings want."""

    # What people see

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The columns of progress.csv after the first one, in order."""

    @abstractmethod
    def summary(self, logged: int) -> dict[str, str]:
        """The rows of the table before training; `logged` is the number of steps that progress.csv has."""

    def describe(self, writer: MetricsWriter | NullMetricsWriter) -> None:
        """Tells TensorBoard the settings of a new run."""

    @abstractmethod
    def completed(self, stopped: str | None) -> str:
        """The sentence for a run that is complete; `stopped` is why a callback stopped it."""

    # State

    @abstractmethod
    def get_state(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The arrays of a checkpoint: those that are the same on all workers, and this worker's own."""

    def shards(self) -> Sequence[CheckpointShard]:
        """The parts of this worker's state that are written once, for this checkpoint and later ones."""
        return ()

    @abstractmethod
    def set_state(
        self,
        state: Mapping[str, np.ndarray],
        parts: Sequence[Mapping[str, np.ndarray]],
        shards: Sequence[CheckpointShard] = (),
    ) -> None:
        """Continues from what `get_state` and `shards` gave on all workers, be they more or fewer now.

        Raises UserError on all workers if the network is another one, or if envs then show something else
        than they did.
        """

    # The end

    def finish(self) -> None:
        """Removes, when the run is over, the files of its own that only older checkpoints need."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Writes the trained network; on the chief alone. Raises OSError."""

    @abstractmethod
    def results(self, metrics: Mapping[str, float], evaluation: Mapping[str, float]) -> dict[str, Any]:
        """The learner's own entries of results.json, from the last update's metrics and evaluation."""

    @abstractmethod
    def conclusion(self, outcome: Mapping[str, Any], stopped: str | None) -> Conclusion:
        """The last words of a finished run, from the content of its results.json."""

    def close(self) -> None:
        """Stops what it has started."""


@dataclass(frozen=True)
class Conclusion:
    """The last words of a finished run: sentences, a table, and the commands to type next."""

    sentences: Sequence[str]
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    commands: Sequence[str]


def train(
    config: Settings,
    cluster: TFConfig | None,
    make_learner: Callable[[Any, Session], Learner],
    callbacks: Sequence[Callback] = (),
    *,
    step_name: str = "update",
    saves: str = "at the end of this update",
) -> int:
    """Runs or continues the run that `config` describes; the process's exit code.

    Args:
      config: checked settings.
      cluster: what TF_CONFIG says; None for a single process.
      make_learner: makes the learner from the settings and the session.
      callbacks: the user's, the same on all workers; called after the product's own.
      step_name: what one step of the session is called.
      saves: when a signal makes it save, for the sentence that answers one.

    Raises:
      UserError: the settings do not fit this machine or cluster, or the checkpoints cannot be read.
      TrainingError: the run failed: a NaN, say.
    """
    console = Console(enabled=cluster is None or cluster.is_chief)
    with join(config, cluster) as (runtime, watchdog):
        config.check_topology(runtime.num_workers, runtime.local_replicas)
        with open_session(config, runtime, watchdog, console, step_name=step_name, saves=saves) as session:
            followed = cluster is not None and cluster.evaluator is not None
            with contextlib.closing(make_learner(config, session)) as learner:
                return Run(config, session, learner, callbacks, followed=followed).run()


class Run:
    """One run in one process, and its loop. All workers go through the same calls in the same order.

    Callbacks see it as `tfrl.run.callbacks.RunOfCallback`.

    Args:
      config, session: the run's.
      learner: what it trains.
      callbacks: the user's.
      followed: an evaluator follows the run, so that this process evaluates at the end only.

    Attributes:
      config, folder: the settings; the run's folder.
      metrics: of the last update, by name; empty before the first one in this process.
      evaluation: metrics of the last evaluation in this process.
    """

    def __init__(
        self,
        config: Settings,
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
        self._users = callbacks
        self._callbacks = [*learner.callbacks, *callbacks]
        self._unsaved = 0  # updates, and parts of them, since the last checkpoint or this process began
        self._pending: Update | None = None  # whose evaluation is not done
        self._before = 0, 0  # step and steps done before the last update
        self._evaluated_at = -1  # steps done
        self._stopped: str | None = None  # why a callback has stopped the run

    # For callbacks

    @property
    def updates(self) -> int:
        """Finished updates."""
        return self._session.step

    @property
    def is_chief(self) -> bool:
        """True on the one worker that writes."""
        return self._session.runtime.is_chief

    @property
    def env_steps(self) -> int:
        """Env steps of all finished updates, all workers together; images of a supervised run."""
        return self._learner.steps_done

    @property
    def seconds(self) -> float:
        """Seconds of training, in all processes of the run."""
        return self._session.seconds

    def weights(self) -> dict[str, np.ndarray]:
        """The weights by name, float32."""
        return self._learner.weights()

    def act(self, observations: np.ndarray, noise: np.ndarray, *memory: np.ndarray) -> Any:
        """Actions [B, *shape] of observations [B, *shape], by noise float32 [B, K].

        A recurrent policy takes its memory [B, M], and gives a pair: the actions, and states [B, S].
        """
        return self._learner.act(observations, noise, *memory)

    def memory(self, envs: int) -> Any:
        """The memory of so many envs, a `tfrl.experience.memory.Memory`, if the policy is recurrent."""
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
            session.console.message(learner.completed(self._stopped))
            return session.leave(0)
        self._begin(logged)
        try:
            if self._pending is not None:  # killed or stopped while it evaluated
                self._conclude(self._pending)
            while not self._is_over:
                session.raise_if_stopped()
                self._before = session.step, self.env_steps
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
            return session.end_early(stopped.code, f"{self._steps_taken:,} {learner.unit} ({learner.place})")
        return self._finish()

    def _conclude(self, update: Update) -> None:
        """Evaluates if it is time, calls the callbacks, writes the metrics, and saves if it is time."""
        session, learner = self._session, self._learner
        self.metrics = update.metrics
        due = not self._followed and learner.is_evaluation_due(self._before)
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
        session.writer.write(self.env_steps, self.metrics)
        session.console.update(self.env_steps, self.metrics)
        self._unsaved += 1
        every = self.config.checkpoint_every
        if session.step % every == 0 or self._unsaved >= every:
            self._save()

    def _evaluate(self) -> None:
        """Evaluates. Raises Stopped where it is broken off; a resume does the whole evaluation."""
        self.evaluation = self._learner.evaluate()
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
        """Steps so far, also those of the update that is under way."""
        return self.env_steps + self._learner.steps_within

    # Checkpoints

    def _save(self) -> None:
        self._unsaved = 0
        if self._session.is_saved:
            return
        state, part = self._learner.get_state()
        progress = {
            "pending": None if self._pending is None else dataclasses.asdict(self._pending),
            "before": self._before,
            "stopped": self._stopped,
        }
        state |= get_states(self._users)
        self._session.save(self._steps_taken, state, part, progress, self._learner.shards())

    def _restore(self, logged: int) -> None:
        """Goes on from the newest checkpoint, or begins; `logged` is where progress.csv ends."""
        session, learner = self._session, self._learner
        found = session.restore()
        if found is None:
            learner.begin()
            return
        learner.check_length(found.env_steps)
        learner.set_state(found.learner, found.parts, found.shards)
        set_states(self._users, found.learner)
        self._before = tuple(session.progress["before"])
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
        session, learner = self._session, self._learner
        within = 0 if session.found is None else session.found.env_steps - self.env_steps
        again = within + (self._pending is not None)
        session.open_folder(learner.columns, again=again, step_column=learner.step_column)
        if session.found is None:
            learner.describe(session.writer)
        session.console.summary(learner.summary(logged))
        for note in learner.notes if session.runtime.is_chief and session.found is None else ():
            session.console.warn(note)
        session.console.start(
            learner.total_steps,
            learner.position,
            unit=learner.unit,
            work=learner.work,
            highlights=learner.highlights,
        )
        session.console.taken(self._steps_taken)
        for callback in self._callbacks:
            callback.on_start(self)

    def _finish(self) -> int:
        """Exports, and writes and shows the results."""
        session, weights = self._session, self.weights()
        self._learner.finish()
        with session.finishing():
            outcome = self._learner.results(self.metrics, self.evaluation)
            if self._stopped is not None:
                outcome["stopped"] = self._stopped
            outcome |= session.provenance(weights)
            if session.runtime.is_chief:
                self._learner.export(self.folder / "export")
                results.write(self.folder, outcome)
        for callback in self._callbacks:
            callback.on_end(self, outcome)
        ends = self._learner.conclusion(outcome, self._stopped)
        for sentence in ends.sentences:
            session.console.message(sentence)
        session.console.results(ends.header, ends.rows, ends.commands)
        return session.leave(0)
