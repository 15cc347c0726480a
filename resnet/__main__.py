"""python -m resnet: a table of the zoo, with what each network costs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from tfrl.cli import command_line, endings
from tfrl.cli.errors import UserError

_USAGE = "python -m resnet"


@dataclass(frozen=True)
class Options:
    """It has no flags of its own."""


def main(arguments: Sequence[str]) -> int:
    """Builds every network of the zoo for its paper's input and prints the table; the exit code."""
    words, _ = command_line.parse(
        Options, arguments, _USAGE, "List the networks of the zoo, with what they cost."
    )
    if words:
        raise UserError(f"{words[0]!r} is not a flag; usage: {_USAGE}")
    # Read by TensorFlow when it is first imported. Counting needs no GPU, whose absence is no error here.
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    _print_table()
    return 0


def _print_table() -> None:
    from rich import box
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    import resnet
    from resnet.counts import mflop, parameters

    table = Table(
        title="Torsos, without a head; MFLOP of one image", box=box.SIMPLE, padding=(0, 0), expand=False
    )
    for column in ("name", "input", "parameters", "MFLOP", "output"):
        table.add_column(column, justify="left" if column in ("name", "input") else "right", no_wrap=True)
    table.add_column("paper")
    console = Console()
    for name in track(resnet.names(), description="Building", console=console, transient=True):
        entry = resnet.entry(name)
        model = resnet.build(name, entry.input_shape)
        shape = "x".join(map(str, entry.input_shape))
        row = (name, shape, f"{parameters(model):,}", f"{mflop(model):,.1f}", str(model.output.shape[-1]))
        table.add_row(*row, entry.paper)
    console.print(table)


if __name__ == "__main__":
    endings.run(main)
