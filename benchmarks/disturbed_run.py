"""A run of two workers under the launcher that can be watched from outside and disturbed."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfrl.run.checkpoint import CheckpointStore

WORKERS = 2
_RESTARTS = 9  # more than there are trials in a run
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


class DisturbedRun:
    """Starts at once; `start` goes on with it after it was told to stop.

    Args:
      folder: where everything of it goes.
      flags: the trainer's, without where it writes.
      logdir: the trainer's; in `folder` by default.
    """

    def __init__(self, folder: Path, flags: Sequence[str], logdir: Path | None = None) -> None:
        self.folder = folder
        self.logdir = logdir or folder
        self.path = self.logdir / "run"
        self._flags = [*flags, "--logdir", str(self.logdir), "--run-name", "run"]
        folder.mkdir(exist_ok=True)
        self.start()

    def start(self) -> None:
        """Starts the launcher, which restarts the workers after each failure."""
        launch = [
            sys.executable,
            "-m",
            "cluster.launch",
            "--workers",
            str(WORKERS),
            "--max-restarts",
            str(_RESTARTS),
        ]
        with (self.folder / "output").open("ab") as output:
            self._launcher = subprocess.Popen(
                [
                    *launch,
                    "--",
                    sys.executable,
                    "-m",
                    "benchmarks.noting_worker",
                    str(self.folder),
                    *self._flags,
                ],
                env={**os.environ, **_THREADS},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """The text that it has written on the screen so far."""
        return (self.folder / "output").read_text(errors="replace")

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
            if self._launcher.poll() is not None:
                return condition()
            if time.monotonic() > deadline:
                raise RuntimeError(f"nothing happens in {self.folder}:\n{self.output[-2000:]}")
            time.sleep(_POLL)
        return True

    def wait(self) -> int:
        """Waits for the launcher's end; its exit code."""
        return self._launcher.wait(_PATIENCE)

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
        if self._launcher.poll() is None:
            for worker in range(WORKERS):
                with contextlib.suppress(ProcessLookupError, AttributeError):
                    os.kill(self.note(worker).process, signal.SIGKILL)
            self._launcher.kill()
            self._launcher.wait()


def _parse(line: bytes) -> Note:
    at, process, update, phase = line.decode().split(" ", 3)
    return Note(float(at), int(process), int(update), phase)
