"""python -m resnet: a table of the zoo with the costs of its networks, and the layers of single ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import resnet
from resnet.costs import COSTS, cost_of, env_steps_per_second
from tfrl.cli import command_line, endings
from tfrl.cli.errors import UserError
from tfrl.cli.quiet import quiet_start
from tfrl.cli.streams import console
from tfrl.config import of_run
from tfrl.run import files

if TYPE_CHECKING:
    import keras
    from rich.console import Console
    from rich.table import Table

_USAGE = "python -m resnet [NAME or RUN ...]"
_WIDTHS = (1, 2, 4)  # of Cobbe et al. 2020, arXiv:1912.01588, section 3.3
_GAME, _ROWS = (64, 64, 3), 128  # procgen's images, and how many of them a speed is measured with


@dataclass(frozen=True)
class Options:
    """The output."""

    layers: bool = False
    """Print a table of the layers of each network. A RUN's folder stands for its networks: actor, critic."""
    draw: str | None = None
    """Draw the layers of the networks, side by side, into this PNG file."""
    speed: bool = False
    """Measure, too, the env steps a second of PPO that a network of games allows on this machine's CPU: the
    time of one pass to act and three to learn alone, for images of 64 x 64."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the --speed; auto: what trainers take on this machine's CPU."""


def main(arguments: Sequence[str]) -> int:
    """Prints the table, or the layers of networks; the exit code."""
    words, options = command_line.parse(
        Options, arguments, _USAGE, "List the networks of the zoo, with what they cost."
    )
    looks = options.layers or options.draw is not None
    if looks and not words:
        raise UserError("--layers and --draw need the name of a network or the folder of a run.")
    if looks and options.speed:
        raise UserError("--speed is of the table: leave --layers and --draw out.")
    if options.precision != "auto" and not options.speed:
        raise UserError("--precision would do nothing without --speed; leave it out.")
    runs = {word: of_run.settings(Path(word)) for word in words if looks and Path(word).is_dir()}
    for name in words:
        if name not in runs and not resnet.is_known(name):
            try:
                resnet.entry(name)
            except ValueError as error:
                raise UserError(str(error)) from None
    # Read by TensorFlow when it is first imported. Counting needs no GPU, whose absence is no error here.
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    if not looks:
        shown = console()
        shown.print(_table(shown, words or resnet.names(), options))
        return 0
    models = {}
    with quiet_start():
        for word in words:
            if word in runs:
                from tfrl import networks

                of_word = networks.of_settings(runs[word], "float32").models
                models |= {f"{Path(word).name}, {name}": model for name, model in of_word.items()}
            else:
                models[word] = _build(word, 1, "float32")
    if options.layers:
        for title, model in models.items():
            print(title)
            model.summary(print_fn=print)
    if options.draw is not None:
        from resnet.drawing import draw

        try:
            with files.replacing(Path(options.draw)) as staged:
                draw(models, staged)
        except OSError as error:
            raise UserError(f"cannot write {options.draw}: {files.reason(error)}.") from None
        print(options.draw)
    return 0


def _table(console: Console, names: Sequence[str], options: Options) -> Table:
    """The table, with a bar on the console while networks are built."""
    from rich import box
    from rich.progress import track
    from rich.table import Table

    title, precision = "Torsos, without a head; MFLOP of one image", "float32"
    columns = ["name", "input", "parameters", "MFLOP", "output"]
    if options.speed:
        with quiet_start():
            from tfrl.workers.strategy import resolve_precision
        precision = resolve_precision(options.precision)
        title = f"{title}; env steps/s in {precision}"
        columns.append("env steps/s")
    table = Table(title=title, box=box.SIMPLE, padding=(0, 0), expand=False)
    for column in columns:
        table.add_column(column, justify="left" if column in ("name", "input") else "right", no_wrap=True)
    table.add_column("paper")
    # Networks that games are learned with have a row for each width that papers compare.
    variants = [(name, w) for name in names for w in (_WIDTHS if resnet.entry(name).has_width else (1,))]
    for name, width in track(variants, description="Building", console=console, transient=True):
        entry, cost = resnet.entry(name), COSTS.get((name, width))
        if cost is None:
            with quiet_start():
                cost = cost_of(_build(name, width, "float32"))
        row = [
            f"{name}, width {width}" if width > 1 else name,
            "x".join(map(str, entry.input_shape)),
            f"{cost.parameters:,}",
            f"{cost.mflop:,.1f}",
            str(cost.features),
        ]
        if options.speed and entry.input_shape == _GAME:
            row.append(f"{env_steps_per_second(_build(name, width, precision), _ROWS):,.0f}")
        elif options.speed:
            row.append("")
        table.add_row(*row, entry.paper)
    return table


def _build(name: str, width: int, precision: str) -> keras.Model:
    options = {"width": width} if width > 1 else {}
    dtype = "mixed_bfloat16" if precision == "bfloat16" else "float32"
    return resnet.build(name, resnet.entry(name).input_shape, dtype=dtype, **options)


if __name__ == "__main__":
    endings.run(main)
