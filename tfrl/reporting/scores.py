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

ENOUGH = 3
"""The least number of runs of a variant for intervals, profiles and the probability of improvement."""

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

    def of_all_games(drawn: list[np.ndarray]) -> np.ndarray:
        return statistic(np.concatenate(drawn, axis=1))

    low, high = _bootstrap(scores, of_all_games, confidence, resamples, seed)
    return float(low), float(high)


def interval_of_runs(scores: Sequence[np.ndarray], statistic: Statistic) -> tuple[float, float]:
    """Returns `stratified_bootstrap`, or NaNs for fewer than ENOUGH runs, which are too few."""
    if sum(map(len, scores)) < ENOUGH:
        return float("nan"), float("nan")
    return stratified_bootstrap(scores, statistic)


def _bootstrap(
    strata: Sequence[np.ndarray],
    statistic: Callable[[list[np.ndarray]], np.ndarray],
    confidence: float,
    resamples: int,
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The ends [...] of the percentile interval of a statistic; runs are resampled within each stratum.

    The statistic is a function from one array [resamples, runs] for each stratum to [resamples, ...]. If a
    stratum has a single run, the ends are NaN, because its spread is unknown.
    """
    generator = np.random.default_rng(seed)
    known = min(map(len, strata)) > 1
    resamples = resamples if known else 1
    values = statistic([s[generator.integers(len(s), size=(resamples, len(s)))] for s in strata])
    tail = (1 - confidence) / 2
    low, high = np.quantile(values, (tail, 1 - tail), axis=0)
    return (low, high) if known else (low * np.nan, high * np.nan)


def performance_profile(scores: Sequence[np.ndarray], thresholds: np.ndarray) -> np.ndarray:
    """The share of runs with a score above each threshold, float64 [len(thresholds)].

    As in rliable, it is the distribution of the scores of all runs of all games.
    """
    return (np.concatenate(scores)[:, None] > thresholds).mean(axis=0)


def profile_band(
    scores: Sequence[np.ndarray], thresholds: np.ndarray, *, resamples: int = 1000, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """The pointwise 95 % interval of a performance profile, two arrays [len(thresholds)].

    Runs are drawn as in `stratified_bootstrap`. NaNs if a game has a single run.
    """

    def profile(drawn: list[np.ndarray]) -> np.ndarray:
        every = np.concatenate(drawn, axis=1)
        return np.stack([(every > threshold).mean(axis=1) for threshold in thresholds], axis=1)

    return _bootstrap(scores, profile, 0.95, resamples, seed)


Pairs = Sequence[tuple[np.ndarray, np.ndarray]]
"""Scores of two variants, [runs] and [other runs], for each game."""


def probability_of_improvement(pairs: Pairs) -> float:
    """The probability that a run of one variant beats a run of another on the same game, a mean over games.

    Equation 3 of the paper: in each game the share of pairs of runs in which the first has more; a tie counts
    half (the Mann-Whitney statistic, as in rliable).
    """
    return float(np.mean([_share_above(*pair) for pair in pairs]))


def improvement_interval(pairs: Pairs, *, resamples: int = 2000, seed: int = 0) -> tuple[float, float]:
    """The ends of the 95 % interval of the probability of improvement, drawn as in `stratified_bootstrap`.

    NaNs if a variant has a single run of a game.
    """

    def probability(drawn: list[np.ndarray]) -> np.ndarray:
        shares = [_share_above(ours, theirs) for ours, theirs in zip(drawn[::2], drawn[1::2], strict=True)]
        return np.mean(shares, axis=0)

    low, high = _bootstrap([s for pair in pairs for s in pair], probability, 0.95, resamples, seed)
    return float(low), float(high)


def _share_above(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The share of pairs in which the first has more, [..., n] and [..., m] to [...]."""
    difference = first[..., :, None] - second[..., None, :]
    return ((difference > 0) + 0.5 * (difference == 0)).mean(axis=(-2, -1))


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
