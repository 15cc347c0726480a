"""python -m benchmarks.learning_gymnasium: what the algorithms come to on classic control and MuJoCo.

Trains one seed after another, or goes on with a run that was cut off, and evaluates the most likely actions
at the end. Each task is trained by the env's own preset and has an aim to reach. PPO's
InvertedDoublePendulum-v5 has none, and --preset torchrl: `benchmarks.continuous_control --learn` compares it
with that script. SAC on HalfCheetah-v5 has CleanRL's settings, and is compared with CleanRL's script where
--cleanrl names it: by the same seeds, at the same env steps. That script is as published but for
AutoresetMode.SAME_STEP, which Gymnasium 1 needs for what it does, and prints a line for each episode,
"global_step=1999, episodic_return=12.3".
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import command, peers, training
from tfrl.cli.errors import TrainingError, UserError
from tfrl.cli.flags import COUNT
from tfrl.reporting import runs


@dataclasses.dataclass(frozen=True)
class Task:
    """A task to train.

    Attributes:
      algorithm: its name.
      env: on which env.
      flags: the trainer's, beside the env.
      seeds: how many, from 1 on.
      aim: the mean return to reach, or None.
    """

    algorithm: str
    env: str
    flags: tuple[str, ...] = ()
    seeds: int = 5
    aim: float | None = None


_DOUBLE, _CAR = "InvertedDoublePendulum-v5", "MountainCarContinuous-v0"
_OF_REPLAY = ("--eval-every", "5")
TASKS = (
    # Whole updates of 1,024 env steps, in 150,000 and 300,000 at the most.
    Task("ppo", "CartPole-v1", ("--total-steps", "149_504"), aim=475),
    Task("ppo", "Pendulum-v1", ("--total-steps", "299_008"), aim=-250),
    Task("ppo", _DOUBLE, ("--preset", "torchrl"), seeds=10),
    Task("dqn", "CartPole-v1", _OF_REPLAY, aim=475),
    *(Task(algorithm, "Pendulum-v1", _OF_REPLAY, aim=-170) for algorithm in ("ddpg", "td3", "sac")),
    Task("sac", _CAR, _OF_REPLAY, aim=90),
    *(Task(algorithm, _DOUBLE, _OF_REPLAY, aim=9000) for algorithm in ("td3", "sac")),
    # CleanRL's settings, the gradient steps eight at once.
    Task(
        "sac",
        "HalfCheetah-v5",
        ("--preset", "cleanrl", "--train-every", "8", "--total-steps", "200_000", "--eval-every", "20"),
        seeds=2,
    ),
)
_CHEETAH = TASKS[-1]
_SHOWN = (50_000, 100_000, 150_000, 200_000)  # env steps at which its runs are compared
_LAST = 100  # episodes of which a run's return while training is the mean
_EPISODE = re.compile(r"global_step=(?P<step>\d+), episodic_return=\[?(?P<value>[-+.e\d]+)")


@dataclasses.dataclass(frozen=True)
class Options:
    """The training."""

    algorithms: str = "ppo"
    """Algorithms, with commas between."""
    envs: str | None = None
    """Envs, with commas between; None: all that these algorithms have."""
    seeds: str | None = None
    """Seeds with commas between, 1..3 for 1,2,3; None: each task's own number of them."""
    episodes: Annotated[int, COUNT] = 100
    """Episodes of the evaluation at the end."""
    precision: str = "auto"
    """The trainer's --precision."""
    logdir: str = "logs/gymnasium"
    """The folder of the runs."""
    plot: str | None = None
    """A PNG of the learning curves."""
    cleanrl: str = ""
    """CleanRL's sac_continuous_action.py, which learns HalfCheetah-v5 beside ours; "": none."""
    peer_python: str = "python"
    """The command that runs it, of an environment that has what it needs."""


def main(options: Options) -> None:
    """Trains, prints the table, draws the plot."""
    command.check_plot(options.plot)
    peers.check_file(options.cleanrl, "--cleanrl")
    if options.cleanrl and _CHEETAH not in _tasks(options):
        raise UserError("--cleanrl is for sac on HalfCheetah-v5, which --algorithms and --envs leave out.")
    more = ("--eval-episodes", str(options.episodes), "--precision", options.precision)
    found = []
    for task in _tasks(options):
        seeds = command.seeds(options.seeds or f"1..{task.seeds}")
        flags = ["--env", task.env, *task.flags, *more]
        found.append((task, training.train(flags, seeds, options.logdir, algorithm=task.algorithm)))
    Console().print(_table(found))
    if options.cleanrl:
        Console().print(_beside_cleanrl(dict(found)[_CHEETAH], options))
    if options.plot:
        from tfrl.reporting import plots

        groups = runs.group([run for _, of_task in found for run in of_task])
        plots.learning_curves(groups).savefig(options.plot, dpi=120)


def _tasks(options: Options) -> list[Task]:
    """Those that are asked for. Raises UserError where there are none of an algorithm or an env."""
    chosen = [task for task in TASKS if task.algorithm in _words("algorithms", options.algorithms, TASKS)]
    return [
        task for task in chosen if options.envs is None or task.env in _words("envs", options.envs, chosen)
    ]


def _words(name: str, given: str, tasks: Sequence[Task]) -> list[str]:
    """The values of a flag, each of which some task has."""
    known = list(dict.fromkeys(getattr(task, name.removesuffix("s")) for task in tasks))
    words = [word.strip() for word in given.split(",")]
    if not {*words} <= {*known}:
        raise UserError(f"--{name} must be of {', '.join(known)}, with commas between; got {given}.")
    return words


def _table(found: Sequence[tuple[Task, Sequence[runs.StoredRun]]]) -> Table:
    """A row a run, its deviation that of its episodes; and one for all of an env, with that of the runs."""
    title = "mean return: of the last 100 episodes while training, and of the evaluation at the end"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for name in ("", "env"):
        table.add_column(name, no_wrap=True)
    for name in ("seed", "env steps", "training", "evaluation", "deviation", "aim"):
        table.add_column(f" {name}", justify="right", no_wrap=True)
    for task, of_task in found:
        aim = "-" if task.aim is None else f"{task.aim:g}"
        for run in of_task:
            returns = [run.training_return(run.env_steps), run.final_return("test")]
            returns.append(run.results["eval"]["test"]["return_std"])
            cells = (task.algorithm, task.env, str(run.config.seed), f"{run.env_steps:,}")
            table.add_row(*cells, *(f"{value:.1f}" for value in returns), aim)
        finals = np.array([run.final_return("test") for run in of_task])
        reached = "-" if task.aim is None else f"{np.sum(finals >= task.aim)} of {len(finals)}"
        medians = ("", "", f"{np.median(finals):.1f}", f"{np.std(finals):.1f}", reached)
        table.add_row(task.algorithm, task.env, "median", *medians)
        table.add_section()
    return table


def _beside_cleanrl(ours: Sequence[runs.StoredRun], options: Options) -> Table:
    """Returns while training of our runs and of the script's, by the same seeds: a row each."""
    title = (
        f"{_CHEETAH.env}, SAC: mean return of the last {_LAST} episodes of training, after so many env steps"
    )
    table = Table("seed", "", title=title, box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for steps in _SHOWN:
        table.add_column(f" {steps:,}", justify="right", no_wrap=True)
    returns = {"tfrl": [], "CleanRL": []}
    for run in ours:
        returns["tfrl"].append([run.training_return(steps) for steps in _SHOWN])
        returns["CleanRL"].append(_returns_of_cleanrl(run.config.seed, options))
        for name, of_seeds in returns.items():
            table.add_row(str(run.config.seed), name, *(f"{value:,.0f}" for value in of_seeds[-1]))
    table.add_section()
    for name, of_seeds in returns.items():
        table.add_row("mean", name, *(f"{value:,.0f}" for value in np.mean(of_seeds, axis=0)))
    return table


def _returns_of_cleanrl(seed: int, options: Options) -> list[float]:
    """The same of CleanRL's script, whose lines are kept beside the runs and not made again."""
    path = Path(options.logdir) / f"cleanrl-sac-{_CHEETAH.env}-seed{seed}.txt"
    script = peers.script(options.peer_python, options.cleanrl, _CHEETAH.env, seed=seed, steps=_SHOWN[-1])
    episodes = [_EPISODE.match(line) for line in peers.lines(path, script)]
    ended = [(int(episode["step"]), float(episode["value"])) for episode in episodes if episode]
    if not ended:
        raise TrainingError(f'there is no line in {path} like "global_step=1999, episodic_return=12.3".')
    return [float(np.mean([value for step, value in ended if step < steps][-_LAST:])) for steps in _SHOWN]


if __name__ == "__main__":
    command.run(Options, main)
