"""python -m benchmarks.learning_gymnasium: what PPO comes to on Gymnasium's classic control and MuJoCo.

Trains one seed after another, or goes on with a run that was cut off, and evaluates the most likely actions
at the end. CartPole-v1 and Pendulum-v1 are trained with the defaults and have aims to reach,
InvertedDoublePendulum-v5 with --preset torchrl: `benchmarks.continuous_control --learn` compares it with that
script.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import command
from tfrl.cli.errors import UserError
from tfrl.cli.settings import COUNT, check_ranges
from tfrl.config import ppo
from tfrl.reporting import runs


@dataclasses.dataclass(frozen=True)
class Task:
    """A task, and the return that it must reach.

    Attributes:
      flags: the trainer's.
      seeds: how many, from 1 on.
      aim: the mean return to reach, or None.
    """

    flags: tuple[str, ...]
    seeds: int
    aim: float | None = None


# Whole updates of 1,024 env steps, in 150,000 and 300,000 at the most.
TASKS = {
    "CartPole-v1": Task(("--env", "CartPole-v1", "--total-steps", "149_504"), 5, 475.0),
    "Pendulum-v1": Task(("--env", "Pendulum-v1", "--total-steps", "299_008"), 5, -250.0),
    "InvertedDoublePendulum-v5": Task(("--preset", "torchrl"), 10),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """The training."""

    envs: str = ",".join(TASKS)
    """Envs, with commas between."""
    seeds: str | None = None
    """Seeds with commas between, 1..3 for 1,2,3; None: each env's own number of them."""
    episodes: int = 100
    """Episodes of the evaluation at the end."""
    precision: str = "auto"
    """The trainer's --precision."""
    logdir: str = "logs/gymnasium"
    """Folder of the runs."""
    plot: str | None = None
    """A PNG of the learning curves."""


def main(options: Options) -> None:
    """Trains, prints the table, draws the plot."""
    check_ranges(options, {"episodes": COUNT})
    command.check_plot(options.plot)
    names = [name.strip() for name in options.envs.split(",")]
    if not {*names} <= {*TASKS}:
        raise UserError(f"--envs must be of {', '.join(TASKS)}, with commas between; got {options.envs}.")
    more = ("--eval-episodes", str(options.episodes), "--precision", options.precision)
    found = []
    for task in (TASKS[name] for name in names):
        seeds = command.seeds(options.seeds or f"1..{task.seeds}")
        found.append((task, train([*task.flags, *more], seeds, options.logdir)))
    Console().print(_table(found))
    if options.plot:
        from tfrl.reporting import comparison, curve_plots

        groups = comparison.group([run for _, of_task in found for run in of_task])
        curve_plots.learning_curves(groups).savefig(options.plot, dpi=120)


def train(flags: Sequence[str], seeds: Sequence[int], logdir: str) -> list[runs.Run]:
    """Runs of `tfrl.ppo`, one a seed, in folders of their own; one that is complete is only read."""
    folders = []
    for seed in seeds:
        of_run = [*flags, "--seed", str(seed), "--logdir", logdir]
        folder = ppo.READER.parse(of_run).run_dir
        if not (folder.exists() and runs.load(folder).is_done):
            command.finish([sys.executable, "-m", "tfrl.ppo", *of_run])
        folders.append(folder)
    return [runs.load(Path(folder)) for folder in folders]


def _table(found: Sequence[tuple[Task, Sequence[runs.Run]]]) -> Table:
    """A row a run, its deviation that of its episodes; and one for all of an env, with that of the runs."""
    title = "mean return: of the last 100 episodes while training, and of the evaluation at the end"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("env", no_wrap=True)
    for name in ("seed", "env steps", "training", "evaluation", "deviation", "aim"):
        table.add_column(f" {name}", justify="right", no_wrap=True)
    for task, of_task in found:
        aim = "-" if task.aim is None else f"{task.aim:g}"
        for run in of_task:
            returns = [run.training_return(run.env_steps), run.final_return("test")]
            returns.append(run.results["eval"]["test"]["return_std"])
            cells = (run.config.env, str(run.config.seed), f"{run.env_steps:,}")
            table.add_row(*cells, *(f"{value:.1f}" for value in returns), aim)
        finals = np.array([run.final_return("test") for run in of_task])
        reached = "-" if task.aim is None else f"{np.sum(finals >= task.aim)} of {len(finals)}"
        name = of_task[0].config.env
        table.add_row(name, "median", "", "", f"{np.median(finals):.1f}", f"{np.std(finals):.1f}", reached)
        table.add_section()
    return table


if __name__ == "__main__":
    command.run(Options, main)
