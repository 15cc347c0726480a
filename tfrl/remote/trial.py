"""A trial of a sweep: its runs, each a process of its own, and their evaluations."""

from __future__ import annotations

import ctypes
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tfrl.cli import signals
from tfrl.cli.errors import TrainingError, UserError
from tfrl.cli.settings import SETTINGS_FILE
from tfrl.remote.settings import Sweep, trial_name
from tfrl.reporting import runs
from tfrl.run import files
from tfrl.run.checkpoint import Checkpoint, CheckpointStore
from tfrl.run.folder import LEFT_FILE, RESULTS_FILE, is_held, read_json
from tfrl.run.metrics import PROGRESS_FILE

# In a run's folder:
_OUTPUT = "output.txt"  # the run's stdout and stderr
_PART = "part.json"  # its `Part`, and the trial's settings in it
_POLL_EVERY = 0.5  # seconds
_PR_SET_PDEATHSIG = 1


class Part(NamedTuple):
    """A run of a trial, and its evaluations that were reported to the scheduler.

    Attributes:
      run: the name of its folder.
      start: the folder of its initial weights, relative to the sweep's folder; None: they are random.
      offset: the env steps that those weights were trained for.
      evaluations: the number of reported evaluations, including those of the run that gave the weights.
      seen: the run's env steps at its last reported evaluation; -1 before the first evaluation.
    """

    run: str
    start: str | None = None
    offset: int = 0
    evaluations: int = 0
    seen: int = -1


class Outcome(NamedTuple):
    """The state of a trial, read from its folders.

    Attributes:
      name: the trial's name.
      run: the folder of its newest run.
      state: waiting, running, done, ended early or failed.
      settings: the varied settings of this run.
      env_steps: the env steps that its weights were trained for.
      episode_return: the mean of its last training episodes; NaN before the first one has ended.
      value: the last value of the sweep's metric, or None.
      error: one line that says why it failed, or None.
    """

    name: str
    run: Path
    state: str
    settings: Mapping[str, Any]
    env_steps: int
    episode_return: float
    value: float | None
    error: str | None


class Row(NamedTuple):
    """A row of progress.csv that has the metric."""

    env_steps: int
    value: float


def outcome(sweep: Sweep, logdir: Path, index: int) -> Outcome:
    """The present state of a trial."""
    name = trial_name(index)
    part, settings = current(logdir, name, sweep.trials[index])
    run, error = logdir / part.run, files.read_text(failure_file(logdir, name))
    env_steps, episode_return, rows = part.offset, math.nan, []
    try:
        found = runs.load(run)
    except (UserError, OSError):  # it has not begun
        pass
    else:
        env_steps += found.env_steps
        episode_return = found.training_return(found.env_steps)
        rows = rows_with(run / PROGRESS_FILE, sweep.metric)
    if error is not None:
        state = "failed"
    elif (run / RESULTS_FILE).is_file():
        state = "done"
    elif (run / LEFT_FILE).exists():
        state = "ended early"
    else:
        state = "running" if is_held(run) else "waiting"
    value = rows[-1].value if rows else None
    return Outcome(name, run, state, settings, env_steps, episode_return, value, error)


def failure_file(logdir: Path, name: str) -> Path:
    """The file that says why a trial failed. It exists while the trial counts as failed."""
    return logdir / f"{name}.failed"


def is_over(logdir: Path, name: str) -> bool:
    """True if a trial is done, or the scheduler has ended it."""
    run = _newest(logdir, name)
    return (run / RESULTS_FILE).is_file() or (run / LEFT_FILE).exists()


def current(logdir: Path, name: str, planned: Mapping[str, Any]) -> tuple[Part, Mapping[str, Any]]:
    """The newest part of a trial, with nothing reported yet, and its settings; at first the planned ones."""
    found = read_json(_newest(logdir, name) / _PART)
    return (Part(name), planned) if found is None else (Part(*found["part"]), found["settings"])


def _newest(logdir: Path, name: str) -> Path:
    of_trial = (logdir / name, *logdir.glob(f"{name}-at-*"))
    return max(of_trial, key=lambda run: (not (run / LEFT_FILE).exists(), files.last_change([run / _PART])))


def begin(
    sweep: Sweep, logdir: Path, name: str, own: Mapping[str, Any], reported: Mapping[str, Any] | None
) -> Part:
    """The part with which a trial continues: a new run if the trial got another trial's weights.

    Args:
      sweep, logdir: the sweep and its folder.
      name: the trial's name.
      own: its varied settings.
      reported: the `trial` and `part` that reported the weights to start from; None: the trial or the sweep
        begins.

    Raises:
      TrainingError: the other trial's run has no checkpoint.
    """
    if reported is None:
        part = current(logdir, name, own)[0]
        rows = rows_with(logdir / part.run / PROGRESS_FILE, sweep.metric)
        if sweep.scheduler == "pbt" and len(rows) > 1:  # PBT is to compare the newest evaluation only
            evaluations = part.evaluations + len(rows) - 1
            part = part._replace(seen=rows[-2].env_steps, evaluations=evaluations)
    elif reported["trial"] == name:
        part = Part(*reported["part"])
    else:
        part = _taken_over(logdir, name, Part(*reported["part"]))
    place = logdir / part.run
    if not (place / _PART).exists():
        files.make_folder(place)
        files.write(place / _PART, json.dumps({"part": part, "settings": dict(own)}))
    leave(logdir, name, part.run)
    return part


def _taken_over(logdir: Path, name: str, donor: Part) -> Part:
    """The part that begins with a copy of another trial's weights."""
    found = _evaluated(logdir / donor.run, donor.seen)
    offset, number = donor.offset + found.env_steps, len(list(logdir.glob(f"{name}-at-*")))
    run = logdir / f"{name}-at-{offset}-{number}"
    start = run / f"weights-of-{donor.run}"
    _keep(found, logdir / donor.run, start)
    return Part(run.name, str(start.relative_to(logdir)), offset, donor.evaluations)


def _evaluated(run: Path, env_steps: int) -> Checkpoint:
    """The checkpoint of an evaluation or, if that is pruned, the next one that exists."""
    store = CheckpointStore(run / "checkpoints", keep=1)
    found: list[Checkpoint] = []
    for update in store.updates():
        try:
            found += filter(None, [store.load(lambda sentence: None, update)])
        except UserError:  # pruned since, or damaged
            continue
    if not found:
        raise TrainingError(f"{run} has no checkpoint for another trial to start from")
    return next((each for each in found if each.env_steps >= env_steps), found[-1])


def _keep(found: Checkpoint, run: Path, place: Path) -> None:
    """Copies a checkpoint's learner for --start-from, because its own run continues and prunes it."""
    files.make_folder(place)
    files.write(place / SETTINGS_FILE, (run / SETTINGS_FILE).read_text())
    store = CheckpointStore(place / "checkpoints", keep=1)
    store.save(found.update, learner=found.learner, worker_part={}, env_steps=found.env_steps)


def leave(logdir: Path, name: str, current: str | None) -> None:
    """Marks the runs of a trial that the sweep does not continue: all but the current one; None: all."""
    for run in (logdir / name, *logdir.glob(f"{name}-at-*")):
        if run.name == current:
            (run / LEFT_FILE).unlink(missing_ok=True)
        elif run.is_dir():
            (run / LEFT_FILE).touch()


class Trial:
    """Runs the command of a part, and reports each evaluation.

    The last evaluation is reported when the run has ended, so that a scheduler does not continue a trial that
    has all its steps.

    Args:
      sweep, logdir: the sweep and its folder.
      own: the trial's varied settings.
      part: the run.
      environment, folder: the environment variables and the working folder of its process.
      tell: gets the part and a dict of the evaluation: `value` of the metric, `env_steps` and `evaluations`
        of the weights, `run` and, with the last one, `done` and `finished`.
    """

    def __init__(
        self,
        sweep: Sweep,
        logdir: Path,
        own: Mapping[str, Any],
        part: Part,
        *,
        environment: Mapping[str, str],
        folder: str,
        tell: Callable[[Part, Mapping[str, Any]], None],
    ) -> None:
        self._sweep, self._logdir, self._own, self._part = sweep, logdir, own, part
        self._environment, self._folder, self._tell = environment, folder, tell
        self._place = logdir / part.run

    def run(self) -> None:
        """Trains to the end. Raises TrainingError if the run does not reach it."""
        if not self._is_finished:
            code = self._process()
            if not (code == 0 and self._is_finished):
                raise TrainingError(_reason(code, files.last_line(self._place / _OUTPUT)))
        self._tell_last()

    @property
    def _is_finished(self) -> bool:
        return (self._place / RESULTS_FILE).is_file()

    def _process(self) -> int:
        """Runs the command and reports its evaluations; returns its exit code."""
        self._place.mkdir(parents=True, exist_ok=True)
        with (self._place / _OUTPUT).open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", f"tfrl.{self._sweep.algorithm}", *self._flags()],
                cwd=self._folder,
                env=dict(self._environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_stop_with_parent,
            )
        while process.poll() is None:
            time.sleep(_POLL_EVERY)
            self._tell_new()
        return process.returncode

    def _flags(self) -> list[str]:
        part, flags = self._part, self._sweep.arguments(self._own)
        flags += ["--logdir", str(self._logdir), "--run-name", part.run]
        if part.start is not None:
            one_update = self._sweep.config(self._own).steps_per_update  # a run has one at least
            left = max(one_update, self._sweep.total_steps - part.offset)
            flags += ["--start-from", str(self._logdir / part.start), "--total-steps", str(left)]
        return flags

    def _tell_new(self) -> None:
        """Reports each new evaluation except the last."""
        for row in self._rows():
            if self._part.seen < row.env_steps < self._sweep.total_steps - self._part.offset:
                self._tell_row(row, self._part.evaluations + 1)

    def _tell_last(self) -> None:
        rows = self._rows()
        if rows:
            new = sum(row.env_steps > self._part.seen for row in rows)
            self._tell_row(rows[-1], self._part.evaluations + new, done=True, finished=True)

    def _tell_row(self, row: Row, evaluations: int, **marks: bool) -> None:
        self._part = self._part._replace(seen=row.env_steps, evaluations=evaluations)
        env_steps = self._part.offset + row.env_steps
        metrics = {"value": row.value, "env_steps": env_steps, "evaluations": evaluations}
        self._tell(self._part, {**metrics, "run": self._part.run, **marks})

    def _rows(self) -> list[Row]:
        return rows_with(self._place / PROGRESS_FILE, self._sweep.metric)


def _stop_with_parent() -> None:
    """Called in the run's process before it begins: Linux sends it SIGTERM when the trial's thread ends.

    It lets signals through, which the process of Ray that starts it blocks.
    """
    signals.let_through()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _reason(code: int, words: str) -> str:
    """Words for why a run has not reached its end."""
    if code < 0:
        return f"killed by signal {-code}"
    return (
        "stopped by its stop file; the same command continues" if code == 0 else words or "nothing was said"
    )


def rows_with(path: Path, metric: str) -> list[Row]:
    """The complete rows of a progress.csv that have a number for the metric."""
    progress = runs.read_progress(path)
    pairs = zip(progress[runs.STEPS], progress.get(metric, ()), strict=False)
    return [Row(int(env_steps), float(value)) for env_steps, value in pairs if math.isfinite(value)]
