"""python -m tfrl.evaluate RUN: how good a policy is, on training and unseen levels."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tfrl.cli import command_line, endings
from tfrl.cli.errors import UserError
from tfrl.cli.quiet import quiet_start
from tfrl.cli.settings import NATURAL, check_ranges
from tfrl.config.ppo import EPISODES, Config, check_game
from tfrl.envs.published import normalized_return
from tfrl.envs.registry import family
from tfrl.evaluation import policy_files
from tfrl.evaluation.episodes import LEVEL_SETS, level_spec, play, split_episodes
from tfrl.reporting import intervals
from tfrl.run.folder import EVALUATION_FILE, check_writable, write_text

_USAGE = "python -m tfrl.evaluate RUN"


@dataclass(frozen=True)
class Options:
    """What is played."""

    levels: Literal["train", "test", "both"] = "both"
    """The run's training levels, the full distribution of levels, or both."""
    episodes: int = 256
    """Episodes of each level set, the same number in every env."""
    greedy: bool = False
    """Take the most likely action instead of drawing one."""
    envs: str | None = None
    """Other games than the run's, with commas between."""
    seed: int | None = None
    """Decides levels and actions; None: the run's, which plays what the evaluation in training plays."""
    checkpoint: str = "last"
    """last, best (by the return on unseen levels) or the number of an update."""
    precision: Literal["run", "float32", "bfloat16"] = "run"
    """Of the torso; run: that of the run."""
    out: str | None = None
    """The JSON file that is written; None: eval.json in the run's folder."""


def main(arguments: Sequence[str]) -> int:
    """Evaluates a run's policy; the exit code."""
    words, options = command_line.parse(
        Options,
        arguments,
        _USAGE,
        "Play episodes with a run's policy: a table, and RUN/eval.json. RUN is a run's folder or an export.",
    )
    run = Path(command_line.one(words, "run", _USAGE))
    check_ranges(options, {"episodes": EPISODES, "seed": NATURAL})
    source = policy_files.find(run, options.checkpoint)
    out = Path(options.out) if options.out else run / EVALUATION_FILE
    check_writable(out)
    tasks = [_task(source.config, game, options) for game in (options.envs or source.config.env).split(",")]
    with quiet_start():
        from tfrl.evaluation import policy

        player = policy.load(source, options.precision)
    act = player.greedy if options.greedy else player.sample
    level_sets = LEVEL_SETS if options.levels == "both" else (options.levels,)
    found = [
        evaluate_levels(act, task, level_set, options.episodes)
        | {"actions": "greedy" if options.greedy else "sampled"}
        for task in tasks
        for level_set in level_sets
    ]
    content = {
        "checkpoint": source.name,
        "env_steps": source.env_steps,
        "seed": tasks[0].seed,
        "precision": player.precision,
        "evaluations": found,
    }
    _write(out, content)
    _show(content)
    return 0


def evaluate_levels(
    act: Callable[[np.ndarray, np.ndarray], np.ndarray], config: Config, level_set: str, episodes: int
) -> dict[str, Any]:
    """Plays `episodes` episodes (rounded up to as many in every env): their statistics, for eval.json."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    num_envs, each = split_episodes(episodes)
    spec = level_spec(config, level_set, num_envs)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(f"{config.env}, {level_set} levels", total=num_envs * each)
        played = play(
            act,
            spec,
            range(num_envs),
            episodes_each=each,
            on_episode=lambda count: progress.update(bar, completed=count),
        )
    returns = played.returns.reshape(-1)
    mean = float(returns.mean())
    return {
        "env": config.env,
        "distribution_mode": config.distribution_mode,
        "levels": level_set,
        "episodes": returns.size,
        "return_mean": mean,
        # Of envs' means: episodes of one env follow each other, and may share levels.
        "return_standard_error": _known(intervals.standard_error(played.returns.mean(axis=1))),
        "return_median": float(intervals.median(returns)),
        "return_iqm": float(intervals.iqm(returns)),
        "normalized_return": normalized_return(config.env, config.distribution_mode, mean),
        "solve_rate": float(played.solved.mean()),
        "length_mean": float(played.lengths.mean()),
    }


def _task(config: Config, game: str, options: Options) -> Config:
    """The run's settings with the game and seed to evaluate.

    Raises:
      UserError: there is no such game, or not in the run's distribution mode, or not for the run's network.
    """
    seed = config.seed if options.seed is None else options.seed
    task = dataclasses.replace(config, env=game.strip(), seed=seed)
    check_game(task)
    shapes = {(family(env).observation_shape, family(env).num_actions) for env in (task.env, config.env)}
    if len(shapes) > 1:
        raise UserError(
            f"{task.env} and {config.env} have other observations or actions: this policy cannot play both."
        )
    return task


def _write(path: Path, content: dict[str, Any]) -> None:
    try:
        write_text(path, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}.") from None


def _show(content: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    actions = content["evaluations"][0]["actions"]
    title = f"{content['checkpoint']}, {content['env_steps']:,} env steps, {actions} actions"
    # Narrow, so that it fits a terminal of 80 columns.
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for name in ("game", "levels"):
        table.add_column(name, no_wrap=True)
    for name in ("episodes", "return", "median", "IQM", "normalised", "solved", "length"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in content["evaluations"]:
        error, score = row["return_standard_error"], row["normalized_return"]
        table.add_row(
            row["env"],
            row["levels"],
            str(row["episodes"]),
            f"{row['return_mean']:.2f}" + ("" if error is None else f" \u00b1 {error:.2f}"),
            f"{row['return_median']:.2f}",
            f"{row['return_iqm']:.2f}",
            "-" if score is None else f"{score:.3f}",
            f"{row['solve_rate']:.0%}",
            f"{row['length_mean']:.0f}",
        )
    Console().print(table)


def _known(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


if __name__ == "__main__":
    endings.run(main)
