"""Sweeps on Ray Tune, which runs the trials and compares them. Their results are in their run folders.

No state of Ray Tune is kept: a sweep that continues reads its runs, and gives Ray Tune the unfinished ones.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

from tfrl.cli import endings
from tfrl.remote.cluster import Cluster, check_gpus, end_with_parent, ray
from tfrl.remote.trials import (
    Sampled,
    Sweep,
    TrialRun,
    begin,
    current,
    failure_file,
    is_over,
    leave,
    rows_with,
    run_to_end,
    trial_name,
)
from tfrl.run import files
from tfrl.run.folder import is_held
from tfrl.workers import machine

os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")  # the runs have files of their own
os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")  # it would end the sweep as if all were done
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
_SAVING = {"RAY_kill_child_processes_on_worker_exit": "0"}  # SIGKILL would keep runs from saving
for _variable in _SAVING.items():
    os.environ.setdefault(*_variable)

from ray import tune  # noqa: E402
from ray.tune.progress_reporter import TrialProgressCallback  # noqa: E402
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, PopulationBasedTraining  # noqa: E402

# `_Teller` reports a failed trial in one line; these loggers would add pages.
for _logger in ("ray.tune", "ray.train"):
    logging.getLogger(_logger).setLevel(logging.CRITICAL)
warnings.filterwarnings("ignore", message="Consider boosting PBT performance")

_TRIAL_RUN = "part.json"  # in what Ray Tune takes for a trial's checkpoint
_POLL_EVERY = 0.5  # seconds
_PATIENCE = 300.0  # seconds for the runs of a sweep that was told to stop


def run(
    sweep: Sweep,
    logdir: Path,
    parallel: int,
    tell: Callable[[str], None],
    *,
    address: str | None = None,
    gpus: float = 0.0,
) -> int:
    """Runs the trials that are not over. Returns the signal that stopped the sweep, or 0.

    Args:
      sweep: the trials.
      logdir: the sweep's own folder, an absolute path.
      parallel: the number of trials at a time, which share the cores.
      tell: gets a sentence for each trial that ends, and for a wait.
      address: that of a Ray whose nodes see `logdir`, or auto; None: this machine, with a Ray of the sweep.
      gpus: the GPUs of a trial; 0: it uses all that it sees.

    Raises UserError if Ray cannot be reached, or has too few CPUs or GPUs.
    """
    place, folder, stopped = str(logdir), str(Path.cwd()), [0]
    # Other nodes read and write Ray Tune's own files, too.
    shared = None if address is None else logdir
    scratch = tempfile.TemporaryDirectory(prefix="tfrl-tune-", dir=shared, ignore_cleanup_errors=True)
    with scratch as states, _stopping(stopped):
        try:
            _wait_for_runs(logdir, tell)  # they still save if the sweep was killed
            left = [i for i in range(len(sweep.trials)) if not is_over(logdir, trial_name(i))]
            if left:
                cluster = Cluster(address, {"--parallel": parallel}, 0, _SAVING)
                try:
                    check_gpus("--gpus-per-trial", gpus)
                    cpus = 1 if address is None else _cpus_each(parallel)
                    threads = max(1, machine.cores() // parallel) if address is None else cpus
                    environment = {**os.environ} | {
                        f"TF_NUM_{kind}_THREADS": str(threads) for kind in ("INTRAOP", "INTEROP")
                    }

                    def trial(config: dict[str, Any]) -> None:
                        # Ray has chosen the trial's GPUs, in this variable of its worker.
                        chosen = {n: os.environ[n] for n in ("CUDA_VISIBLE_DEVICES",) if gpus}
                        own = environment | chosen
                        _run_trial(sweep, Path(place), config["settings"], own, folder)

                    trainable = tune.with_resources(trial, {"cpu": cpus, "gpu": gpus})
                    _tuner(sweep, logdir, left, trainable, states, tell).fit()
                finally:
                    cluster.close()
        except SystemExit:
            if not stopped[0]:
                raise
        finally:
            _wait_for_runs(logdir, tell)
    return stopped[0]


def _cpus_each(parallel: int) -> int:
    """The most CPUs for each trial with which Ray's nodes hold `parallel` trials at a time."""
    nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    fitting = (n for n in range(max(nodes), 0, -1) if sum(cpus // n for cpus in nodes) >= parallel)
    return next(fitting, 1)


@contextmanager
def _stopping(stopped: list[int]) -> Iterator[None]:
    """Stops the sweep at the first signal, and ignores further ones until all its runs have saved.

    Ray Tune ends at SIGUSR1. Before it listens to SIGUSR1, no trial runs, and a SystemExit ends the sweep.

    Args:
      stopped: gets the number of the first signal as its only element.
    """

    def take(number: int, frame: FrameType | None) -> None:
        if endings.waits(number) or stopped[0]:
            return
        stopped[0] = number
        of_tune = signal.getsignal(signal.SIGUSR1)
        if not callable(of_tune):
            raise SystemExit(endings.STOP_CODES[number])
        of_tune(signal.SIGUSR1, frame)

    before = {kind: signal.signal(kind, take) for kind in endings.heeded()}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def _wait_for_runs(logdir: Path, tell: Callable[[str], None]) -> None:
    """Waits until all runs of this sweep have ended: runs that were told to stop save first."""
    end, told = time.monotonic() + _PATIENCE, False
    while time.monotonic() < end and any(is_held(path) for path in logdir.glob("trial-*/")):
        if not told:
            tell("waiting until the trials have saved")
            told = True
        time.sleep(_POLL_EVERY)


def _run_trial(
    sweep: Sweep, logdir: Path, own: Mapping[str, Any], environment: Mapping[str, str], folder: str
) -> None:
    """Runs or continues a trial, in a worker of Ray Tune."""
    end_with_parent()
    name = tune.get_context().get_trial_name()
    failure = failure_file(logdir, name)
    failure.unlink(missing_ok=True)

    def report(run: TrialRun, metrics: Mapping[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as place:
            (Path(place) / _TRIAL_RUN).write_text(json.dumps({"trial": name, "part": run}))
            tune.report(dict(metrics), checkpoint=tune.Checkpoint.from_directory(place))

    try:
        run = begin(sweep, logdir, name, own, _reported())
        run_to_end(sweep, logdir, own, run, environment=environment, folder=folder, tell=report)
    except Exception as error:
        files.write(failure, str(error) or type(error).__name__)
        raise


def _reported() -> Mapping[str, Any] | None:
    """The content of the checkpoint from which Ray Tune lets a trial continue."""
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as place:
        return json.loads((Path(place) / _TRIAL_RUN).read_text())


def _tuner(
    sweep: Sweep, logdir: Path, left: list[int], trainable: Any, states: str, tell: Callable[[str], None]
) -> tune.Tuner:
    """Ray Tune for the trials of these indices, with their present settings."""
    own = {index: current(logdir, trial_name(index), sweep.trials[index])[1] for index in left}
    return tune.Tuner(
        trainable,
        param_space={
            "trial": tune.grid_search(left),
            "settings": tune.sample_from(lambda config: dict(own[config["trial"]])),
        },
        tune_config=tune.TuneConfig(
            scheduler=_scheduler(sweep, logdir, left), trial_name_creator=_name, trial_dirname_creator=_name
        ),
        run_config=tune.RunConfig(
            name="sweep",
            storage_path=states,
            verbose=0,
            callbacks=[_Teller(logdir, tell)],
            checkpoint_config=tune.CheckpointConfig(num_to_keep=None),  # with fewer, PBT loses trials
        ),
    )


def _name(trial: Any) -> str:
    return trial_name(trial.config["trial"])


def _scheduler(sweep: Sweep, logdir: Path, left: list[int]) -> Any:
    """The scheduler, which compares trials at each evaluation; ASHA also with trials that are over."""
    compared: dict[str, Any] = {"time_attr": "evaluations", "metric": "value", "mode": "max"}
    if sweep.scheduler == "pbt":
        return PopulationBasedTraining(
            **compared,
            perturbation_interval=1,
            hyperparam_mutations={"settings": {each.name: _domain(each) for each in sweep.sampled}},
            custom_explore_fn=lambda config: _explored(config, sweep),
        )
    if sweep.scheduler == "none":
        return FIFOScheduler()
    asha: Any = AsyncHyperBandScheduler(**compared, grace_period=1, reduction_factor=3, max_t=1_000_000)
    for name in (trial_name(index) for index in range(len(sweep.trials)) if index not in left):
        over = SimpleNamespace(trial_id=name)
        asha.on_trial_add(None, over)
        for number, row in enumerate(rows_with(logdir / name, sweep.metric), 1):
            asha.on_trial_result(None, over, {"evaluations": number, "value": row.value})
    return asha


def _domain(sampled: Sampled) -> Any:
    if sampled.kind == "choice":
        return list(sampled.values)
    return getattr(tune, sampled.kind)(*map(float, sampled.values))


def _explored(config: dict[str, Any], sweep: Sweep) -> dict[str, Any]:
    """Settings that PBT has changed, within their ends; if they contradict, those of a planned trial."""
    for each in sweep.sampled:
        if each.kind != "choice":
            config["settings"][each.name] = each.inside(config["settings"][each.name])
    if not sweep.is_possible(config["settings"]):
        config["settings"] = dict(random.choice(sweep.trials))
    return config


class _Teller(TrialProgressCallback):
    """Reports each trial that ends, in place of Ray Tune's own reporter.

    It marks the run of a trial that the scheduler ended early, so that the sweep does not continue it.
    """

    def __init__(self, logdir: Path, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._logdir, self._tell = logdir, tell

    def on_trial_result(self, *_: Any, **__: Any) -> None:
        """Reports nothing."""

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        last = trial.last_result or {}
        is_done = last.get("finished") or "value" not in last
        if not is_done:
            leave(self._logdir, str(trial), None)
        words = "done" if is_done else "ended early"
        self._tell(f"{trial}: {words}" + (f", {last['value']:.4g}" if "value" in last else ""))

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._tell(f"{trial}: failed; the other trials continue")
