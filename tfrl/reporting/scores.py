"""The scores of a policy: episodes of a level set and their statistics, as eval.json has them."""

from __future__ import annotations

import math
from typing import Any

from tfrl.envs.published import normalized_return
from tfrl.envs.registry import level_set_title
from tfrl.evaluation.episodes import Player, play, split_episodes
from tfrl.evaluation.levels import level_spec
from tfrl.reporting import intervals


def evaluate_levels(player: Player, task: Any, level_set: str, episodes: int) -> dict[str, Any]:
    """Plays `episodes` episodes (rounded up to as many in every env): their statistics, for eval.json."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    num_envs, each = split_episodes(episodes)
    spec = level_spec(task, level_set, num_envs)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(f"{task.env}, {level_set_title(task.env, level_set)}", total=num_envs * each)
        played = play(
            player,
            spec,
            range(num_envs),
            episodes_each=each,
            on_episode=lambda count: progress.update(bar, completed=count),
        )
    returns = played.returns.reshape(-1)
    mean = float(returns.mean())
    return {
        "env": task.env,
        "distribution_mode": task.distribution_mode,
        "levels": level_set,
        "episodes": returns.size,
        "return_mean": mean,
        # Of envs' means: episodes of one env follow each other, and may share levels.
        "return_standard_error": _known(intervals.standard_error(played.returns.mean(axis=1))),
        "return_median": float(intervals.median(returns)),
        "return_iqm": float(intervals.iqm(returns)),
        "normalized_return": normalized_return(task.env, task.distribution_mode, mean),
        "solve_rate": float(played.solved.mean()),
        "length_mean": float(played.lengths.mean()),
    }


def _known(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
