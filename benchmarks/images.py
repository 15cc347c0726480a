"""python -m benchmarks.images: images a second of resnet.train's steps against Keras's `model.fit`.

The same network, images and batch size in all, each in a process of its own that waits while another is
measured. They take turns, `rounds` times, so that all see the same machine; ratios are taken turn by turn.
`replicas2` is this project's step on two logical devices of the same CPU. All processes import tfrl first, so
that Keras gets the same TensorFlow settings (oneDNN).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Annotated, Literal

from rich.console import Console
from rich.table import Table

import tfrl  # noqa: F401 - sets what TensorFlow reads at import
from benchmarks import command
from resnet import config
from tfrl.cli.errors import TrainingError
from tfrl.cli.flags import COUNT, Range

NAMES = ("ours", "keras_fit", "replicas2")


@dataclasses.dataclass(frozen=True)
class Options:
    """The measurement."""

    model: str = "resnet20"
    """A network of the zoo."""
    normalization: Literal["batch", "group"] = "batch"
    """Normalisation in residual networks."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 is for hardware that has it."""
    image_size: Annotated[int, Range(1, 4096)] = 32
    """Pixels, square."""
    batch_size: int = 128
    """Images of a step."""
    steps: Annotated[int, COUNT] = 15
    """Steps of a turn."""
    rounds: Annotated[int, COUNT] = 5
    """Turns of each; medians count."""


def main(options: Options) -> None:
    """Measures and prints."""
    _check(options)
    processes = {name: _start(name, options) for name in NAMES}
    turns = {name: [] for name in NAMES}
    try:
        for process in processes.values():
            _answer(process)  # built and traced
        for _ in range(options.rounds):
            for name, process in processes.items():
                turns[name].append(_turn(process))
    finally:
        for process in processes.values():
            process.kill()
    speeds = {name: [speed for speed, _ in found] for name, found in turns.items()}
    row = {name: statistics.median(found) for name, found in speeds.items()}
    for name, one, other in (
        ("ours_to_keras", "ours", "keras_fit"),
        ("replicas2_to_ours", "replicas2", "ours"),
    ):
        row[name] = statistics.median(a / b for a, b in zip(speeds[one], speeds[other], strict=True))
    row["input_wait_fraction"] = statistics.median(wait for _, wait in turns["ours"])
    settings = dataclasses.asdict(options)
    print(json.dumps({"options": settings, "cores": os.cpu_count(), "turns": speeds, **row}, indent=2))
    table = Table("images/s", options.precision)
    for name, value in row.items():
        table.add_row(name, f"{value:.3g}")
    Console().print(table)


def _check(options: Options) -> None:
    """Raises UserError if the measuring processes would refuse the options."""
    flags = ["--model", options.model, "--normalization", options.normalization]
    config.parse([*flags, "--batch-size", str(options.batch_size), "--replicas", "2"])


def _start(name: str, options: Options) -> subprocess.Popen:
    code = f"from benchmarks.images import Options, serve; serve({name!r}, {options!r})"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)


def _turn(process: subprocess.Popen) -> tuple[float, float]:
    process.stdin.write("\n")
    process.stdin.flush()
    speed, wait = _answer(process).split()
    return float(speed), float(wait)


def _answer(process: subprocess.Popen) -> str:
    line = process.stdout.readline()
    if not line:
        raise TrainingError(f"a measuring process ended with exit code {process.wait()}.")
    return line


def serve(name: str, options: Options) -> None:
    """Takes a turn for each line of stdin; prints images a second and the share of time spent waiting."""
    turn = _prepare(name, options)
    turn()
    print("ready", flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        waited = turn()
        seconds = time.perf_counter() - began
        print(options.steps * options.batch_size / seconds, waited / seconds, flush=True)


def _prepare(name: str, options: Options) -> Callable[[], float]:
    """A function that trains for one turn; it returns the seconds that it waited for images."""
    import numpy as np

    from resnet.config import Config
    from resnet.data import Split
    from tfrl.workers import strategy

    config = Config(
        model=options.model,
        normalization=options.normalization,
        precision=options.precision,
        batch_size=options.batch_size,
        replicas=2 if name == "replicas2" else 1,
    )
    runtime = strategy.make(config, None)
    generator, count = np.random.default_rng(0), options.batch_size * options.steps
    shape = (count, options.image_size, options.image_size, 3)
    split = Split(generator.integers(0, 256, shape, np.uint8), generator.integers(0, 10, count, np.int32))
    return (_keras if name == "keras_fit" else _ours)(config, runtime, split, options)


def _ours(config: object, runtime: object, split: object, options: Options) -> Callable[[], float]:
    from resnet.data import Share, training_pass
    from resnet.learner import Classifier

    classifier = Classifier(config, runtime, image_shape=split.images.shape[1:], classes=10)
    share = Share(options.batch_size, replicas=runtime.local_replicas)
    batches = share.batches(
        split, (training_pass("none", 1, epoch, len(split)) for epoch in itertools.count())
    )

    def turn() -> float:
        waited = 0.0
        for _ in range(options.steps):
            asked = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - asked
            sums = classifier.step(batch, 0.01)
        sums.numpy()
        return waited

    return turn


def _keras(config: object, runtime: object, split: object, options: Options) -> Callable[[], float]:
    import keras

    from resnet.learner import build

    model = build(config, options.precision, image_shape=split.images.shape[1:], classes=10)
    model.compile(
        optimizer=keras.optimizers.SGD(0.01, momentum=0.9),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
        jit_compile=False,  # compiled, it is slower on CPUs
    )

    def turn() -> float:
        model.fit(split.images, split.labels, batch_size=options.batch_size, verbose=0)
        return 0.0

    return turn


if __name__ == "__main__":
    command.run(Options, main)
