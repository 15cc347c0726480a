"""python -m resnet [NAME or RUN]: print the networks of the zoo, or the layers of a network, or draw it."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

import resnet
from resnet import config as supervised
from tfrl.algorithms import runs as settings
from tfrl.cli import endings, flags
from tfrl.cli.errors import UserError, how_to_install
from tfrl.cli.settings import SETTINGS_FILE, algorithm_of
from tfrl.cli.streams import quiet_start

if TYPE_CHECKING:
    import keras

_USAGE = "python -m resnet [NAME or RUN]"
_FORMATS = (".png", ".svg", ".pdf")


class Cost(NamedTuple):
    """The cost of a torso for the input of its paper.

    Attributes:
      parameters: the trainable ones, without the moving statistics of batch normalization.
      mflop: millions of floating point operations of one image's forward pass. Only those of convolutions and
        dense layers count, as in the papers; a multiply-add counts as two, in the papers as one.
      features: the size of its output.
    """

    parameters: int
    mflop: float
    features: int


COSTS: dict[tuple[str, int], Cost] = {
    ("impala", 1): Cost(622_144, 61.2, 256),
    ("impala", 2): Cost(1_437_568, 235.7, 256),
    ("impala", 4): Cost(3_649_024, 924.3, 256),
    ("impala-pooled", 1): Cost(106_048, 60.2, 256),
    ("impala-pooled", 2): Cost(405_376, 233.6, 256),
    ("impala-pooled", 4): Cost(1_584_640, 920.2, 256),
    ("nature", 1): Cost(1_684_128, 18.7, 512),
    ("cookbook", 1): Cost(1_105_152, 65.8, 256),
    ("linear", 1): Cost(0, 0.0, 12288),
    ("mlp", 1): Cost(4_736, 0.0, 64),
    ("resnet-mini", 1): Cost(74_640, 24.5, 64),
    ("resnet20", 1): Cost(269_072, 81.1, 64),
    ("resnet32", 1): Cost(463_504, 137.7, 64),
    ("resnet44", 1): Cost(657_936, 194.3, 64),
    ("resnet56", 1): Cost(852_368, 251.0, 64),
    ("resnet110", 1): Cost(1_727_312, 505.8, 64),
    ("resnet18", 1): Cost(11_176_512, 3627.1, 512),
    ("resnet34", 1): Cost(21_284_672, 7326.5, 512),
    ("resnet50", 1): Cost(23_508_032, 8174.3, 2048),
}
"""Costs by name and width. A test compares them with the networks."""


@dataclass(frozen=True)
class Options:
    """The network of the zoo, for the input of its paper, or the networks of a run."""

    layers: bool = False
    """Print the layers, as Keras's summary. They are also printed without --draw."""
    draw: str | None = None
    """Draw the layers and their shapes into this file: .png, .svg or .pdf. It needs pydot and Graphviz."""


def main(arguments: Sequence[str]) -> int:
    """Prints the table, or prints and draws networks; returns the exit code."""
    words, options = flags.parse(
        Options, arguments, _USAGE, "List the networks and their costs, or show one."
    )
    if not (words or options.layers or options.draw is not None):
        _print_costs()
        return 0
    name = flags.one(words, "name of a network, or a run's folder", _USAGE)
    if options.draw is not None:
        _check_drawing(Path(options.draw))
    with quiet_start():
        models = _models(name)
    if options.layers or options.draw is None:
        for model in models.values():
            model.summary(expand_nested=True)
    if options.draw is not None:
        _draw(models, Path(options.draw))
        print(options.draw)
    return 0


def _models(name: str) -> Mapping[str, keras.Model]:
    """The networks of a run, or the network of that name, by name. Raises UserError if there is none."""
    run = settings.run_folder(name)
    try:
        if not run.is_dir():
            return {name: resnet.build(name, resnet.entry(name).input_shape)}
        if algorithm_of(run / SETTINGS_FILE) != "resnet":
            config = settings.of_run(run)
            return config.make_network(config.precision).models
        from resnet import data, learner

        trained = supervised.of_run(run)
        shape, classes = data.sizes(trained.dataset, trained.image_size)
        model = learner.build(trained, trained.precision, image_shape=shape, classes=classes)
        return {trained.model: model}
    except ValueError as error:
        raise UserError(str(error)) from None


def _check_drawing(path: Path) -> None:
    """Raises UserError if no picture can be drawn, or not into this file."""
    if path.suffix not in _FORMATS:
        raise UserError(f"--draw must be a file that ends in {', '.join(_FORMATS)}; got {path}.")
    if not path.parent.is_dir():
        raise UserError(f"--draw {path}: there is no folder {path.parent}.")
    if importlib.util.find_spec("pydot") is None or shutil.which("dot") is None:
        raise UserError(
            "--draw needs pydot and Graphviz's program dot: "
            f"{how_to_install('draw')}, and apt-get install graphviz."
        )


def _draw(models: Mapping[str, keras.Model], path: Path) -> None:
    """Draws all models side by side. Raises UserError if the file cannot be written."""
    import keras
    import pydot

    picture = pydot.Dot()
    picture.set("dpi", 120)
    for model in models.values():
        shown = {"show_shapes": True, "show_layer_names": True, "expand_nested": True}
        picture.add_subgraph(keras.utils.model_to_dot(model, **shown, subgraph=True))
    try:
        picture.write(str(path), format=path.suffix[1:])
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}.") from None


def _print_costs() -> None:
    """Prints the table of the zoo."""
    table = Table(title="Torsos, without a head; MFLOP of one image", box=box.SIMPLE, padding=(0, 0))
    for column in ("name", "input", "parameters", "MFLOP", "output"):
        table.add_column(column, justify="left" if column in ("name", "input") else "right", no_wrap=True)
    table.add_column("paper")
    for (name, width), cost in COSTS.items():
        entry = resnet.entry(name)
        table.add_row(
            f"{name}, width {width}" if width > 1 else name,
            "x".join(map(str, entry.input_shape)),
            f"{cost.parameters:,}",
            f"{cost.mflop:,.1f}",
            str(cost.features),
            entry.paper,
        )
    Console().print(table)


if __name__ == "__main__":
    endings.run(main)
