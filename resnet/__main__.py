"""python -m resnet: a table of the zoo with the costs of its networks, and the layers of single ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import resnet
from resnet.costs import COSTS, cost_of
from tfrl.cli import command_line, endings
from tfrl.cli.errors import UserError
from tfrl.cli.quiet import quiet_start
from tfrl.cli.streams import console

if TYPE_CHECKING:
    import keras

_USAGE = "python -m resnet [NAME ...]"
_WIDTHS = (1, 2, 4)  # of Cobbe et al. 2020, arXiv:1912.01588, section 3.3


@dataclass(frozen=True)
class Options:
    """The output."""

    layers: bool = False
    """Print a table of the layers of each network."""


def main(arguments: Sequence[str]) -> int:
    """Prints the table, or the layers of networks; the exit code."""
    words, options = command_line.parse(
        Options, arguments, _USAGE, "List the networks of the zoo, with what they cost."
    )
    if options.layers and not words:
        raise UserError("--layers needs the name of a network.")
    for name in words:
        try:
            resnet.entry(name)
        except ValueError as error:
            raise UserError(str(error)) from None
    if not options.layers:
        _print_table(words or resnet.names())
        return 0
    for name in words:
        with quiet_start():
            model = _build(name, 1)
        print(name)
        model.summary(print_fn=print)
    return 0


def _print_table(names: Sequence[str]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(title="Torsos, without a head; MFLOP of one image", box=box.SIMPLE, padding=(0, 0))
    for column in ("name", "input", "parameters", "MFLOP", "output"):
        table.add_column(column, justify="left" if column in ("name", "input") else "right", no_wrap=True)
    table.add_column("paper")
    # Networks that games are learned with have a row for each width that papers compare.
    variants = [(name, w) for name in names for w in (_WIDTHS if resnet.entry(name).has_width else (1,))]
    for name, width in variants:
        entry, cost = resnet.entry(name), COSTS.get((name, width))
        if cost is None:
            with quiet_start():
                cost = cost_of(_build(name, width))
        table.add_row(
            f"{name}, width {width}" if width > 1 else name,
            "x".join(map(str, entry.input_shape)),
            f"{cost.parameters:,}",
            f"{cost.mflop:,.1f}",
            str(cost.features),
            entry.paper,
        )
    console().print(table)


def _build(name: str, width: int) -> keras.Model:
    options: dict[str, Any] = {"width": width} if width > 1 else {}
    return resnet.build(name, resnet.entry(name).input_shape, **options)


if __name__ == "__main__":
    endings.run(main)
