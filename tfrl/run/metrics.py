"""Writers of a run's metrics: `progress.csv` and TensorBoard's event file, both against env steps.

Event files are written with TensorBoard's protocol buffers and not with `tf.summary`. So a kill loses at most
one record, and after a failed write (a full disk) the file is cut back to its last whole record. `tf.summary`
would leave a torn record that hides everything after it. Each process writes a file of its own, which begins
with the step from which TensorBoard is to forget the points of earlier files.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import math
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfrl.run import files

PROGRESS_FILE = "progress.csv"
EPISODES_FILE = "episodes.csv"
EPISODE_COLUMNS = ("env_steps", "env", "return", "length", "seconds")
"""The columns of episodes.csv: a row for each finished training episode."""
LEVELS_FILE = "levels.csv"
"""The scores of the training levels, with --level-replay."""
EVENT_FILES = "events.out.tfevents.*"
"""The pattern of TensorBoard's event files, of any program."""
_RETURN = "rollout/episode_return"
_FIRST_CARD = "Return/episode_return"  # TensorBoard sorts groups by name, and capital letters come first


class MetricsWriter:
    """The chief's writer. It reports a full disk once through `warn`, and never stops the training.

    Args:
        directory: the run's folder; it exists.
        columns: the metrics with a column in progress.csv, in order. A resumed run keeps the columns of its
            file.
        resume_at: the env steps at which the run resumes. Later rows of an earlier process are removed, and
            TensorBoard drops its later points, so that each exists once. None: the run starts, perhaps again
            after a kill before its first checkpoint, and all earlier rows and points are dropped.
        warn: called with one sentence if something cannot be written.
        step_column: the name of the first column.
        episodes_until: the env steps after which rows of episodes.csv are removed; None: `resume_at`. It is
            later if an evaluation is pending, because the episodes of that update are written already.

    Attributes:
        has_gap: True if a write has failed.
    """

    def __init__(
        self,
        directory: Path,
        columns: Sequence[str],
        *,
        resume_at: int | None,
        warn: Callable[[str], None],
        step_column: str = "env_steps",
        episodes_until: int | None = None,
    ) -> None:
        self._directory = directory
        self._warn = warn
        self.has_gap = False
        last_step = -1 if resume_at is None else resume_at
        with self._going_on():
            _trim_csv(directory / PROGRESS_FILE, last_step)
        kept = [] if resume_at is None else _read_columns(directory / PROGRESS_FILE)
        self._columns = kept or [step_column, *columns]
        self._rows = _RecordFile(directory / PROGRESS_FILE, lambda: _csv_line(self._columns))
        with self._going_on():
            _trim_csv(directory / EPISODES_FILE, last_step if episodes_until is None else episodes_until)
        self._episodes = _RecordFile(directory / EPISODES_FILE, lambda: _csv_line(EPISODE_COLUMNS))
        self._events = EventFile(directory, first_step=last_step + 1)

    def write(self, env_steps: int, values: Mapping[str, float]) -> None:
        """Adds one row to progress.csv and one point to each curve; a NaN or missing value is left out.

        A metric without a column in progress.csv gets a new column, which is empty in earlier rows.
        """
        known = {name: float(value) for name, value in values.items() if not math.isnan(value)}
        with self._going_on():
            if new := [name for name in values if name not in self._columns[1:]]:
                self._add_columns(new)
            cells = [f"{known[name]:.9g}" if name in known else "" for name in self._columns[1:]]
            self._rows.append(_csv_line([str(env_steps), *cells]))
        self.scalars(env_steps, known)

    def scalars(self, env_steps: int, values: Mapping[str, float]) -> None:
        """Adds one point to each curve, and no row to progress.csv; a NaN is left out."""
        with self._going_on():
            self._events.scalars(env_steps, values)

    def episodes(self, rows: Sequence[tuple[int, int, float, float]], seconds: float) -> None:
        """Adds finished training episodes to episodes.csv: env steps, env, return, length of each.

        `seconds` are those of training at the end of the update. Env steps grow from row to row.
        """
        if not rows:
            return
        lines = (
            f"{steps},{env},{value:.9g},{length:.0f},{seconds:.2f}\n" for steps, env, value, length in rows
        )
        with self._going_on():
            self._episodes.append("".join(lines).encode())

    def text(self, tag: str, markdown: str, step: int) -> None:
        """Shows Markdown in TensorBoard's Text tab."""
        from tensorboard.plugins.text.summary_v2 import text_pb

        with self._going_on():
            self._events.add(step, text_pb(tag, markdown))

    def graph(self, graph_def: Any) -> None:
        """Shows a TensorFlow GraphDef in TensorBoard's Graphs tab."""
        with self._going_on():
            self._events.append(_event_record(graph_def=graph_def.SerializeToString()))

    def summaries(self, env_steps: int, summaries: Sequence[Any]) -> None:
        """Adds summaries of TensorBoard."""
        with self._going_on():
            self._events.add(env_steps, *summaries)

    def describe(self, settings: str) -> None:
        """Shows the command of this process and its settings, YAML, in TensorBoard's Text tab."""
        command = shlex.join(["python", *sys.orig_argv[1:]])
        for tag, content in (("command", command), ("settings", settings)):
            self.text(tag, f"```\n{content}\n```", 0)

    def hyperparameters(self, settings: Mapping[str, Any]) -> None:
        """Shows settings in TensorBoard's HParams tab; None and mappings as text."""
        from tensorboard.plugins.hparams import summary_v2 as hparams

        values = {
            name: str(value) if value is None or isinstance(value, dict) else value
            for name, value in settings.items()
        }
        # TensorBoard would show trials of one name as one, and cuts off the ends of long names.
        run = self._directory.resolve()
        with self._going_on():
            self._events.add(0, hparams.hparams_pb(values, trial_id=f"{run.name} in {run.parent}"))

    def flush(self) -> None:
        """Syncs all files. Call it before a checkpoint, so that metrics are never older than it."""
        with self._going_on():
            self._rows.sync()
            self._episodes.sync()
            self._events.sync()

    def close(self) -> None:
        """Syncs and closes the files."""
        self.flush()
        self._rows.close()
        self._episodes.close()
        self._events.close()

    def _add_columns(self, names: Sequence[str]) -> None:
        """Writes progress.csv anew with more columns, whole or not at all. Raises OSError."""
        path, columns = self._directory / PROGRESS_FILE, [*self._columns, *names]
        if path.exists():
            with path.open(newline="") as file:
                rows = list(csv.reader(file))[1:]
            empty = [""] * len(names)
            files.write(path, b"".join(map(_csv_line, [columns, *([*row, *empty] for row in rows)])))
        self._rows.close()
        self._columns, self._rows = columns, _RecordFile(path, lambda: _csv_line(columns))

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self.has_gap:
                self.has_gap = True
                self._warn(
                    f"The metrics in {self._directory} cannot be written ({files.reason(error)}); "
                    "training continues, and their curves will have a gap."
                )


class NullMetricsWriter:
    """The writer of workers other than the chief; it has the same methods and writes nothing."""

    has_gap = False

    def _skip(self, *_: Any, **__: Any) -> None:
        """Does nothing."""

    write = episodes = scalars = text = graph = summaries = describe = hyperparameters = flush = close = _skip


class _RecordFile:
    """A file that grows by whole, unbuffered records; it is made at its first record."""

    def __init__(self, path: Path, head: Callable[[], bytes]) -> None:
        self._path = path
        self._head = head  # gives the first bytes of the file
        self._file: io.FileIO | None = None
        self._is_named = False  # on the disk, in its folder

    def append(self, record: bytes) -> None:
        """Writes the record, or leaves the file as it was and raises OSError."""
        if self._file is None:
            self._file = io.FileIO(self._path, "a")
        size = os.fstat(self._file.fileno()).st_size
        rest = memoryview(record if size else self._head() + record)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), size)
            raise

    def sync(self) -> None:
        """Syncs the records, and the first time also the file's name. Raises OSError."""
        if self._file is None:
            return
        os.fsync(self._file.fileno())
        if not self._is_named:
            files.sync_folder(self._path.parent)
            self._is_named = True

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


class EventFile(_RecordFile):
    """An event file of this process in the run's folder.

    Args:
        directory: the run's folder.
        first_step: TensorBoard forgets the points of earlier files from this step on; None: it forgets none.
    """

    def __init__(self, directory: Path, first_step: int | None = None) -> None:
        # A name that no other process uses, sorted after those of earlier seconds.
        own = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.tfrl"
        super().__init__(
            directory / EVENT_FILES.replace("*", own), functools.partial(_first_records, first_step)
        )

    def scalars(self, env_steps: int, values: Mapping[str, float]) -> None:
        """Adds one point to each curve; a NaN is left out. Raises OSError, and leaves the file as it was.

        TensorBoard gets the return once more, in its first group.
        """
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb

        known = {name: float(value) for name, value in values.items() if not math.isnan(value)}
        if _RETURN in known:
            known[_FIRST_CARD] = known[_RETURN]
        self.add(env_steps, *(scalar_pb(name, value) for name, value in known.items()))

    def add(self, step: int, *summaries: Any) -> None:
        """Adds summaries in one record. Raises OSError, and leaves the file as it was."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[value for part in summaries for value in part.value])
        self.append(_event_record(step=step, summary=summary))


def logged_steps(progress: Path) -> int:
    """The steps (usually env steps) of the last complete row of progress.csv; 0 without rows."""
    try:
        lines = progress.read_bytes().splitlines(keepends=True)
    except OSError:
        return 0
    steps = [line.split(b",")[0] for line in lines[-2:] if line.endswith(b"\n")]
    return max((int(step) for step in steps if step.isdigit()), default=0)


def first_values(path: Path, names: Iterable[str]) -> dict[str, float]:
    """The first number of each of these columns of a progress.csv; a column without numbers is left out."""
    found: dict[str, float] = {}
    wanted = set(names)
    with contextlib.suppress(OSError, csv.Error), path.open(newline="", errors="replace") as file:
        rows = csv.DictReader(file)
        wanted &= {*(rows.fieldnames or ())}
        for row in rows:
            with contextlib.suppress(ValueError):  # a row that a kill has cut off
                found |= {name: float(row[name]) for name in wanted if row[name]}
            wanted -= found.keys()
            if not wanted:
                break
    return found


def _csv_line(cells: Sequence[str]) -> bytes:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue().encode()


def _read_columns(path: Path) -> list[str]:
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            return next(csv.reader(file), [])
    except (OSError, csv.Error):
        return []


def _trim_csv(path: Path, last_step: int) -> None:
    """Cuts progress.csv or episodes.csv after the last whole row of at most `last_step`.

    Steps only grow, so one `truncate` is enough. It works on a full disk, and a kill cannot interrupt it.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        head = file.readline()
        size = len(head) if head.endswith(b"\n") and last_step >= 0 else 0
        for row in file if size else ():
            step = row.split(b",", 1)[0]
            if not row.endswith(b"\n") or not step.isdigit() or int(step) > last_step:
                break
            size += len(row)
    os.truncate(path, size)


def _first_records(first_step: int | None) -> bytes:
    """The first records of an event file; see `EventFile`."""
    from tensorboard.compat.proto.event_pb2 import SessionLog

    version = _event_record(file_version="brain.Event:2")
    if first_step is None:
        return version
    return version + _event_record(step=first_step, session_log=SessionLog(status=SessionLog.START))


def _event_record(**fields: Any) -> bytes:
    """The record of an Event with the present time and these fields."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    record = io.BytesIO()
    RecordWriter(record).write(Event(wall_time=time.time(), **fields).SerializeToString())
    return record.getvalue()
