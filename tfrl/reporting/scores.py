"""Statistics over few runs, after Agarwal et al. 2021, *Deep RL at the Edge of the Statistical Precipice*,
https://arxiv.org/abs/2108.13264. Scores are a list with one array [runs] for each game.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Statistic = Callable[[np.ndarray], Any]
"""A function from [..., n] to [...]."""
Curve = tuple[np.ndarray, np.ndarray]
"""Steps, which grow, and values, both [n]."""

mean: Statistic = functools.partial(np.mean, axis=-1)
median: Statistic = functools.partial(np.median, axis=-1)


def iqm(scores: np.ndarray) -> np.ndarray:
    """The interquartile mean over the last dimension, [..., n] to [...]; floor(n / 4) are cut at each end.

    This is scipy's `trim_mean(scores, 0.25)`, which the paper's rliable uses.
    """
    count = np.shape(scores)[-1]
    cut = count // 4
    return np.sort(scores, axis=-1)[..., cut : count - cut].mean(axis=-1)


def standard_error(scores: np.ndarray) -> float:
    """The standard error of the mean of independent samples [n]; NaN for fewer than two."""
    count = len(scores)
    return float(np.std(scores, ddof=1) / np.sqrt(count)) if count > 1 else float("nan")


def stratified_bootstrap(
    scores: Sequence[np.ndarray],
    statistic: Statistic,
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """The ends of a statistic's percentile bootstrap interval; runs are resampled within each game.

    Args:
      scores: one array [runs] for each game.
      statistic: a function of all scores, such as `iqm`.
      confidence, resamples, seed: of the bootstrap.

    Returns NaNs if a game has a single run.
    """
    if min(map(len, scores)) == 1:
        return float("nan"), float("nan")
    generator = np.random.default_rng(seed)
    drawn = [s[generator.integers(len(s), size=(resamples, len(s)))] for s in scores]
    tail = (1 - confidence) / 2
    low, high = np.quantile(statistic(np.concatenate(drawn, axis=1)), (tail, 1 - tail))
    return float(low), float(high)


def over_seeds(
    curves: Sequence[Curve], points: int = 200
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The steps that all curves cover: steps, mean, least and greatest value, each [P].

    Args:
      curves: the curves of the runs; an empty one leaves no shared steps.
      points: the number of steps if the curves have different steps.
    """
    if not curves or not all(len(steps) for steps, _ in curves):
        return (np.zeros(0),) * 4
    begin, end = max(steps[0] for steps, _ in curves), min(steps[-1] for steps, _ in curves)
    shared = [steps[(begin <= steps) & (steps <= end)] for steps, _ in curves]
    steps = shared[0]
    if not all(np.array_equal(steps, other) for other in shared):
        steps = np.linspace(begin, end, points) if begin <= end else np.zeros(0)
    values = np.stack([np.interp(steps, s, v) for s, v in curves])
    return steps, values.mean(0), values.min(0), values.max(0)


def at_shared_steps(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """The steps [P] at which each of N curves has a point, and the values there [N, P]."""
    shared = functools.reduce(np.intersect1d, [steps for steps, _ in curves])
    return shared, np.stack([values[np.isin(steps, shared)] for steps, values in curves])
