"""python -m benchmarks.scaling: what synchronous training on N workers costs, measured here and predicted.

1. Collectives: the times of all-reduces of many sizes over 2 and 4 real worker processes on loopback. The
   ring's model, t(W, n) = 2 (W - 1) a + 2 (W - 1) / W n b, is fitted to the fastest of 2 workers (a: seconds
   a message, b: seconds a byte) and held against 4, and against 2 in network namespaces with a slow cable.
2. Training: 2 runs of one worker each at the same time, then one run of 2 workers, in turn; 4 and 4 in the
   same way. Each worker is held to one core and has the same number of envs. So the runs apart share
   memory, caches and, where cores are threads, arithmetic as the workers of one run do, and the ratio of
   their times, the measured weak-scaling efficiency, is the price of training together. Cores differ in
   speed, and all workers wait for the slowest one in each minibatch, so the ratio of the time of the slowest
   run apart is given, too. The runs apart also tell the compute time of an update.
3. Prediction: efficiency = C / (C + sums * t(W, n)) with a message delay and a link's rate of a real network,
   for 2 to 512 workers. It leaves out stragglers: each update waits for the slowest worker.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import command, namespaces
from tfrl.algorithms.registry import reader
from tfrl.cli.errors import TrainingError, UserError
from tfrl.cli.flags import COUNT, NOT_NEGATIVE, POSITIVE

_THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2", "OMP_NUM_THREADS": "1"}
_ENVIRONMENT = {**os.environ, **_THREADS}
_LINKS = (10, 25, 100)  # Gb/s
_MEASURED = (2, 4)
_WORKERS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
_EPOCHS, _MINIBATCHES = 3, 8
_EXTRA_FLOATS = 5  # metrics that travel with the gradients; each replica adds one more


@dataclasses.dataclass(frozen=True)
class Options:
    """The measurement."""

    torso: str = "impala"
    """The network, which decides bytes and compute."""
    envs_each: Annotated[int, COUNT] = 16
    """Envs of each worker."""
    num_steps: Annotated[int, COUNT] = 64
    """Env steps of a rollout, in each env."""
    updates: Annotated[int, COUNT] = 4
    """Updates that count, of each training run; one more comes first, which traces."""
    rounds: Annotated[int, COUNT] = 2
    """Training runs of each kind, in turn, because the machine's speed drifts."""
    hop_microseconds: Annotated[float, NOT_NEGATIVE] = 30.0
    """Delay that a network adds to each message of the ring: an assumption, not measured here."""
    cable: Annotated[float, POSITIVE] = 1.0
    """Gb/s between two network namespaces, in which the model is tried too, where root may make them."""
    out: str | None = None
    """The JSON file to write the figures to."""


def main(options: Options) -> None:
    """Measures, predicts and prints."""
    _check(options)
    with tempfile.TemporaryDirectory() as folder:
        measured = {workers: _time_collectives(workers, Path(folder)) for workers in _MEASURED}
        trained = {workers: _train_in_turn(workers, options, Path(folder)) for workers in _MEASURED}
    least = {workers: _each(min, times) for workers, times in measured.items()}
    measured = {workers: _each(statistics.median, times) for workers, times in measured.items()}
    # Of the fastest, because whatever else the machine does only ever adds.
    delay, per_byte = fit_ring(least[2], workers=2)
    size = 4 * (trained[2].parameters + _EXTRA_FLOATS)
    sums, compute = _EPOCHS * _MINIBATCHES, trained[2].apart
    cable = _time_cable(options.cable) if namespaces.available() else {}
    figures = {
        "message_seconds": delay,
        "seconds_per_byte": per_byte,
        "all_reduce_seconds": measured,
        "all_reduce_seconds_least": least,
        "predicted_4_workers": {n: ring_seconds(4, n, delay, per_byte) for n in measured[4]},
        "cable_gigabits": options.cable,
        "cable_seconds": cable,
        "cable_predicted": {n: ring_seconds(2, n, delay, max(per_byte, 8e-9 / options.cable)) for n in cable},
        "bytes_per_minibatch": size,
        "collectives_per_minibatch": 1,
        "minibatches_per_update": sums,
        "compute_seconds_per_update": compute,
        "update_seconds_apart": {workers: found.apart for workers, found in trained.items()},
        "update_seconds_together": {workers: found.together for workers, found in trained.items()},
        "weak_scaling": {workers: found.apart / found.together for workers, found in trained.items()},
        "weak_scaling_to_slowest": {n: found.slowest / found.together for n, found in trained.items()},
        "all_reduce_share": {
            workers: sums * ring_seconds(workers, size, delay, per_byte) / found.together
            for workers, found in trained.items()
        },
        "predicted_efficiency": {
            link: {w: efficiency(w, link, size, sums, compute, delay, per_byte, options) for w in _WORKERS}
            for link in _LINKS
        },
    }
    _show(figures)
    text = json.dumps(figures, indent=2)
    print(text)
    if options.out:
        Path(options.out).write_text(text + "\n")


def _check(options: Options) -> None:
    """Raises UserError for what would fail after minutes."""
    reader("ppo_procgen").parse(_flags(2, options))
    if options.out and not os.access(Path(options.out).parent, os.W_OK):
        folder = Path(options.out).parent
        raise UserError(f"--out {options.out} cannot be written: {folder} is no folder to write in.")


def ring_seconds(workers: int, size: int, delay: float, per_byte: float) -> float:
    """Seconds of one ring all-reduce of `size` bytes: 2 (W - 1) rounds of a W-th of the bytes each."""
    rounds = 2 * (workers - 1)
    return rounds * (delay + size / workers * per_byte)


def fit_ring(seconds: Mapping[int, float], *, workers: int) -> tuple[float, float]:
    """(delay of a message, seconds a byte) of the measured {bytes: seconds}: relative least squares."""
    sizes, times = np.array(list(seconds)), np.array(list(seconds.values()))
    rounds = 2 * (workers - 1)
    columns = np.stack([np.full(len(sizes), rounds), rounds * sizes / workers], axis=1)
    delay, per_byte = np.linalg.lstsq(columns / times[:, None], np.ones(len(sizes)), rcond=None)[0]
    return max(float(delay), 0.0), max(float(per_byte), 0.0)


def efficiency(
    workers: int,
    link: int,
    size: int,
    sums: int,
    compute: float,
    delay: float,
    per_byte: float,
    options: Options,
) -> float:
    """The efficiency of weak scaling: the share of an update that a worker computes.

    A byte takes as long as TensorFlow's transport took here, or as the link takes, whichever is slower.
    """
    byte_time = max(per_byte, 8 / (link * 1e9))
    seconds = sums * ring_seconds(workers, size, delay + options.hop_microseconds * 1e-6, byte_time)
    return compute / (compute + seconds)


def _each(statistic: Callable[[list[float]], float], times: Mapping[int, list[float]]) -> dict[int, float]:
    return {size: statistic(seconds) for size, seconds in times.items()}


def _time_collectives(workers: int, folder: Path) -> dict[int, list[float]]:
    """{bytes: seconds of each try}."""
    output = folder / f"collectives-{workers}.json"
    _launch(workers, ["-m", "benchmarks.collectives", str(output)])
    return {int(size): seconds for size, seconds in json.loads(output.read_text()).items()}


def _time_cable(gigabits: float) -> dict[int, float]:
    """All-reduces between two network namespaces."""
    cluster = {"worker": [f"{address}:2222" for address in namespaces.ADDRESSES]}
    with tempfile.TemporaryDirectory() as folder, namespaces.two_machines(gigabits) as places:
        output = Path(folder) / "collectives.json"
        workers = []
        for index, place in enumerate(places):
            tf_config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
            command = [*place, sys.executable, "-m", "benchmarks.collectives", str(output)]
            environment = {**_ENVIRONMENT, "TF_CONFIG": tf_config}
            workers.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
        codes = [worker.wait() for worker in workers]
        if any(codes):
            raise TrainingError(f"the workers in network namespaces ended with exit codes {codes}.")
        times = json.loads(output.read_text())
    return {int(size): statistics.median(seconds) for size, seconds in times.items()}


class Trained(NamedTuple):
    """Results of short runs with a number of workers.

    Attributes:
      apart, together: the median seconds of an update, of as many runs of one worker at the same time, and of
        one run of all of them.
      slowest: the median seconds of an update of the slowest of the runs apart, the median over the rounds.
      parameters: of the network.
    """

    apart: float
    together: float
    slowest: float
    parameters: int


def _train_in_turn(workers: int, options: Options, folder: Path) -> Trained:
    """Runs apart and together by turns."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    slowest = []
    for place in range(options.rounds):
        for together, found in seconds.items():
            of_turn = folder / f"{workers}-{place}-{together}"
            names = ["run"] if together else [f"run-{core}" for core in range(workers)]
            _train(workers if together else 1, names, options, of_turn)
            of_runs = [_update_seconds(of_turn / name) for name in names]
            found += itertools.chain(*of_runs)
            if not together:
                slowest.append(max(map(statistics.median, of_runs)))
    with np.load(of_turn / names[0] / "export" / "weights.npz") as weights:
        parameters = sum(weights[name].size for name in weights.files)
    medians = (statistics.median(found) for found in (seconds[False], seconds[True], slowest))
    return Trained(*medians, parameters)


def _train(workers: int, names: Sequence[str], options: Options, folder: Path) -> None:
    """Runs of so many workers at the same time; those of one worker are held to a core each."""
    runs = []
    for core, name in enumerate(names):
        flags = [*_flags(workers, options), "--logdir", str(folder), "--run-name", name]
        words = _launched(workers, ["-m", "benchmarks.one_core", "tfrl.ppo_procgen", *flags])
        runs.append((words, {**_ENVIRONMENT, "FIRST_CORE": str(core)}))
    others = [subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL) for words, env in runs[1:]]
    try:
        words, env = runs[0]
        command.finish(words, env=env, stdout=subprocess.DEVNULL)
        codes = [other.wait() for other in others]
    finally:
        for other in others:
            other.terminate()
            other.wait()
    if any(codes):
        raise TrainingError(f"training runs ended with exit codes {codes}.")


def _update_seconds(run: Path) -> list[float]:
    """The seconds of each update but the first, which traces."""
    with (run / "progress.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [float(row["time/rollout_seconds"]) + float(row["time/update_seconds"]) for row in rows[1:]]


def _flags(workers: int, options: Options) -> list[str]:
    """The trainer's, of a run of so many workers."""
    num_envs = options.envs_each * workers
    steps = num_envs * options.num_steps * (options.updates + 1)
    flags = ["--env", "coinrun", "--torso", options.torso, "--precision", "float32", "--eval-episodes", "1"]
    flags += ["--num-envs", str(num_envs), "--num-steps", str(options.num_steps), "--epochs", str(_EPOCHS)]
    flags += ["--num-minibatches", str(_MINIBATCHES), "--total-steps", str(steps), "--env-threads", "1"]
    return flags


def _launch(workers: int, arguments: Sequence[str]) -> None:
    command.finish(_launched(workers, arguments), env=_ENVIRONMENT, stdout=subprocess.DEVNULL)


def _launched(workers: int, arguments: Sequence[str]) -> list[str]:
    """The words of a command that starts so many workers."""
    launcher = [sys.executable, "-m", "cluster.launch", "--workers", str(workers), "--max-restarts", "0"]
    return [*launcher, "--", sys.executable, *arguments]


def _show(figures: Mapping) -> None:
    console = Console()
    table = Table(title="one all-reduce over loopback, milliseconds: median, and least of all tries")
    for name in ("bytes", "2 workers", "4 workers", "2, least", "4, least", "4, by the model"):
        table.add_column(name, justify="right")
    for size, seconds in figures["all_reduce_seconds"][2].items():
        four, model = figures["all_reduce_seconds"][4][size], figures["predicted_4_workers"][size]
        fastest = (figures["all_reduce_seconds_least"][workers][size] for workers in (2, 4))
        table.add_row(f"{size:,}", *(f"{1e3 * t:.2f}" for t in (seconds, four, *fastest, model)))
    console.print(table)
    if figures["cable_seconds"]:
        table = Table(title=f"between two network namespaces, {figures['cable_gigabits']} Gb/s, milliseconds")
        for name in ("bytes", "2 workers", "by the model"):
            table.add_column(name, justify="right")
        for size, seconds in figures["cable_seconds"].items():
            model = figures["cable_predicted"][size]
            table.add_row(f"{size:,}", f"{1e3 * seconds:.2f}", f"{1e3 * model:.2f}")
        console.print(table)
    console.print(
        f"a message takes {1e6 * figures['message_seconds']:.0f} us, "
        f"and bytes flow at {1e-9 / max(figures['seconds_per_byte'], 1e-12):.2f} GB/s; a minibatch sums "
        f"{figures['bytes_per_minibatch']:,} bytes in one collective, an update has "
        f"{figures['minibatches_per_update']} of them and takes "
        f"{figures['compute_seconds_per_update']:.2f} s in one process"
    )
    for workers, found in figures["weak_scaling"].items():
        console.print(
            f"{workers} workers of a run against {workers} runs of one worker: efficiency {found:.2f} "
            f"({figures['weak_scaling_to_slowest'][workers]:.2f} against the slowest of these), "
            f"all-reduce {figures['all_reduce_share'][workers]:.1%} of an update (an estimate)"
        )
    table = Table(title="predicted weak-scaling efficiency, without stragglers")
    table.add_column("workers", justify="right")
    for link in _LINKS:
        table.add_column(f"{link} Gb/s", justify="right")
    for workers in _WORKERS:
        row = (figures["predicted_efficiency"][link][workers] for link in _LINKS)
        table.add_row(str(workers), *(f"{value:.3f}" for value in row))
    console.print(table)


if __name__ == "__main__":
    command.run(Options, main)
