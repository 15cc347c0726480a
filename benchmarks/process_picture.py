"""python -m benchmarks.process_picture: draws docs/images/processes.png, the picture of docs/glossary.md."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from benchmarks import command
from tfrl.reporting import plots

_BLUE, _GREEN, _ORANGE, _WHITE = "#DCEBF7", "#DDF1EA", "#FBE8D8", "#FFFFFF"


@dataclasses.dataclass(frozen=True)
class Options:
    """The file."""

    plot: str = str(Path(__file__).parents[1] / "docs" / "images" / "processes.png")
    """The PNG to draw."""


def main(options: Options) -> None:
    """Draws the picture."""
    command.check_plot(options.plot)
    draw().savefig(options.plot, dpi=110)


@matplotlib.rc_context(plots.STYLE)
def draw() -> Figure:
    """Draws the processes of a run with two workers, each of two replicas, and three actors."""
    figure = Figure(figsize=(9.6, 4.6))
    ax = figure.subplots()
    ax.set(xlim=(0, 96), ylim=(0, 46))
    ax.axis("off")
    for left, title in ((2, "worker 0, the chief"), (40, "worker 1")):
        _box(ax, left, 21, 30, 22, _BLUE)
        ax.text(left + 1.5, 40, title, weight="bold")
        ax.text(left + 1.5, 37, "a learner; its process is in TF_CONFIG", size=8)
        for place, replica in enumerate(("replica 0", "replica 1")):
            _box(ax, left + 2 + 13.5 * place, 24, 12.5, 10, _WHITE)
            ax.text(
                left + 3 + 13.5 * place,
                28.3,
                f"{replica}:\na GPU, or a part\nof the CPU",
                size=7.5,
                va="center",
            )
    ax.text(3.5, 21.9, "writes the metrics, the policy, the results", size=8)
    _arrow(ax, (32, 30), (40, 30), "<->")
    ax.text(36, 32, "gradients:\nall-reduce", size=8, ha="center")
    for left, title in ((2, "actor 0"), (18, "actor 1"), (40, "actor 2")):
        _box(ax, left, 3, 14, 9, _GREEN)
        ax.text(left + 1.2, 9.3, title, weight="bold")
        ax.text(left + 1.2, 5.7, "envs, and a copy\nof the policy", size=8, va="center")
        _arrow(ax, (left + 5, 12), (left + 5, 21), "->")
        _arrow(ax, (left + 9, 21), (left + 9, 12), "->")
    ax.text(1.8, 16, "rollouts", size=8)
    ax.text(11.6, 16, "weights", size=8)
    _box(ax, 76, 24, 18, 19, _ORANGE)
    ax.text(77.5, 40, "evaluator", weight="bold")
    ax.text(
        77.5, 32, "reads RUN/checkpoints;\nplays episodes;\ntakes no part\nin training", size=8, va="center"
    )
    _box(ax, 62, 3, 32, 13, _GREEN)
    ax.text(63.5, 13, "observer (only REINFORCE)", weight="bold")
    ax.text(
        63.5,
        7.6,
        "envs, and no policy: the agent in the\nrun's process chooses all actions.\n"
        "It takes the place of an actor",
        size=8,
        va="center",
    )
    return figure


def _box(ax: Axes, left: float, low: float, width: float, height: float, color: str) -> None:
    style = "round,pad=0,rounding_size=0.8"
    ax.add_patch(FancyBboxPatch((left, low), width, height, style, facecolor=color, edgecolor="#444444"))


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], style: str) -> None:
    ax.annotate("", end, start, arrowprops={"arrowstyle": style, "color": "#444444"})


if __name__ == "__main__":
    command.run(Options, main)
