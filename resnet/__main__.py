"""`python -m resnet`: a table of the zoo."""

from __future__ import annotations

import os

# Read by TensorFlow when it is first imported. Counting needs no GPU, whose absence is no error here either.
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from rich import box  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402
from rich.table import Table  # noqa: E402

import resnet  # noqa: E402
from resnet.counts import mflop, parameters  # noqa: E402


def main() -> None:
    """Build every network of the zoo for its paper's input and print the table."""
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
    main()
