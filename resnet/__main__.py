"""python -m resnet: a table of the zoo, with what each network costs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import resnet
from tfrl.cli import command_line, endings
from tfrl.cli.errors import UserError
from tfrl.cli.quiet import quiet_start
from tfrl.cli.streams import console

if TYPE_CHECKING:
    import keras
    from rich.console import Console
    from rich.table import Table

_USAGE = "python -m resnet"
_WIDTHS = (1, 2, 4)  # of Cobbe et al. 2020, arXiv:1912.01588, section 3.3
_GAME, _ROWS = (64, 64, 3), 128  # procgen's images, and how many of them a speed is measured with


@dataclass(frozen=True)
class Options:
    """The measurements."""

    speed: bool = False
    """Measure, too, the env steps a second of PPO that a network of games allows on this machine's CPU: the
    time of one pass to act and three to learn alone, for images of 64 x 64."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the --speed; auto: what trainers take on this machine's CPU."""


def main(arguments: Sequence[str]) -> int:
    """Builds every network of the zoo for its paper's input and prints the table; the exit code."""
    words, options = command_line.parse(
        Options, arguments, _USAGE, "List the networks of the zoo, with what they cost."
    )
    if words:
        raise UserError(f"{words[0]!r} is not a flag; usage: {_USAGE}")
    if options.precision != "auto" and not options.speed:
        raise UserError("--precision would do nothing without --speed; leave it out.")
    # Read by TensorFlow when it is first imported. Counting needs no GPU, whose absence is no error here.
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    shown = console()
    with quiet_start():
        table = _table(shown, options)
    shown.print(table)
    return 0


def _table(console: Console, options: Options) -> Table:
    """The table, with a bar on the console while it is made."""
    from rich import box
    from rich.progress import track
    from rich.table import Table

    from resnet.counts import mflop, parameters
    from resnet.speed import env_steps_per_second
    from tfrl.workers.strategy import resolve_precision

    title, speed, precision = "Torsos, without a head; MFLOP of one image", [], "float32"
    if options.speed:
        precision = resolve_precision(options.precision)
        title, speed = f"{title}; env steps/s in {precision}", ["env steps/s"]
    table = Table(title=title, box=box.SIMPLE, padding=(0, 0), expand=False)
    columns = ("name", "input", "parameters", "MFLOP", "output", *speed)
    for column in columns:
        table.add_column(column, justify="left" if column in ("name", "input") else "right", no_wrap=True)
    table.add_column("paper")
    for name, width in track(_variants(), description="Building", console=console, transient=True):
        entry = resnet.entry(name)
        model = _build(name, width, precision)
        shape = "x".join(map(str, entry.input_shape))
        title = f"{name}, width {width}" if width > 1 else name
        row = [title, shape, f"{parameters(model):,}", f"{mflop(model):,.1f}", str(model.output.shape[-1])]
        if options.speed:
            row.append(f"{env_steps_per_second(model, _ROWS):,.0f}" if entry.input_shape == _GAME else "")
        table.add_row(*row, entry.paper)
    return table


def _build(name: str, width: int, precision: str) -> keras.Model:
    options = {"width": width} if width > 1 else {}
    dtype = "mixed_bfloat16" if precision == "bfloat16" else "float32"
    return resnet.build(name, resnet.entry(name).input_shape, dtype=dtype, **options)


def _variants() -> list[tuple[str, int]]:
    """Every network, and those that games are learned with in the widths that papers compare."""
    return [
        (name, width)
        for name in resnet.names()
        for width in (_WIDTHS if resnet.entry(name).has_width else (1,))
    ]


if __name__ == "__main__":
    endings.run(main)
