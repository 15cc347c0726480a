"""The loop of every run: update, evaluate, call the callbacks, save, and resume exactly."""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from tfrl.cli.endings import Stopped
from tfrl.cli.errors import TrainingError
from tfrl.run import files
from tfrl.run.callbacks import Callback, ConfigT, RunOfCallback, check_metrics, get_states, set_states
from tfrl.run.checkpoint import State
from tfrl.run.console import SHOWN, Console, Progress
from tfrl.run.folder import RESULTS_FILE, finite, read_results, weights_sha256
from tfrl.run.metrics import (
    PROGRESS_FILE,
    MetricsWriter,
    NullMetricsWriter,
    first_values,
    logged_steps,
)
from tfrl.run.session import Session, open_session, tensorboard
from tfrl.workers.strategy import join
from tfrl.workers.tf_config import TFConfig


class Learner(ABC):
    """An algorithm and its data, as the loop uses them. All workers make the same calls.

    `session.step` counts the finished updates, or the gradient steps of a supervised run. `steps_done` is the
    x-axis of all curves.

    Attributes:
      step_column: the first column of progress.csv: `env_steps`, or `images`.
      unit: the name of this count in messages.
      highlights: makes the texts of the progress line from the metrics of an update. None: speed and return.
      callbacks: the product's own, called before the user's.
      evaluates_first: an evaluation comes before the first update of the run.
      continues_cut: the run goes on from a checkpoint at which --max-episodes had ended it within an update.
        The rows and the evaluation of that end do not count.
    """

    step_column = "env_steps"
    unit = "env steps"
    highlights: Callable[[Mapping[str, float]], list[str]] | None = None
    callbacks: Sequence[Callback] = ()
    evaluates_first = False
    continues_cut = False

    # Learning

    def begin(self) -> None:
        """Sets the first weights of a new run; a resumed run has weights already. A collective."""

    @abstractmethod
    def update(self) -> dict[str, float] | None:
        """Learns for one row of progress.csv; counts `session.step` and seconds. A collective.

        Returns the metrics by name, or None at a pause within the step, where the run may be saved or
        stopped. The next call continues the step.

        Raises:
          Stopped: on all workers, if one of them got a signal to stop.
        """

    @abstractmethod
    def is_evaluation_due(self, before: tuple[int, int]) -> bool:
        """True if an evaluation is due after an update that began at `before` (step, steps done)."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Evaluates the present weights; the metrics by name. A collective. Raises Stopped like `update`."""

    @abstractmethod
    def weights(self) -> dict[str, np.ndarray]:
        """The weights by name, float32."""

    # Acting, of learners from envs; `RunOfCallback` describes these methods

    act: Callable[..., Any]
    memory: Callable[[int], Any]
    draw_noise: Callable[[np.random.Generator, int], np.ndarray]

    # How far the run is

    @property
    @abstractmethod
    def steps_done(self) -> int:
        """Env steps of all finished updates, or images, all workers together."""

    @property
    def steps_within(self) -> int:
        """Env steps of the unfinished update, all workers together; 0 between two updates."""
        return 0

    @property
    @abstractmethod
    def total_steps(self) -> int:
        """The number of steps at which the run ends."""

    @property
    @abstractmethod
    def place(self) -> str:
        """The place of the run in messages, such as "update 4"."""

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """True on all workers if no update follows. False within an unfinished update."""

    def check_length(self, found_steps: int) -> None:
        """Raises UserError if the checkpoint has more steps than --total-steps."""

    # Output for the user

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The columns of progress.csv after the first one, in order."""

    @abstractmethod
    def summary(self) -> dict[str, str]:
        """The learner's own rows of the table before training."""

    def describe(self, writer: MetricsWriter | NullMetricsWriter) -> None:
        """Writes the settings for TensorBoard where its curves begin."""

    @abstractmethod
    def completed(self, stopped: str | None) -> str:
        """The sentence for a run that is complete; `stopped` is why a callback stopped it."""

    # State

    @abstractmethod
    def get_state(self) -> State:
        """This worker's state."""

    @abstractmethod
    def set_state(self, state: State) -> None:
        """Restores the state of all workers, also of another number of workers.

        Raises UserError on all workers if the checkpoint belongs to another network, or if the restored envs
        show other observations.
        """

    # The end

    def finish(self) -> None:
        """Removes the files that only older checkpoints need, at the end of the run."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Exports the trained network; called only on the chief. Raises OSError."""

    @abstractmethod
    def results(self, metrics: Mapping[str, float], evaluation: Mapping[str, float]) -> dict[str, Any]:
        """The learner's entries of results.json, from the metrics of the last update and evaluation."""

    @abstractmethod
    def conclusion(self, outcome: Mapping[str, Any], stopped: str | None) -> Conclusion:
        """The last output of a finished run, from the content of its results.json."""

    def close(self) -> None:
        """Ends the processes and threads that it started."""


@dataclass(frozen=True)
class Conclusion:
    """The last output of a finished run: sentences, a table, and commands to continue with."""

    sentences: Sequence[str]
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    commands: Sequence[str]


@contextlib.contextmanager
def open_run(
    config: ConfigT,
    cluster: TFConfig | None,
    make_learner: Callable[[Session], Learner],
    callbacks: Sequence[Callback] = (),
) -> Iterator[TrainingRun[ConfigT]]:
    """Makes the run of `config` within the context; `TrainingRun.start` starts or resumes it.

    Args:
      config: checked settings.
      cluster: the content of TF_CONFIG; None for a single process.
      make_learner: makes the learner in this session.
      callbacks: the user's callbacks, the same on all workers; called after those of the learner.

    Raises:
      UserError: the settings do not fit this machine or cluster, or the checkpoints cannot be read.
      TrainingError: the run failed, because of a NaN, for example.
    """
    console = Console(enabled=cluster is None or cluster.is_chief)
    # NumPy has several threads if it was imported before tfrl, and they would compete with TensorFlow's.
    one_thread = threadpool_limits(1, user_api="blas")
    with one_thread, join(config, cluster) as (runtime, watchdog):
        config.check_topology(runtime.num_workers, runtime.local_replicas)
        with open_session(config, runtime, watchdog, console) as session:
            followed = cluster is not None and cluster.evaluator is not None
            with contextlib.closing(make_learner(session)) as learner:
                yield TrainingRun(config, session, learner, callbacks, followed=followed)


class TrainingRun(RunOfCallback[ConfigT]):
    """One run in one process, and its loop. All workers make the same calls in the same order.

    Args:
      config, session: the settings and the session of the run.
      learner: the algorithm with its data.
      callbacks: the user's.
      followed: an evaluator process follows the run, so this process evaluates only at the end.

    Attributes:
      evaluation: the metrics of the last evaluation of this process.
      code: the exit code, once the run has ended in this process; None before.
    """

    def __init__(
        self,
        config: ConfigT,
        session: Session,
        learner: Learner,
        callbacks: Sequence[Callback] = (),
        *,
        followed: bool,
    ) -> None:
        super().__init__(config, session, learner)
        self.evaluation: dict[str, float] = {}
        self.code: int | None = None
        self._followed = followed
        self._users = callbacks
        self._unsaved = 0  # updates and pauses since the last checkpoint, or since the start of this process
        self._pending: dict[str, float] | None = None  # metrics of the update whose evaluation is pending
        self._before = 0, 0  # step and steps done before the last update
        self._evaluated_at = -1  # steps done
        self._own_columns: dict[str, Any] = {}  # the names of the run's own columns, each with None

    def run(self) -> int:
        """Trains until the run is complete or stopped; returns the exit code."""
        self.start()
        while not self.is_done:
            self.update()
        return self.finish()

    def start(self) -> None:
        """Starts or resumes the run. Call it once, before `update`."""
        session, learner = self._session, self._learner
        logged = logged_steps(self.folder / PROGRESS_FILE)
        self._restore(logged)
        if self._is_over and self._has_results():
            session.console.message(learner.completed(self._stopped))
            self.code = session.leave(0)
            return
        self._begin(logged)
        with self._ending_if_stopped():
            if self._pending is not None:  # the run was killed or stopped during an evaluation
                self._conclude(self._pending)
            elif self._begins_with_evaluation:
                self._save()  # as before every evaluation
                self._evaluate()
                session.writer.write(0, self.evaluation)
                session.console.progress.note(self.evaluation)
                self._agree_to_stop()

    def update(self) -> dict[str, float]:
        """Takes one update with what follows it, such as an evaluation; returns the metrics by name.

        A request to stop ends the run within it: then `code` is set.
        """
        session, learner = self._session, self._learner
        with self._ending_if_stopped():
            session.raise_if_stopped()
            self._before = session.step, self.env_steps
            while (metrics := learner.update()) is None:  # the update is at a pause
                self._note_part()
                session.raise_if_stopped()
            self._conclude(metrics)
        return self.metrics

    def evaluate(self) -> dict[str, float]:
        """Evaluates the present weights, unless that is done; returns the metrics by name.

        A request to stop ends the run within it: then `code` is set.
        """
        if self._evaluated_at != self.env_steps:
            with self._ending_if_stopped():
                self._evaluate()
                self._agree_to_stop()
                self._session.writer.scalars(self.env_steps, self.evaluation)
        return self.evaluation

    def save(self) -> Path | None:
        """Saves a checkpoint; returns its folder, or None if it could not be saved."""
        self._save()
        return self._session.saved_at

    def finish(self) -> int:
        """Ends a run that `is_done`, with its last evaluation, its export and its results; the exit code."""
        if self.code is None:
            with self._ending_if_stopped():
                if self._stopped is not None:
                    self._save()
                # A callback stopped the run, or --total-steps is lower now.
                if self._evaluated_at != self.env_steps:
                    self._evaluate()
                    self._session.writer.scalars(self.env_steps, self.evaluation)
        if self.code is None:
            self.code = self._write_results()
        return self.code

    def leave(self, code: int = 0) -> int:
        """Saves a run that is not complete, and ends it in this process; the exit code."""
        self._save()
        session, learner = self._session, self._learner
        session.writer.close()
        session.console.stop()
        session.stop.saved = session.is_saved
        if session.is_saved:
            saved = f"saved at {self._steps_taken:,} {learner.unit} ({learner.place})"
        else:
            saved, code = "but it could not be saved", 1
        session.console.message(f"Stopped, {saved}; the same command continues from its last checkpoint.")
        self.code = session.leave(code)
        return self.code

    @property
    def is_done(self) -> bool:
        """True on all workers if no update follows in this process."""
        return self.code is not None or self._is_over

    def unhurried(self) -> contextlib.AbstractContextManager[None]:
        """Work within the context may take as long as it likes: the other workers wait."""
        return self._session.watchdog.unhurried()

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return self._session.runtime.num_workers

    @contextlib.contextmanager
    def _ending_if_stopped(self) -> Iterator[None]:
        """Ends the run if Stopped is raised within the context."""
        try:
            yield
        except Stopped as stopped:
            self.leave(stopped.code)

    def _conclude(self, metrics: dict[str, float]) -> None:
        """Evaluates if it is time, calls the callbacks, writes the metrics, and saves if it is time."""
        session, learner = self._session, self._learner
        self.metrics = metrics
        due = not self._followed and learner.is_evaluation_due(self._before)
        # If the run resumes with another --eval-every, a pending evaluation may not be due any more.
        self._pending = metrics if due or self._is_over else None
        if self._pending is not None:
            # An evaluation takes long, so the run is saved first: a kill during the evaluation loses nothing
            # else.
            self._save()
            self._evaluate()
            self.metrics = metrics | self.evaluation
            self._pending = None
        own = self._own_columns | self.metrics
        for callback in self._callbacks():
            callback.on_update(self, self.metrics)
            check_metrics(callback, self.metrics, own)
        self._agree_to_stop()
        session.writer.write(self.env_steps, self.metrics)
        session.console.progress.finish_update(self.env_steps, self.metrics)
        self._unsaved += 1
        every = self.config.checkpoint_every
        if session.step % every == 0 or self._unsaved >= every:
            self._save()

    @property
    def _begins_with_evaluation(self) -> bool:
        """True if the evaluation before the first update is due, perhaps again after a stop."""
        return self._learner.evaluates_first and not self._followed and not self._steps_taken

    def _evaluate(self) -> None:
        """Evaluates. Raises Stopped if it is interrupted; a resumed run repeats the whole evaluation."""
        self.evaluation = self._learner.evaluate()
        self._evaluated_at = self.env_steps
        own = self._own_columns | self.evaluation
        for callback in self._callbacks():
            callback.on_evaluation(self, self.evaluation)
            check_metrics(callback, self.evaluation, own)

    def _callbacks(self) -> Iterator[Callback]:
        """All callbacks in order. Those of the user may take as long as they like."""
        yield from self._learner.callbacks
        if self._users:
            with self._session.watchdog.unhurried():
                yield from self._users

    def _agree_to_stop(self) -> None:
        """Stops the run on all workers if a callback of any worker asked for it."""
        if self._users and self._session.runtime.any_worker(self._stopped is not None):
            self._stopped = self._stopped or "a callback of another worker asked for it"
            self._session.changed()  # the checkpoint before an evaluation does not contain its results

    def _note_part(self) -> None:
        """Saves as often at pauses of an update as after updates, because the parts may take as long as an
        update.
        """
        self._session.changed()
        self._session.advance_to(self._steps_taken)
        self._unsaved += 1
        if self._unsaved >= self.config.checkpoint_every:
            self._save()

    @property
    def _is_over(self) -> bool:
        """True on all workers if no update follows."""
        return self._learner.is_over or (self._stopped is not None and not self._learner.steps_within)

    @property
    def _steps_taken(self) -> int:
        """Steps so far, with those of the unfinished update."""
        return self.env_steps + self._learner.steps_within

    # Checkpoints

    def _save(self) -> None:
        self._unsaved = 0
        if self._session.is_saved:
            return
        state = self._learner.get_state()
        progress = {"pending": self._pending, "before": self._before, "stopped": self._stopped}
        if self._users:
            state.learner.update(get_states(self._users))
        self._session.save(self._steps_taken, state, progress)

    def _restore(self, logged: int) -> None:
        """Restores the newest checkpoint if there is one; `logged` is the last step of progress.csv."""
        session, learner = self._session, self._learner
        found = session.restore()
        if found is None:
            learner.begin()
            return
        learner.check_length(found.env_steps)
        learner.set_state(found)
        set_states(self._users, found.learner)
        self._before = tuple(session.progress["before"])
        # Without callbacks, the user resumes the run for more steps.
        self._stopped = session.progress["stopped"] if self._users else None
        # A pending evaluation of the checkpoint is finished if progress.csv has its row.
        done = session.runtime.any_worker(session.runtime.is_chief and logged >= found.env_steps)
        pending = None if learner.continues_cut else session.progress["pending"]
        # The last evaluation is repeated and replaces its row, because results.json needs all of its results.
        # An evaluation is also repeated if the callbacks of this checkpoint have not seen its update.
        if pending is not None and (not done or self._is_over or self._users):
            self._pending = pending

    # Start and end

    def _begin(self, logged: int) -> None:
        """Opens the run's folder, and prints what will be trained."""
        session, learner = self._session, self._learner
        found, again = session.found, self._pending is not None or self._begins_with_evaluation
        columns = learner.columns
        self._own_columns = dict.fromkeys((learner.step_column, *columns))
        session.open_folder(
            columns,
            rows_until=None if found is None else self.env_steps - again,
            # Within other updates, the rows of episodes are written already, or not noted yet.
            episodes_until=None if found is None or not learner.continues_cut else self.env_steps,
            step_column=learner.step_column,
        )
        if session.begins_curves:
            learner.describe(session.writer)
        # The row of an update is written after its evaluation.
        rows = self.env_steps if self._pending is None else self._before[1]
        if self.is_chief and session.found is not None and logged < rows:
            session.console.warn(
                f"{self.folder / PROGRESS_FILE} lacks rows of earlier updates, up to {rows:,} {learner.unit}."
            )
        session.console.summary(self._summary(logged))
        resumed = self.is_chief and session.found is not None
        session.console.start(
            Progress(
                learner.total_steps,
                self._steps_taken,
                unit=learner.unit,
                highlights=learner.highlights,
                initial=first_values(self.folder / PROGRESS_FILE, SHOWN) if resumed else {},
            )
        )
        for callback in self._callbacks():
            callback.on_start(self)
        self._agree_to_stop()

    def _summary(self, logged: int) -> dict[str, str]:
        """The table before training; `logged` is the last step of progress.csv."""
        learner, runtime, found = self._learner, self._session.runtime, self._session.found
        rows = learner.summary() | {
            "computes on": f"{runtime.device}, {runtime.precision}",
            "strategy": f"{type(runtime.strategy).__name__}, {runtime.num_workers} worker(s), "
            f"{runtime.replicas} replica(s) in all",
            "run": str(self.folder),
            "curves": tensorboard(self.config),
        }
        if found is not None:
            rows["continues at"] = f"{self._steps_taken:,} {learner.unit} ({learner.place})"
        lost = logged - (0 if found is None else found.env_steps)
        if lost > 0:
            since = "before the first" if found is None else "after that"
            rows["lost"] = f"{lost:,} {learner.unit} {since} checkpoint, which are taken again"
        return rows

    def _has_results(self) -> bool:
        """True if an earlier process completed the run with these weights, including results.json.

        A collective, because a shared disk may show the file to one worker before it shows it to another.
        """
        written = read_results(self.folder) or {}
        mine = written.get("weights_sha256") == weights_sha256(self.weights())
        return self._session.runtime.any_worker(mine)

    def _write_results(self) -> int:
        """Exports the policy, writes and prints the results, and ends; the exit code."""
        session, runtime = self._session, self._session.runtime
        self._learner.finish()
        session.writer.close()
        session.phase("exporting")
        outcome = self._learner.results(self.metrics, self.evaluation)
        if self._stopped is not None:
            outcome["stopped"] = self._stopped
        outcome |= {
            "workers": runtime.num_workers,
            "replicas": runtime.replicas,
            "precision": runtime.precision,
            "weights_sha256": weights_sha256(self.weights()),
            "resumed_at": session.resumed_at,
            "missing": session.missing(),
        }
        if runtime.is_chief:
            try:
                self._learner.export(self.folder / "export")
                files.write(self.folder / RESULTS_FILE, json.dumps(finite(outcome), indent=2) + "\n")
            except OSError as error:
                reason = files.reason(error)
                raise TrainingError(f"cannot write the results in {self.folder}: {reason}") from None
        for callback in self._callbacks():
            callback.on_end(self, outcome)
        session.console.progress.finish(outcome)
        ends = self._learner.conclusion(outcome, self._stopped)
        for sentence in ends.sentences:
            session.console.message(sentence)
        session.console.results(ends.header, ends.rows, ends.commands)
        return session.leave(0)
