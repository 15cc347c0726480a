"""python -m benchmarks.baselines: a network's test accuracy, the commonest class's and a linear model's.

Both are trained by `resnet.train`, in run folders of their own: type the same command again and it goes on.
"""

from __future__ import annotations

import dataclasses
import json
import sys

from rich.console import Console
from rich.table import Table

from benchmarks import command
from resnet import config


@dataclasses.dataclass(frozen=True)
class Options:
    """The measurement."""

    dataset: str = "procgen_frames/games"
    """The data set."""
    model: str = "resnet20"
    """A network of the zoo."""
    epochs: int = 3
    """Epochs of the network; the linear model gets ten, with Adam."""
    image_size: int = 0
    """Pixels that images are resized to, square; 0: as they are."""
    logdir: str = "logs/baselines"
    """Folder of the runs."""


def main(options: Options) -> None:
    """Trains both and prints the three numbers."""
    linear = _flags(options, "linear", 10, "--optimizer", "adam", "--lr", "1e-4")
    network = _flags(options, options.model, options.epochs)
    for flags in (linear, network):
        config.parse(flags)
    table = Table(options.dataset, "test accuracy")
    table.add_row("commonest class", f"{_majority(options):.2%}")
    table.add_row("linear", f"{_train(linear):.2%}")
    table.add_row(options.model, f"{_train(network):.2%}")
    Console().print(table)


def _majority(options: Options) -> float:
    """The test accuracy of always naming the class that is commonest in training."""
    import tfrl  # noqa: F401 - sets what TensorFlow reads at import

    import numpy as np  # isort: skip

    from resnet import data

    data.prepare(options.dataset)
    found = data.load(options.dataset, options.image_size)
    return float(np.mean(found.test.labels == np.bincount(found.train.labels).argmax()))


def _flags(options: Options, model: str, epochs: int, *further: str) -> list[str]:
    """The trainer's, of one run."""
    size = str(options.image_size)
    flags = ["--model", model, "--dataset", options.dataset, *further]
    flags += ["--epochs", str(epochs), "--image-size", size, "--logdir", options.logdir]
    return [*flags, "--run-name", f"{model}-{options.dataset.replace('/', '-')}-{size}-{epochs}"]


def _train(flags: list[str]) -> float:
    """The test accuracy of the run."""
    command.finish([sys.executable, "-m", "resnet.train", *flags])
    results = json.loads((config.parse(flags).run_dir / "results.json").read_text())
    return results["test"]["accuracy"]


if __name__ == "__main__":
    command.run(Options, main)
