"""Sweeps on Ray Tune: each trial is a run folder, made by the command in a process of its own."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import random
import shlex
import shutil
import signal
import socket
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from tfrl.cli import signals
from tfrl.cli.errors import UserError
from tfrl.config.actors import how_to_install_ray
from tfrl.config.sweep import Sampled, Sweep
from tfrl.remote.cluster import Cluster, end_with_parent
from tfrl.remote.trial import Outcome, Part, Trial, leave, next_part
from tfrl.run.folder import read_json
from tfrl.workers import machine

os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")  # the runs have files of their own
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
os.environ.setdefault("RAY_kill_child_processes_on_worker_exit", "0")  # by SIGKILL; runs are to save

try:
    from ray import tune
    from ray.tune.progress_reporter import TrialProgressCallback
    from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, PopulationBasedTraining
except ImportError:
    raise UserError(f"sweeps need Ray Tune, of which packages are missing: {how_to_install_ray()}") from None

# A trial that fails is told in our words; these two would add pages of their own.
for _name in ("ray.tune", "ray.train"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)
warnings.filterwarnings("ignore", message="Consider boosting PBT performance")

_STATE = "ray-tune"  # in the sweep's folder
_PART = "part.json"  # in what Ray Tune takes for a trial's checkpoint
_FAILURE = "failure.json"  # in Ray Tune's folder of a trial
_POLL_EVERY = 0.5  # seconds
_PATIENCE = 300.0  # seconds for the runs of a sweep that was told to stop
_MARK = "TFRL_SWEEP"
_LOOP = threading.Event()  # Ray Tune has begun to run trials


def run(sweep: Sweep, logdir: Path, parallel: int, tell: Callable[[str], None]) -> tuple[list[Outcome], int]:
    """Runs the trials, or goes on with them; how each ended, and the signal that broke the sweep off, or 0.

    Args:
      sweep: the trials.
      logdir: an absolute path, the sweep's alone.
      parallel: trials side by side, which share the cores.
      tell: gets a sentence for each trial that ends, and where it has to wait.
    """
    mark = uuid.uuid4().hex
    environment = {**os.environ, _MARK: mark} | _threads(max(1, machine.cores() // parallel))
    place, folder = str(logdir), str(Path.cwd())

    def trial(config: dict[str, Any]) -> None:
        _run_trial(sweep, Path(place), config["settings"], environment, folder)

    with _Stopping() as stopping:
        try:
            cluster = Cluster(None, {"--parallel": parallel}, 0)
            try:
                results = _tuner(sweep, logdir, tune.with_resources(trial, {"cpu": 1}), tell).fit()
                return [_outcome(result, sweep, logdir) for result in results], stopping.first
            finally:
                cluster.close()
                _wait_for_runs(mark, tell)
        except SystemExit:
            if not stopping.first:
                raise
            return [], stopping.first


def _run_trial(
    sweep: Sweep, logdir: Path, own: Mapping[str, Any], environment: Mapping[str, str], folder: str
) -> None:
    """Runs a trial, or goes on with it, in a worker of Ray Tune."""
    end_with_parent()
    name = tune.get_context().get_trial_name()
    failure = logdir / _STATE / name / _FAILURE
    failure.unlink(missing_ok=True)
    part = Part(name)

    def report(told: Part, metrics: Mapping[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as place:
            (Path(place) / _PART).write_text(json.dumps({"trial": name, "part": told}))
            tune.report(dict(metrics), checkpoint=tune.Checkpoint.from_directory(place))

    try:
        part = next_part(logdir, name, own, _told())
        leave(logdir, name, part.run)
        Trial(sweep, logdir, own, part, environment=environment, folder=folder, tell=report).run()
    except Exception as error:
        failure.parent.mkdir(parents=True, exist_ok=True)
        failure.write_text(json.dumps({"run": part.run, "words": str(error) or type(error).__name__}))
        raise


def _told() -> Mapping[str, Any] | None:
    """The part of the checkpoint that Ray Tune gives a trial to go on from."""
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as place:
        return json.loads((Path(place) / _PART).read_text())


def _tuner(sweep: Sweep, logdir: Path, trainable: Any, tell: Callable[[str], None]) -> tune.Tuner:
    """A sweep as it was left, or a new one.

    Where Ray Tune was killed before it had written all it needs, trials begin anew for it, but not for us:
    their runs go on from their folders.
    """
    state = logdir / _STATE
    if _is_whole(state):
        return tune.Tuner.restore(str(state), trainable, resume_unfinished=True, resume_errored=True)
    shutil.rmtree(state, ignore_errors=True)
    trials, scheduler = [dict(trial) for trial in sweep.trials], _scheduler(sweep)
    return tune.Tuner(
        trainable,
        param_space={
            "trial": tune.grid_search(list(range(len(trials)))),
            "settings": tune.sample_from(lambda config: trials[config["trial"]]),
        },
        tune_config=tune.TuneConfig(
            scheduler=scheduler, trial_name_creator=_name, trial_dirname_creator=_name
        ),
        run_config=tune.RunConfig(
            name=_STATE,
            storage_path=str(logdir),
            verbose=0,
            callbacks=[_Teller(logdir, tell, scheduler)],
            checkpoint_config=tune.CheckpointConfig(num_to_keep=None),  # with fewer, PBT loses trials
        ),
    )


def _is_whole(state: Path) -> bool:
    """Whether Ray Tune can go on from its files, which it does not write all at once."""
    newest = max(state.glob("experiment_state-*.json"), default=None)
    try:
        for path in state.glob("*.pkl"):
            pickle.loads(path.read_bytes())
        return newest is not None and bool(json.loads(newest.read_text()))
    except Exception:  # a pickle that was cut off may raise any
        return False


def _name(trial: Any) -> str:
    return f"trial-{trial.config['trial']:03d}"


def _scheduler(sweep: Sweep) -> Any:
    """The scheduler, which compares trials at each evaluation."""
    compared = {"time_attr": "evaluations", "metric": "value", "mode": "max"}
    if sweep.scheduler == "asha":
        return AsyncHyperBandScheduler(**compared, grace_period=1, reduction_factor=3, max_t=1_000_000)
    if sweep.scheduler == "pbt":
        return PopulationBasedTraining(
            **compared,
            perturbation_interval=1,
            hyperparam_mutations={"settings": {each.name: _domain(each) for each in sweep.sampled}},
            custom_explore_fn=lambda config: _explored(config, sweep),
        )
    return FIFOScheduler()


def _domain(sampled: Sampled) -> Any:
    if sampled.kind == "choice":
        return list(sampled.values)
    return getattr(tune, sampled.kind)(*map(float, sampled.values))


def _explored(config: dict[str, Any], sweep: Sweep) -> dict[str, Any]:
    """Settings that PBT has changed, between their ends; a planned trial's, if these cannot be together."""
    for each in sweep.sampled:
        if each.kind != "choice":
            config["settings"][each.name] = each.inside(config["settings"][each.name])
    if not sweep.is_possible(config["settings"]):
        config["settings"] = dict(random.choice(sweep.trials))
    return config


class _Teller(TrialProgressCallback):
    """Tells of each trial that ends, in the place of Ray Tune's own; keeps what the scheduler knows.

    A run that the scheduler ends gets a mark, so that nobody takes it for one that was cut off.

    Ray Tune saves the state of its callbacks, and not that of its scheduler.
    """

    def __init__(self, logdir: Path, tell: Callable[[str], None], scheduler: Any) -> None:
        super().__init__()
        self._logdir, self._tell, self._scheduler = logdir, tell, scheduler

    def setup(self, *_: Any, **__: Any) -> None:
        _LOOP.set()

    def on_trial_result(self, *_: Any, **__: Any) -> None:
        """Says nothing."""

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        last = trial.last_result or {}
        is_done = last.get("finished") or "value" not in last
        if not is_done:
            leave(self._logdir, str(trial), None)
        words = "done" if is_done else "ended early"
        self._tell(f"{trial}: {words}" + (f", {last['value']:.4g}" if "value" in last else ""))

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._tell(f"{trial}: failed; the others go on")

    def get_state(self) -> dict[str, bytes] | None:
        if not isinstance(self._scheduler, AsyncHyperBandScheduler):
            return None  # PBT's trials each tell again before they are compared
        with tempfile.TemporaryDirectory() as folder:
            self._scheduler.save(str(Path(folder) / "scheduler"))
            return {"scheduler": (Path(folder) / "scheduler").read_bytes()}

    def set_state(self, state: dict[str, bytes]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "scheduler").write_bytes(state["scheduler"])
            self._scheduler.restore(str(Path(folder) / "scheduler"))


def _outcome(result: Any, sweep: Sweep, logdir: Path) -> Outcome:
    name, metrics = Path(result.path).name, result.metrics or {}
    run, error = metrics.get("run", name), None
    if result.error is not None:
        failure = read_json(logdir / _STATE / name / _FAILURE) or {}
        run, error = failure.get("run", run), failure.get("words", "its process on Ray was killed")
    value, env_steps = metrics.get("value"), metrics.get("env_steps", 0)
    # Ray Tune has no settings of a trial that has reported nothing.
    settings = result.config["settings"] if result.config else sweep.trials[int(name.rpartition("-")[2])]
    return Outcome(name, logdir / run, settings, value, env_steps, error)


def _threads(count: int) -> dict[str, str]:
    return {"TF_NUM_INTRAOP_THREADS": str(count), "TF_NUM_INTEROP_THREADS": str(count)}


class _Stopping:
    """Heeds the signals that tell a sweep to stop: the first one alone, until all its runs have saved.

    Ray Tune has a handler of its own for SIGINT, upon which it ends as if all were done, and puts back the
    one before it, which is ours. Other signals are passed on to that. Before it is there nothing is under
    way, and a SystemExit ends it; afterwards there is nothing left to ask for.

    Attributes:
      first: the number of the first signal that has come; 0 before it.
    """

    def __enter__(self) -> _Stopping:
        _LOOP.clear()
        self._came = bytearray()
        self._ours, self._pythons = socket.socketpair()
        for end in (self._ours, self._pythons):
            end.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._pythons.fileno(), warn_on_full_buffer=False)
        self._before = {kind: signal.signal(kind, self._take) for kind in signals.heeded()}
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for kind, handler in self._before.items():
            signal.signal(kind, handler)
        self._ours.close()
        self._pythons.close()

    @property
    def first(self) -> int:
        with contextlib.suppress(BlockingIOError):
            self._came += self._ours.recv(4096)
        return next((number for number in self._came if number in self._before), 0)

    def _take(self, number: int, frame: FrameType | None) -> None:
        rays = signal.getsignal(signal.SIGINT)
        if rays != self._take:
            rays(signal.SIGINT, frame)
        elif not _LOOP.is_set():
            raise SystemExit(signals.STOP_CODES[number])


def _wait_for_runs(mark: str, tell: Callable[[str], None]) -> None:
    """Waits until no run of this sweep is left: those that are told to stop save first."""
    marked, end, told = f"{_MARK}={mark}".encode(), time.monotonic() + _PATIENCE, False
    while time.monotonic() < end and any(marked in environ for environ in _environments()):
        if not told:
            tell("waiting until the trials have saved")
            told = True
        time.sleep(_POLL_EVERY)


def _environments() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            yield path.read_bytes()


def command_of(sweep: Sweep, settings: Mapping[str, Any]) -> str:
    """The command to type for a run of its own with the settings of a trial."""
    words = ["python", "-m", f"tfrl.{sweep.algorithm}", *sweep.arguments(settings)]
    return shlex.join(words)
