"""python -m resnet: print the networks of the zoo and their costs, or the layers of one network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

import resnet
from tfrl.cli import endings, flags
from tfrl.cli.errors import UserError
from tfrl.cli.streams import quiet_start

_USAGE = "python -m resnet [NAME --layers]"


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
    """The table that is printed."""

    layers: bool = False
    """The layers of the network NAME, for the input of its paper."""


def main(arguments: Sequence[str]) -> int:
    """Prints the table; returns the exit code."""
    words, options = flags.parse(Options, arguments, _USAGE, "List the networks and their costs.")
    if words or options.layers:
        name = flags.one(words, "name of a network", _USAGE)
        try:
            with quiet_start():
                network = resnet.build(name, resnet.entry(name).input_shape)
        except ValueError as error:
            raise UserError(str(error)) from None
        network.summary()
        return 0
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
    return 0


if __name__ == "__main__":
    endings.run(main)
