"""Evaluations by level set: what envs they play, their metrics, and what results.json says of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfrl.cli.errors import UserError
from tfrl.envs import registry
from tfrl.envs.published import normalized_return
from tfrl.envs.registry import LEVEL_SETS, TRAIN
from tfrl.envs.spec import EnvSpec
from tfrl.evaluation.episodes import Episodes, split_episodes
from tfrl.run import rng

_METRICS = ("return", "return_std", "episode_length", "episode_length_std", "normalized_return")
GAP = "eval/generalization_gap"


def level_spec(task: Any, level_set: str, num_envs: int, use: rng.Use = rng.Use.EVALUATION) -> EnvSpec:
    """The envs that a policy is looked at in; other ones than training's, for each use and level set.

    Args:
      task: the run's settings, whose seed decides which episodes and, in `play`, which actions.
      level_set: "train" for the run's training levels, "test" for the full distribution of levels.
      num_envs: how many; env i is the same in any number of them.
      use: what is played for. Evaluations in training, afterwards and beside it play the same.
    """
    return EnvSpec.of(
        task,
        num_envs=num_envs,
        seed=rng.env_seed(task.seed, use, LEVEL_SETS.index(level_set)),
        num_levels=task.num_levels if level_set == TRAIN else 0,
        start_level=task.start_level if level_set == TRAIN else 0,
    )


def check_level_set(env: str, level_set: str) -> None:
    """Raise UserError if the env has no such level set."""
    if level_set not in registry.family(env).level_sets:
        raise UserError(f"{env} has no levels: leave --levels out.")


def evaluation_columns(level_sets: tuple[str, ...]) -> tuple[str, ...]:
    """The metrics of an evaluation in the order of progress.csv."""
    gap = (GAP,) if TRAIN in level_sets else ()
    return (*(f"eval_{s}/{name}" for s in level_sets for name in _METRICS), *gap)


def evaluation_metrics(task: Any, level_set: str, played: Episodes) -> dict[str, float]:
    """The metrics of one level set's episodes."""
    mean = float(played.returns.mean())
    score = normalized_return(task.env, task.distribution_mode, mean)
    values = (
        mean,
        float(played.returns.std()),
        float(played.lengths.mean()),
        float(played.lengths.std()),
        math.nan if score is None else score,
    )
    return {f"eval_{level_set}/{name}": value for name, value in zip(_METRICS, values, strict=True)}


def with_gap(task: Any, metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics with the score on training levels minus that on unseen ones.

    NaN where training plays all levels there are. Normalised scores count where both are known, else returns.
    """
    if TRAIN not in task.level_sets:
        return dict(metrics)
    scores = [metrics.get(f"eval_{s}/normalized_return", math.nan) for s in LEVEL_SETS]
    if np.isnan(scores).any():  # a game without a published range
        scores = [metrics[f"eval_{s}/return"] for s in LEVEL_SETS]
    return {**metrics, GAP: scores[0] - scores[1] if task.has_unseen_levels else math.nan}


def evaluation_results(task: Any, metrics: Mapping[str, float]) -> dict[str, Any]:
    """The `eval` part of results.json, from the metrics of the last evaluation."""
    num_envs, each = split_episodes(task.eval_episodes)
    part: dict[str, Any] = {
        level_set: {name: metrics[f"eval_{level_set}/{name}"] for name in _METRICS}
        | {"episodes": num_envs * each}
        for level_set in task.level_sets
    }
    return part | ({"generalization_gap": metrics[GAP]} if GAP in metrics else {})
