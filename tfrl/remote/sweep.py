"""Sweeps on Ray Tune: each trial is a run folder, made by the command in a process of its own."""

from __future__ import annotations

import contextlib
import csv
import ctypes
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tfrl.cli.errors import UserError
from tfrl.config.sweep import Sampled, Sweep
from tfrl.remote.cluster import Cluster, end_with_parent
from tfrl.workers import machine

os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")  # the runs have files of their own
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")

try:
    from ray import tune
    from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, PopulationBasedTraining
except ImportError:
    raise UserError(
        "sweeps need Ray Tune, of which packages are missing: pip install -r requirements-ray.txt"
    ) from None

_STATE = "ray-tune"  # in the sweep's folder
_OUTPUT = "output.txt"  # in a run's folder: what it would have shown
_POLL_EVERY = 0.5  # seconds
_IN_USE = 60  # tries of a run whose process before is still saving
_PATIENCE = 300.0  # seconds for the runs of a sweep that was told to stop
_MARK = "TFRL_SWEEP"
_PR_SET_PDEATHSIG = 1


class Outcome(NamedTuple):
    """The end of a trial.

    Attributes:
      name: of the trial.
      run: the folder of its run, the last one where it has gone on from another's.
      settings: the run's own.
      value: of the metric; None where there is none.
      env_steps: at which it had it, with those that its weights had before.
      error: why it failed, in a line; None if it did not.
    """

    name: str
    run: Path
    settings: Mapping[str, Any]
    value: float | None
    env_steps: int
    error: str | None


class _Part(NamedTuple):
    """A run of a trial: the weights that it began with, if they are of another, and how far it is told of."""

    run: str
    offset: int  # env steps that its weights had before
    start: str | None  # the run that they are of
    seen: int  # its own env steps whose metric is reported


def run(sweep: Sweep, logdir: Path, parallel: int, tell: Callable[[str], None]) -> tuple[list[Outcome], int]:
    """Runs the trials, or goes on with them; how each ended, and the signal that broke the sweep off, or 0.

    Args:
      sweep: the trials.
      logdir: an absolute path, the sweep's alone.
      parallel: trials side by side, which share the cores.
      tell: gets a sentence for each trial that ends.
    """
    mark = uuid.uuid4().hex
    environment = {**os.environ, _MARK: mark} | _threads(max(1, machine.cores() // parallel))
    place, folder = str(logdir), str(Path.cwd())

    def trial(config: dict[str, Any]) -> None:
        _Trial(sweep, Path(place), config["settings"], environment, folder).run()

    cluster = Cluster(None, {"--parallel": parallel}, 0)
    try:
        tuner = _tuner(sweep, logdir, tune.with_resources(trial, {"cpu": 1}), tell)
        with _signals() as told:
            results = tuner.fit()
        return [_outcome(result, sweep, logdir) for result in results], told()
    finally:
        cluster.close()
        _wait_for_runs(mark)


def _tuner(sweep: Sweep, logdir: Path, trainable: Any, tell: Callable[[str], None]) -> tune.Tuner:
    """A sweep as it was left, or a new one."""
    state = str(logdir / _STATE)
    if tune.Tuner.can_restore(state):
        return tune.Tuner.restore(state, trainable, resume_unfinished=True, restart_errored=True)
    trials = [dict(trial) for trial in sweep.trials]
    return tune.Tuner(
        trainable,
        param_space={
            "trial": tune.grid_search(list(range(len(trials)))),
            "settings": tune.sample_from(lambda config: trials[config["trial"]]),
        },
        tune_config=tune.TuneConfig(
            scheduler=_scheduler(sweep), trial_name_creator=_name, trial_dirname_creator=_name
        ),
        run_config=tune.RunConfig(
            name=_STATE,
            storage_path=str(logdir),
            verbose=0,
            callbacks=[_Teller(tell)],
            checkpoint_config=tune.CheckpointConfig(num_to_keep=None),  # with fewer, PBT loses trials
        ),
    )


def _name(trial: Any) -> str:
    return f"trial-{trial.config['trial']:03d}"


def _scheduler(sweep: Sweep) -> Any:
    """The scheduler, which compares trials at each evaluation."""
    compared = {"time_attr": "training_iteration", "metric": "value", "mode": "max"}
    if sweep.scheduler == "asha":
        return AsyncHyperBandScheduler(**compared, grace_period=1, reduction_factor=3, max_t=1_000_000)
    if sweep.scheduler == "pbt":
        return PopulationBasedTraining(
            **compared,
            perturbation_interval=1,
            hyperparam_mutations={"settings": {each.name: _domain(each) for each in sweep.sampled}},
            custom_explore_fn=lambda config: _explored(config, sweep.sampled),
        )
    return FIFOScheduler()


def _domain(sampled: Sampled) -> Any:
    if sampled.kind == "choice":
        return list(sampled.values)
    return getattr(tune, sampled.kind)(*map(float, sampled.values))


def _explored(config: dict[str, Any], sampled: tuple[Sampled, ...]) -> dict[str, Any]:
    """Settings that PBT has changed, back between their ends."""
    for each in sampled:
        if each.kind != "choice":
            config["settings"][each.name] = each.inside(config["settings"][each.name])
    return config


class _Teller(tune.Callback):
    """Tells of each trial that ends."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        value = (trial.last_result or {}).get("value")
        self._tell(f"{trial}: done" + ("" if value is None else f", {value:.4g}"))

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._tell(f"{trial}: failed; the others go on")


class _Trial:
    """A trial in a worker of Ray Tune: starts the command, and reports the metric from progress.csv."""

    def __init__(
        self, sweep: Sweep, logdir: Path, own: Mapping[str, Any], environment: Mapping[str, str], folder: str
    ) -> None:
        self._sweep, self._logdir, self._environment, self._folder = sweep, logdir, environment, folder
        self._own = own
        self._name = tune.get_context().get_trial_name()
        self._part = self._next_part()

    def _next_part(self) -> _Part:
        """The run that it goes on with, or one that begins with the weights that PBT gave it."""
        checkpoint = tune.get_checkpoint()
        if checkpoint is None:
            return _Part(self._name, 0, None, -1)
        with checkpoint.as_directory() as folder:
            found = json.loads((Path(folder) / "part.json").read_text())
        part = _Part(*found["part"])
        if found["trial"] == self._name:
            return part
        trained = part.offset + part.seen
        return _Part(f"{self._name}-at-{trained}", trained, part.run, -1)

    def run(self) -> None:
        """Trains to the end. Raises RuntimeError if the run fails."""
        end_with_parent()
        if self._part.start is not None and self._sweep.total_steps <= self._part.offset:
            return
        for _ in range(_IN_USE):
            code = self._process()
            words = _last_line(self._logdir / self._part.run / _OUTPUT)
            if code == 0:
                return
            if not (code == UserError.exit_code and "is in use" in words):
                raise RuntimeError(words)
            time.sleep(2 * _POLL_EVERY)
        raise RuntimeError(words)

    def _process(self) -> int:
        """Runs the command, and reports meanwhile; its exit code."""
        part, place = self._part, self._logdir / self._part.run
        place.mkdir(parents=True, exist_ok=True)
        words = [*self._sweep.arguments(self._own), "--logdir", str(self._logdir), "--run-name", part.run]
        if part.start is not None:
            words += ["--start-from", str(self._logdir / part.start)]
            words += ["--total-steps", str(self._sweep.total_steps - part.offset)]
        with (place / _OUTPUT).open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", f"tfrl.{self._sweep.algorithm}", *words],
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
            self._report()
        self._report()
        return process.returncode

    def _report(self) -> None:
        """Reports the metric of each row that is new."""
        for env_steps, value in _values(self._logdir / self._part.run / "progress.csv", self._sweep.metric):
            if env_steps <= self._part.seen:
                continue
            self._part = self._part._replace(seen=env_steps)
            metrics = {"value": value, "env_steps": self._part.offset + env_steps, "run": self._part.run}
            with tempfile.TemporaryDirectory() as folder:
                content = json.dumps({"trial": self._name, "part": self._part})
                (Path(folder) / "part.json").write_text(content)
                tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(folder))


def _stop_with_parent() -> None:
    """In a run, before it begins: SIGTERM as soon as the trial's thread has ended, by which it saves."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _values(path: Path, metric: str) -> list[tuple[int, float]]:
    """Env steps and metric of the whole rows of progress.csv that have it."""
    try:
        lines = path.read_text().splitlines(keepends=True)
    except OSError:
        return []
    rows = csv.DictReader(line for line in lines if line.endswith("\n"))
    return [(int(float(row["env_steps"])), float(row[metric])) for row in rows if row.get(metric)]


def _last_line(file: Path) -> str:
    lines = file.read_text(errors="replace").splitlines() if file.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "nothing was said")


def _outcome(result: Any, sweep: Sweep, logdir: Path) -> Outcome:
    name, metrics = Path(result.path).name, result.metrics or {}
    run = logdir / metrics.get("run", name)
    error = None if result.error is None else _last_line(logdir / name / _OUTPUT)
    value, env_steps = metrics.get("value"), metrics.get("env_steps", 0)
    # Ray Tune has no settings of a trial that has reported nothing.
    settings = result.config["settings"] if result.config else sweep.trials[int(name.rpartition("-")[2])]
    return Outcome(name, run, settings, value, env_steps, error)


def _threads(count: int) -> dict[str, str]:
    return {"TF_NUM_INTRAOP_THREADS": str(count), "TF_NUM_INTEROP_THREADS": str(count)}


@contextlib.contextmanager
def _signals() -> Iterator[Callable[[], int]]:
    """Gives a function that tells the first signal that came inside, or 0.

    Ray Tune has a handler of its own for SIGINT, upon which it ends as if all were done; other signals are
    passed on to that.
    """
    ours, pythons = socket.socketpair()
    for end in (ours, pythons):
        end.setblocking(False)
    wakeup = signal.set_wakeup_fd(pythons.fileno(), warn_on_full_buffer=False)
    kinds = (signal.SIGTERM, signal.SIGHUP)
    before = {kind: signal.signal(kind, lambda *_: os.kill(os.getpid(), signal.SIGINT)) for kind in kinds}
    before[signal.SIGINT] = signal.getsignal(signal.SIGINT)
    came = bytearray()
    try:
        yield lambda: next((number for number in came if number in before), 0)
    finally:
        signal.set_wakeup_fd(wakeup)
        for kind, handler in before.items():
            signal.signal(kind, handler)
        with contextlib.suppress(BlockingIOError):
            came += ours.recv(4096)
        ours.close()
        pythons.close()


def _wait_for_runs(mark: str) -> None:
    """Waits until no run of this sweep is left: those that are told to stop save first."""
    marked, end = f"{_MARK}={mark}".encode(), time.monotonic() + _PATIENCE
    while time.monotonic() < end and any(marked in environ for environ in _environments()):
        time.sleep(_POLL_EVERY)


def _environments() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            yield path.read_bytes()


def command_of(sweep: Sweep, settings: Mapping[str, Any]) -> str:
    """The command to type for a run of its own with the settings of a trial."""
    words = ["python", "-m", f"tfrl.{sweep.algorithm}", *sweep.arguments(settings)]
    return shlex.join(words)
