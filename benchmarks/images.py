"""python -m benchmarks.images: images a second of resnet.train's steps against Keras's `model.fit`.

The same network, images and batch size in both, each in a fresh process, in turn and `rounds` times, so that
both see the same machine. `replicas2` is this project's step on two logical devices of the same CPU.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Literal

import tyro
from rich.console import Console
from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure."""

    model: str = "resnet20"
    """A network of the zoo."""
    normalization: Literal["batch", "group"] = "batch"
    """Of residual networks."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 is for hardware that has it."""
    image_size: int = 32
    """Pixels, square."""
    batch_size: int = 128
    """Images of a step."""
    steps: int = 30
    """Steps that are timed."""
    rounds: int = 3
    """Repetitions; the median counts."""


def main(options: Options) -> None:
    """Measures and prints."""
    speeds = {name: [] for name in ("ours", "keras_fit", "replicas2")}
    waits = []
    for _ in range(options.rounds):
        for name, found in speeds.items():
            speed, wait = _in_process(name, options)
            found.append(speed)
            if name == "ours":
                waits.append(wait)
    row = {name: statistics.median(found) for name, found in speeds.items()}
    row |= {
        "ours_to_keras": row["ours"] / row["keras_fit"],
        "replicas2_to_ours": row["replicas2"] / row["ours"],
    }
    row["input_wait_fraction"] = statistics.median(waits)
    print(json.dumps({"options": dataclasses.asdict(options), "cores": os.cpu_count(), **row}, indent=2))
    table = Table("images/s", options.precision)
    for name, value in row.items():
        table.add_row(name, f"{value:.3g}")
    Console().print(table)


def _in_process(name: str, options: Options) -> tuple[float, float]:
    code = f"from benchmarks.images import Options, measure; print(*measure({name!r}, {options!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    speed, wait = done.stdout.split()[-2:]
    return float(speed), float(wait)


def measure(name: str, options: Options) -> tuple[float, float]:
    """Images a second, and the fraction of the time that the step waited for them, in this process."""
    import tfrl  # noqa: F401 - sets what TensorFlow reads at import

    import numpy as np  # isort: skip

    from resnet.config import Config
    from resnet.data import Prefetched, Share, Split
    from resnet.learner import Learner, build
    from tfrl import distribute

    config = Config(
        model=options.model,
        normalization=options.normalization,
        precision=options.precision,
        batch_size=options.batch_size,
        replicas=2 if name == "replicas2" else 1,
    )
    runtime = distribute.make(config, None)
    random, count = np.random.default_rng(0), options.batch_size * options.steps
    shape = (options.image_size, options.image_size, 3)
    split = Split(random.integers(0, 256, (count, *shape), np.uint8), random.integers(0, 10, count, np.int32))
    if name == "keras_fit":
        model = build(config, options.precision, image_shape=shape, classes=10)
        return _fit(model, split, options), 0.0
    learner = Learner(config, runtime, image_shape=shape, classes=10)
    share = Share(options.batch_size, replicas=runtime.local_replicas)
    order = random.permutation(count)
    learner.step(next(share.batches(split, order)), 0.1).numpy()  # tracing
    batches, began = Prefetched(share.batches(split, order)), time.perf_counter()
    for batch in batches:
        sums = learner.step(batch, 0.1)
    sums.numpy()
    seconds = time.perf_counter() - began
    return count / seconds, batches.wait_seconds / seconds


def _fit(model: object, split: object, options: Options) -> float:
    """Images a second of Keras's own loop over the same arrays."""
    import keras

    model.compile(
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
        jit_compile=False,  # compiled, it is slower on CPUs
    )
    fit = {"batch_size": options.batch_size, "verbose": 0}
    model.fit(split.images[: options.batch_size], split.labels[: options.batch_size], **fit)  # tracing
    began = time.perf_counter()
    model.fit(split.images, split.labels, **fit)
    return len(split.labels) / (time.perf_counter() - began)


if __name__ == "__main__":
    main(tyro.cli(Options))
