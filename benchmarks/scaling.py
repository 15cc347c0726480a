"""python -m benchmarks.scaling: what synchronous training on N workers costs, measured here and predicted.

1. Collectives: the times of all-reduces of many sizes over 2 and 4 real worker processes on loopback. The
   ring's model, t(W, n) = 2 (W - 1) a + 2 (W - 1) / W n b, is fitted to the fastest of 2 workers (a: seconds
   a message, b: seconds a byte) and held against 4, and against 2 in network namespaces with a slow cable.
2. Training: 1 worker held to one core and 2 workers held to one core each, in turn, the same envs for each
   worker: the measured weak-scaling efficiency, and the compute time of an update.
3. Prediction: efficiency = C / (C + sums * t(W, n)) with a message delay and a link's rate of a real network,
   for 2 to 512 workers. It leaves out stragglers: each update waits for the slowest worker.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import command, namespaces
from tfrl.algorithms.registry import reader
from tfrl.cli.errors import TrainingError, UserError
from tfrl.cli.flags import COUNT, NOT_NEGATIVE, POSITIVE

_THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2", "OMP_NUM_THREADS": "1"}
_LINKS = (10, 25, 100)  # Gb/s
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
    """Training runs of one worker and of two, in turn, because the machine's speed drifts."""
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
        measured = {workers: _time_collectives(workers, Path(folder)) for workers in (2, 4)}
        alone, pair = _train_in_turn(options, Path(folder))
    least = {workers: _each(min, times) for workers, times in measured.items()}
    measured = {workers: _each(statistics.median, times) for workers, times in measured.items()}
    # Of the fastest, because whatever else the machine does only ever adds.
    delay, per_byte = fit_ring(least[2], workers=2)
    size = 4 * (alone["parameters"] + _EXTRA_FLOATS)
    sums = alone["sums"]
    compute = alone["seconds"]
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
        "weak_scaling_2_workers": compute / pair["seconds"],
        "all_reduce_share_2_workers": sums * ring_seconds(2, size, delay, per_byte) / pair["seconds"],
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
            environment = {**os.environ, **_THREADS, "TF_CONFIG": tf_config}
            workers.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
        codes = [worker.wait() for worker in workers]
        if any(codes):
            raise TrainingError(f"the workers in network namespaces ended with exit codes {codes}.")
        times = json.loads(output.read_text())
    return {int(size): statistics.median(seconds) for size, seconds in times.items()}


def _train_in_turn(options: Options, folder: Path) -> tuple[dict, dict]:
    """One worker, two, one, two: of each the median over all updates, and what the last run said besides."""
    runs = {workers: [] for workers in (1, 2)}
    for _ in range(options.rounds):
        for workers, done in runs.items():
            with tempfile.TemporaryDirectory(dir=folder) as own:
                done.append(_train(workers, options, Path(own)))
    return tuple(
        {**done[-1], "seconds": statistics.median(second for run in done for second in run["seconds"])}
        for done in runs.values()
    )


def _train(workers: int, options: Options, folder: Path) -> dict:
    """A short run: seconds of each update, and what decides the bytes."""
    flags = [*_flags(workers, options), "--logdir", str(folder), "--run-name", f"train-{workers}"]
    _launch(workers, ["-m", "benchmarks.one_core", "tfrl.ppo_procgen", *flags])
    run = folder / f"train-{workers}"
    with (run / "progress.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    seconds = [float(r["time/rollout_seconds"]) + float(r["time/update_seconds"]) for r in rows[1:]]
    with np.load(run / "export" / "weights.npz") as weights:
        parameters = sum(weights[name].size for name in weights.files)
    return {
        "seconds": seconds,
        "parameters": parameters,
        "sums": _EPOCHS * _MINIBATCHES,
    }


def _flags(workers: int, options: Options) -> list[str]:
    """The trainer's, of a run of so many workers."""
    num_envs = options.envs_each * workers
    steps = num_envs * options.num_steps * (options.updates + 1)
    flags = ["--env", "coinrun", "--torso", options.torso, "--precision", "float32", "--eval-episodes", "1"]
    flags += ["--num-envs", str(num_envs), "--num-steps", str(options.num_steps), "--epochs", str(_EPOCHS)]
    flags += ["--num-minibatches", str(_MINIBATCHES), "--total-steps", str(steps), "--env-threads", "1"]
    return flags


def _launch(workers: int, arguments: Sequence[str]) -> None:
    launcher = [sys.executable, "-m", "cluster.launch", "--workers", str(workers), "--max-restarts", "0"]
    arguments = [*launcher, "--", sys.executable, *arguments]
    command.finish(arguments, env={**os.environ, **_THREADS}, stdout=subprocess.DEVNULL)


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
    console.print(
        f"2 workers of one core each against 1: efficiency {figures['weak_scaling_2_workers']:.2f}, "
        f"all-reduce {figures['all_reduce_share_2_workers']:.1%} of an update (an estimate)"
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
