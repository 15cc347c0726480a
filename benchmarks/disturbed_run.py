"""A run of a trainer that can be watched from outside and disturbed."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.process_tree import kill_family
from tfrl.cli.errors import TrainingError
from tfrl.run.checkpoint import CheckpointStore

_THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2", "OMP_NUM_THREADS": "1"}
_POLL = 0.001  # seconds
_PATIENCE = 600.0  # seconds: the end of a hang, not a measure
_LINE = 200  # bytes, more than a note has


@dataclass(frozen=True)
class Note:
    """The last note of a worker: it began `phase` at `at`, when `update` updates were finished."""

    at: float
    process: int
    update: int
    phase: str


@dataclass(frozen=True)
class Recovery:
    """The cost of a fault."""

    seconds: float
    """Seconds from the fault to the end of the update that was waited for."""
    resumed: float
    """Seconds from the fault to the first phase of the process that finished that update."""
    updates: int
    """Finished updates that were taken again."""


class DisturbedRun:
    """A run that starts at once; `start_again` goes on with it after it has ended.

    Args:
      folder: where everything of it goes.
      module: the trainer's, tfrl.impala say.
      flags: the trainer's, without where it writes.
      launcher: words of a command that is given the trainer's, and starts it again after each failure.
      logdir: the trainer's; in `folder` by default.
      environ: variables of its processes beside those of this one.
    """

    def __init__(
        self,
        folder: Path,
        module: str,
        flags: Sequence[str],
        *,
        launcher: Sequence[str] = (),
        logdir: Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.logdir = logdir or folder
        self.path = self.logdir / "run"
        trainer = [sys.executable, "-m", "benchmarks.noting_worker", str(folder), module, *flags]
        self._command = [*launcher, *trainer, "--logdir", str(self.logdir), "--run-name", "run"]
        self._environ = {**os.environ, **_THREADS, **(environ or {})}
        folder.mkdir(exist_ok=True)
        self._start()

    def _start(self) -> None:
        with (self.folder / "output").open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                env=self._environ,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def start_again(self, code: int) -> None:
        """Waits for its end, by this exit code, and goes on with it. TrainingError: it ended by another."""
        ended = self.wait()
        if ended != code:
            raise TrainingError(f"exit code {ended} instead of {code}:\n{self.output[-2000:]}")
        self._start()

    @property
    def pid(self) -> int:
        """The number of its first process, whose descendants are all its other processes."""
        return self._process.pid

    @property
    def output(self) -> str:
        """The text that it has written on the screen so far."""
        return (self.folder / "output").read_text(errors="replace")

    @property
    def finished(self) -> int:
        """The updates that its chief has finished."""
        note = self.note(0)
        return 0 if note is None else note.update

    def note(self, worker: int) -> Note | None:
        """The newest note of a worker."""
        with contextlib.suppress(OSError), (self.folder / f"worker-{worker}").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LINE))
            lines = file.read().splitlines()
            return _parse(lines[-1]) if lines else None
        return None

    def notes(self, worker: int) -> list[Note]:
        """All notes of a worker, oldest first."""
        return [_parse(line) for line in (self.folder / f"worker-{worker}").read_bytes().splitlines()]

    def saved(self) -> list[int]:
        """The updates that have a checkpoint."""
        return CheckpointStore(self.path / "checkpoints", keep=1).updates()

    def staged(self) -> bool:
        """True if a checkpoint is half written."""
        return any((self.path / "checkpoints").glob("*.tmp"))

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Waits until `condition` is true; False if the run ended before. RuntimeError: neither comes."""
        deadline = time.monotonic() + _PATIENCE
        while not condition():
            if self._process.poll() is not None:
                return condition()
            if time.monotonic() > deadline:
                raise RuntimeError(f"nothing happens in {self.folder}:\n{self.output[-2000:]}")
            time.sleep(_POLL)
        return True

    def wait_until_aimed(self, condition: Callable[[], bool]) -> None:
        """Waits until `condition` is true, for a trial to begin. TrainingError: the run is over before."""
        if not self.wait_until(condition):
            raise TrainingError(f"the run in {self.folder} is over before the trial; give more --updates")

    def restarted(self, struck: float, chief: int) -> Recovery:
        """Waits until another process goes on, and has finished an update that none had before.

        Args:
          struck: when the fault came.
          chief: the process that trained, or was the chief of those that did.
        """
        if not self.wait_until(lambda: self.note(0).process != chief):
            raise TrainingError(f"the run in {self.folder} was not restarted:\n{self.output[-2000:]}")
        notes = self.notes(0)
        first = next(i for i, note in enumerate(notes) if note.process == notes[-1].process)
        return self.recovered(struck, notes[first - 1].update)

    def recovered(self, struck: float, finished: int) -> Recovery:
        """Waits until more than `finished` updates are; the cost of the fault that came at `struck`."""
        if not self.wait_until(lambda: self.note(0).update > finished):
            raise TrainingError(f"the run in {self.folder} did not recover:\n{self.output[-2000:]}")
        notes = self.notes(0)
        hit = max(i for i, note in enumerate(notes) if note.at <= struck)
        over = next(i for i, note in enumerate(notes) if i > hit and note.update > finished)
        resumed = next(note for note in notes[hit:] if note.process == notes[over].process)
        pairs = itertools.pairwise(notes[hit : over + 1])
        again = sum(max(0, before.update - after.update) for before, after in pairs)
        return Recovery(notes[over].at - struck, resumed.at - struck, again)

    def wait(self) -> int:
        """Waits for the end of its first process; returns the exit code."""
        return self._process.wait(_PATIENCE)

    def finish(self, *, gaps: bool = False) -> str:
        """Waits for the end of training; the checksum of the weights.

        Args:
          gaps: whether rows may be missing in progress.csv.

        Raises:
          RuntimeError: it failed, or progress.csv does not have each update once.
        """
        code = self.wait()
        if code != 0:
            raise RuntimeError(f"the run in {self.folder} ended with {code}:\n{self.output[-2000:]}")
        results = json.loads((self.path / "results.json").read_text())
        with (self.path / "progress.csv").open() as file:
            rows = [int(row["env_steps"]) for row in csv.DictReader(file)]
        size = results["env_steps"] // results["updates"]
        expected = [size * (update + 1) for update in range(results["updates"])]
        if rows != [row for row in expected if row in rows or not gaps]:
            raise RuntimeError(f"{self.path / 'progress.csv'} does not have each update once: {rows}")
        return results["weights_sha256"]

    def stop(self) -> None:
        """Kills what is left of it."""
        if self._process.poll() is None:
            kill_family(self.pid)
            self._process.wait()


def _parse(line: bytes) -> Note:
    at, process, update, phase = line.decode().split(" ", 3)
    return Note(float(at), int(process), int(update), phase)
