"""A trainer's checkpoints, folder, clock, stop requests and end; tfrl/run/loop.py has the loop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfrl.cli.endings import Stopped, StopRequest, stop_code
from tfrl.cli.errors import EnvError, PeerError, TrainingError, UserError
from tfrl.cli.settings import SETTINGS_FILE, Settings, to_yaml
from tfrl.cli.streams import surviving
from tfrl.run import files
from tfrl.run.checkpoint import (
    CheckpointError,
    CheckpointStore,
    SavedState,
    State,
    pack_json,
    unpack_json,
)
from tfrl.run.console import Console
from tfrl.run.metrics import MetricsWriter, NullMetricsWriter
from tfrl.workers.strategy import Runtime
from tfrl.workers.watchdog import NoWatchdog


@contextlib.contextmanager
def open_session(
    config: Settings, runtime: Runtime, watchdog: NoWatchdog, console: Console
) -> Iterator[Session]:
    """Makes a session, and answers signals within the context.

    Raises TrainingError for an EnvError within it, with the checkpoint that is kept.
    """
    stop = StopRequest(config.run_dir / "stop")
    session = Session(config, runtime, console, stop, watchdog)

    def on_first(name: str) -> None:
        console.message(
            f"{name}: saving at the end of this {config.step_name}; a second signal, some seconds later, "
            "ends the run at once, without saving"
        )

    def on_second() -> None:
        console.stop()
        console.message(f"Ended without saving; {session.kept()}.")

    with stop.listening(on_first, on_second):
        try:
            yield session
        except EnvError as error:
            raise TrainingError(f"{error}; {session.kept()}") from error
        finally:
            console.stop()


class Session:
    """The surroundings of a trainer's loop. All workers make the same calls in the same order.

    Attributes:
      runtime, console, stop, watchdog: as given.
      writer: the writer of metrics, after `open_folder`.
      begins_curves: True if the curves of TensorBoard begin anew, after `open_folder`: in a new run, and in
        one that resumes before its first step.
      step: the number of finished steps, which are updates in RL.
      seconds: the training time in all processes of the run.
      found: the checkpoint from which this process resumed, or None.
      progress: the `progress` of that checkpoint; empty without a checkpoint.
      unwritten: other files of the run that could not be written, such as videos.
      needed: the names of files that must be in the folder at the end of the run.
      resumed_at: the env steps, or images, at which processes of the run have resumed.
      started_from: the run of --start-from, and the length of its training.
    """

    def __init__(
        self,
        config: Settings,
        runtime: Runtime,
        console: Console,
        stop: StopRequest,
        watchdog: NoWatchdog,
    ) -> None:
        self.runtime = runtime
        self.console = console
        self.stop = stop
        self.watchdog = watchdog
        self.writer: MetricsWriter | NullMetricsWriter = NullMetricsWriter()
        self.begins_curves = False
        self.step = 0
        self.seconds = 0.0
        self.found: SavedState | None = None
        self.progress: dict[str, Any] = {}
        self.unwritten: set[str] = set()
        self.needed: set[str] = set()
        self.resumed_at: list[int] = []
        self.started_from: dict[str, Any] | None = None
        self._config = config
        self._store = CheckpointStore(
            config.run_dir / "checkpoints",
            keep=config.keep_checkpoints,
            worker=runtime.worker,
            num_workers=runtime.num_workers,
            agree=runtime.all_agree,
        )
        self._saved_at = -1
        self._warn_once = functools.cache(console.warn)  # once: the same fault may return for days

    def phase(self, name: str, detail: str = "") -> None:
        """Names the present phase for the display and the other workers.

        The watchdog uses the name to know the first time of a phase, and how long a phase may take.
        """
        logging.getLogger("tfrl").debug("%s%s", name, detail)
        self.console.progress.phase = name + detail
        self.watchdog.beat(name, self.step)

    def advance_to(self, x: float, *, steady: bool = False) -> None:
        """Shows env steps, or images, within an update, and gives the watchdog a sign of life.

        `steady`: True if the pace is that of the rest of the run, so that it predicts the time left.
        """
        self.watchdog.beat()
        self.console.progress.advance_to(x, steady=steady)

    # Checkpoints

    def restore(self) -> SavedState | None:
        """Reads the newest valid checkpoint, the same on all workers, or None; continues its clock.

        Raises:
          UserError: there are checkpoints, but none is valid.
          PeerError: some workers see no checkpoint, and others do. A new start would overwrite the run.
        """
        skipped: list[str] = []
        try:
            found = self._store.load(skipped.append, verify_shards=True)
        except UserError:
            for sentence in skipped:
                self.console.warn(sentence)
            raise
        mine = -1 if found is None else found.update
        newest = self.of_workers(mine)
        if newest.min() < 0 <= newest.max():
            raise PeerError(
                f"worker {newest.argmin()} sees no checkpoint in {self._config.run_dir}, and worker "
                f"{newest.argmax()} sees that of {self._config.step_name} {newest.max()}: all workers must "
                "share one disk"
            )
        # All workers skip the same damaged checkpoints, and the chief warns for all.
        if self.runtime.is_chief or mine < newest.max():
            for sentence in skipped:
                self.console.warn(sentence)
        if newest.min() != mine:
            found = self._store.load(self.console.warn, int(newest.min()), verify_shards=True)
        if found is None:
            return None
        self.found = found
        self.progress = unpack_json(found.learner["progress"])
        self.step = self._saved_at = found.update
        self.seconds = self.progress["seconds"]
        self.started_from = self.progress["started_from"]
        self.resumed_at = [*self.progress["resumed_at"], found.env_steps]
        return found

    def of_workers(self, number: float) -> np.ndarray:
        """The numbers of all workers, int64 or float64 [workers]. A collective."""
        numbers = np.zeros(self.runtime.num_workers, np.asarray(number).dtype)
        numbers[self.runtime.worker] = number
        return self.runtime.sum_over_workers(numbers)

    @property
    def is_saved(self) -> bool:
        """True if the present step is saved."""
        return self._saved_at == self.step

    @property
    def saved_at(self) -> Path | None:
        """The folder of the present step's checkpoint; None if the step is not saved."""
        return self._store.path(self.step) if self.is_saved else None

    def changed(self) -> None:
        """Notes that the state changed since the checkpoint of the present step."""
        self._saved_at = -1

    def saved_steps(self) -> list[int]:
        """The steps that have a checkpoint, oldest first."""
        return self._store.updates()

    def save(
        self,
        x: int,
        state: State,
        progress: Mapping[str, Any],
    ) -> None:
        """Saves a checkpoint. If the disk is full, the checkpoint is skipped and the run continues.

        Args:
          x: the x-axis value of the run: env steps or images.
          state: this worker's state.
          progress: JSON values that the loop needs to resume.
        """
        self.phase("saving")
        self.writer.flush()
        clock = {"seconds": self.seconds, "resumed_at": self.resumed_at}
        clock["started_from"] = self.started_from
        state.learner["progress"] = pack_json(clock | {**progress})
        try:
            dropped = self._store.save(self.step, state, env_steps=x)
        except CheckpointError as error:
            if self.runtime.is_chief or error.__cause__ is not None:
                self.console.warn(f"{error} Training continues.")
            return
        self._saved_at = self.step
        with surviving(sys.stderr):  # cluster.launch sees this text, and counts restarts from 0
            print(os.environ.get("TFRL_SAVED", ""), end="", file=sys.stderr, flush=True)
        if dropped and self.runtime.is_chief:
            self._warn_once(
                f"The disk of {self._config.run_dir} is full: old checkpoints are removed to make room, so "
                f"fewer than --keep-checkpoints {self._config.keep_checkpoints} are kept. Training continues."
            )

    def kept(self) -> str:
        """The end of a sentence: the newest checkpoint of a run that fails now."""
        saved = self._store.updates()
        if not saved:
            return "there is no checkpoint yet"
        return f"the checkpoint of {self._config.step_name} {saved[-1]} is kept"

    def missing(self) -> list[str]:
        """The parts of the run that could not be written, on a full disk for example, or were removed."""
        found = []
        if not self.is_saved:
            found.append(f"the checkpoint of {self._config.step_name} {self.step} ({self.kept()})")
        if self.writer.has_gap:
            found.append("points of its curves and rows of its progress.csv")
        removed = {name for name in self.needed if not (self._config.run_dir / name).is_file()}
        return found + sorted(self.unwritten | removed)

    # The run's folder

    def open_folder(
        self,
        columns: Sequence[str],
        *,
        rows_until: int | None = None,
        episodes_until: int | None = None,
        step_column: str = "env_steps",
    ) -> None:
        """The chief writes the settings and opens the files of metrics.

        Args:
          columns: the columns of progress.csv after the first one.
          rows_until: the steps up to which a resumed run keeps the rows of progress.csv; None: a new run.
          episodes_until: the same for episodes.csv; None: the steps of the checkpoint.
          step_column: the name of the first column.
        """
        self.begins_curves = rows_until is None or rows_until < 0
        if not self.runtime.is_chief:
            return
        run = self._config.run_dir
        # The resolved precision, because `auto` may differ on the machine that resumes the run.
        settings = to_yaml(dataclasses.replace(self._config, precision=self.runtime.precision))
        try:
            files.make_folder(run)
            if files.read_text(run / SETTINGS_FILE) != settings:  # a run may resume on a full disk
                files.write(run / SETTINGS_FILE, settings)
        except OSError as error:
            raise UserError(f"cannot write in {run}: {files.reason(error)}") from None
        self.needed.add(SETTINGS_FILE)
        if episodes_until is None and self.found is not None:
            episodes_until = self.found.env_steps
        self.writer = MetricsWriter(
            run,
            columns,
            resume_at=rows_until,
            warn=self.console.warn,
            step_column=step_column,
            episodes_until=episodes_until,
        )
        if self.begins_curves:
            self.writer.describe(settings)

    # The end

    def raise_if_stopped(self) -> None:
        """Raises Stopped on all workers if any of them was told to stop. A collective, and a barrier."""
        code = stop_code(self.runtime.sum_over_workers(np.array(self.stop.votes(), np.float32)))
        if code is not None:
            raise Stopped(code)

    def raise_if_stopped_here(self) -> None:
        """Raises Stopped if this worker was told to stop, on this worker alone. Use it inside `together`."""
        code = stop_code(self.stop.votes())
        if code is not None:
            raise Stopped(code)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Raises Stopped at its end on all workers if any raised it within the context. A collective."""
        mine = -1
        try:
            yield
        except Stopped as stopped:
            mine = stopped.code
        code = int(self.of_workers(mine).max())
        if code >= 0:
            raise Stopped(code)

    def leave(self, code: int) -> int:
        """Ends with the other workers; returns the exit code."""
        self.phase("leaving")
        self.runtime.all_agree(True)  # a barrier, because the first to exit would look like a failure
        self.watchdog.close()
        if self.runtime.is_chief and code == 0 and self.missing():
            self.console.warn(f"{self._config.run_dir} lacks {'; '.join(self.missing())}.")
        if self.runtime.is_chief:  # after the barrier: all workers have seen the file
            self.stop.forget_file()
        return code


def tensorboard(config: Settings) -> str:
    """The shell command that shows the curves."""
    return shlex.join(["tensorboard", "--logdir", config.logdir])
