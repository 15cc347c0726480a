"""python -m tfrl.evaluate RUN: evaluate a policy, in procgen on training levels and on unseen levels."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tfrl import Function
from tfrl.algorithms.policies import SavedPolicy
from tfrl.algorithms.runs import find_policy, folder_of, run_folder
from tfrl.cli import endings, flags
from tfrl.cli.errors import UserError
from tfrl.cli.flags import NATURAL
from tfrl.cli.streams import quiet_start
from tfrl.config.run import EPISODES, RLSettings
from tfrl.envs import registry
from tfrl.envs.registry import TRAIN, level_set_title
from tfrl.experience.episodes import (
    ActingPolicy,
    check_level_set,
    check_plays,
    other_env,
    play_level_set,
    split_episodes,
)
from tfrl.networks.weights import split_checkpoint
from tfrl.reporting import scores
from tfrl.run import files
from tfrl.run.folder import EVALUATION_FILE

_USAGE = "python -m tfrl.evaluate RUN"
_RETURN = "return ±\nstandard error"


@dataclass(frozen=True)
class Options:
    """The evaluation."""

    levels: Literal["train", "test", "both"] = "both"
    """train: the run's training levels; test: all levels of the game. An env without levels has only test."""
    episodes: Annotated[int, EPISODES] = 256
    """Episodes of each level set, the same number in every env."""
    greedy: bool | None = None
    """Take the most likely action; --no-greedy draws actions; None: as in the run's own evaluations."""
    envs: str | None = None
    """Envs to play, separated by commas; None: the run's."""
    seed: Annotated[int | None, NATURAL] = None
    """Seed of levels and actions. None: the run's seed, which plays the same episodes as in training."""
    checkpoint: str = "last"
    """Checkpoint to play: last, best (by the return in evaluations) or the number of an update."""
    precision: Literal["run", "float32", "bfloat16"] = "run"
    """Precision of the torso; run: the precision of the run."""
    out: str | None = None
    """The JSON file to write; None: eval.json in the run's folder."""


def main(arguments: Sequence[str]) -> int:
    """Evaluates a run's policy; returns the exit code."""
    words, options = flags.parse(
        Options,
        arguments,
        _USAGE,
        "Play episodes with a run's policy: a table, and RUN/eval.json. RUN is a run's folder or an export.",
    )
    run, checkpoint = split_checkpoint(run_folder(flags.one(words, "run", _USAGE)), options.checkpoint)
    source = find_policy(run, checkpoint)
    greedy = source.config.eval_greedy if options.greedy is None else options.greedy
    out = Path(options.out) if options.out else folder_of(run) / EVALUATION_FILE
    tasks = [_task(source.config, game, options) for game in (options.envs or source.config.env).split(",")]
    with quiet_start():
        policy = SavedPolicy(source, options.precision, greedy=greedy)
    found = [
        evaluate_levels(policy, task, level_set, options.episodes)
        | {"actions": "greedy" if greedy else "sampled"}
        for task in tasks
        for level_set in (task.level_sets if options.levels == "both" else (options.levels,))
    ]
    content = {
        "checkpoint": source.name,
        "env_steps": source.env_steps,
        "seed": tasks[0].seed,
        "precision": policy.precision,
        "evaluations": found,
    }
    try:
        files.write(out, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {out}: {files.reason(error)}.") from None
    finally:
        _show(content, source.config.counts)
    return 0


def evaluate_levels(policy: ActingPolicy, task: Any, level_set: str, episodes: int) -> dict[str, Any]:
    """Plays `episodes` episodes, rounded up to equally many in every env; returns their statistics."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    total = math.prod(split_episodes(episodes))
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(f"{task.env}, {level_set_title(task.env, level_set)}", total=total)
        played = play_level_set(
            policy, task, level_set, episodes, on_episode=lambda count: progress.update(bar, completed=count)
        )
    returns = played.returns.reshape(-1)
    # Episodes of one env may share levels, so the error is that of the envs' means.
    error = scores.standard_error(played.returns.mean(axis=1))
    return {
        "env": task.env,
        "distribution_mode": task.distribution_mode,
        "levels": level_set,
        "episodes": returns.size,
        "return_mean": float(returns.mean()),
        "return_standard_error": error if math.isfinite(error) else None,
        "return_median": float(scores.median(returns)),
        "return_iqm": float(scores.iqm(returns)),
        "normalized_return": task.normalized(float(returns.mean())),
        "normalized_return_rliable": task.normalized(float(returns.mean()), "rliable"),
        "solve_rate": float(played.solved.mean()),
        "length_mean": float(played.lengths.mean()),
    }


def _task(config: RLSettings, game: str, options: Options) -> Any:
    """The run's settings with the game and seed to evaluate.

    Raises UserError if the run's policy cannot play the env, or if the env has no such level set.
    """
    seed = config.seed if options.seed is None else options.seed
    task = dataclasses.replace(config, **other_env(config, game.strip()), seed=seed)
    check_plays(config, task)
    if options.levels != "both":
        check_level_set(task.env, options.levels)
    return task


def _show(content: dict[str, Any], counts: str) -> None:
    """Prints a table without empty columns, such as the levels of envs without levels.

    `counts` is the name of the steps of the training.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    rows = []
    for found in content["evaluations"]:
        error, score = found["return_standard_error"], found["normalized_return"]
        has_levels = TRAIN in registry.family(found["env"]).level_sets
        rows.append(
            {
                "env": found["env"],
                "levels": found["levels"] if has_levels else "-",
                "episodes": str(found["episodes"]),
                _RETURN: f"{found['return_mean']:.2f}" + ("" if error is None else f" \u00b1 {error:.2f}"),
                "median": f"{found['return_median']:.2f}",
                "IQM": f"{found['return_iqm']:.2f}",
                "normalised": "-" if score is None else f"{score:.3f}",
                "solved": f"{found['solve_rate']:.0%}" if has_levels or found["solve_rate"] else "-",
                "length": f"{found['length_mean']:.0f}",
            }
        )
    actions = content["evaluations"][0]["actions"]
    title = f"{content['checkpoint']}, {content['env_steps']:,} {counts}, {actions} actions"
    # Narrow, so that it fits a terminal of 80 columns.
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    told = [name for name in rows[0] if any(row[name] != "-" for row in rows)]
    for name in told:
        table.add_column(name, no_wrap=True, justify="left" if name in ("env", "levels") else "right")
    for row in rows:
        table.add_row(*(row[name] for name in told))
    Console().print(table)


sys.modules[__name__].__class__ = Function

if __name__ == "__main__":
    endings.run(main)
