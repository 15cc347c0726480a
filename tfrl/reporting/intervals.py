"""Statistics over few runs, after Agarwal et al. 2021, *Deep RL at the Edge of the Statistical Precipice*.

https://arxiv.org/abs/2108.13264. Scores of a set of runs are a list with one array [runs] for each game, and
games may have different numbers of runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

Statistic = Callable[[np.ndarray], np.ndarray]


def mean(scores: np.ndarray) -> np.ndarray:
    """The mean over the last dimension, [..., n] to [...]."""
    return np.mean(scores, axis=-1)


def median(scores: np.ndarray) -> np.ndarray:
    """The median over the last dimension, [..., n] to [...]."""
    return np.median(scores, axis=-1)


def iqm(scores: np.ndarray) -> np.ndarray:
    """The mean of the middle half (interquartile mean) over the last dimension, [..., n] to [...].

    As scipy's `trim_mean(scores, 0.25)`, which the paper's rliable uses, floor(n / 4) are cut at each end.
    """
    count = np.shape(scores)[-1]
    cut = count // 4
    return np.sort(scores, axis=-1)[..., cut : count - cut].mean(axis=-1)


def pooled(scores: Sequence[np.ndarray]) -> np.ndarray:
    """Joins the scores of all games in one array [n]."""
    return np.concatenate(list(scores))


def spread_is_known(scores: Sequence[np.ndarray]) -> bool:
    """True if every game has two runs: a single one, drawn again and again, is as if there were no spread."""
    return min(map(len, scores)) > 1


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
    """A percentile bootstrap interval of a statistic of all scores, where runs are drawn anew in each game.

    Args:
      scores: one array [runs] for each game.
      statistic: from [..., n] to [...], such as `iqm`.
      confidence: of the interval.
      resamples: how often runs are drawn.
      seed: of the drawing.

    Returns:
      Its ends; NaNs where the spread is not known.
    """
    if not spread_is_known(scores):
        return float("nan"), float("nan")
    generator = np.random.default_rng(seed)
    drawn = [game[generator.integers(len(game), size=(resamples, len(game)))] for game in scores]
    values = statistic(np.concatenate(drawn, axis=1))  # [resamples]
    tail = (1 - confidence) / 2
    low, high = np.quantile(values, (tail, 1 - tail))
    return float(low), float(high)


def performance_profile(scores: Sequence[np.ndarray], thresholds: np.ndarray) -> np.ndarray:
    """The share of runs with a score above each threshold, float64 [len(thresholds)]."""
    return (pooled(scores)[:, None] > thresholds).mean(axis=0)


def profile_band(
    scores: Sequence[np.ndarray],
    thresholds: np.ndarray,
    *,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """The pointwise stratified-bootstrap interval of a performance profile, two arrays [len(thresholds)].

    NaNs where the spread is not known.
    """
    if not spread_is_known(scores):
        return np.full_like(thresholds, np.nan), np.full_like(thresholds, np.nan)
    generator = np.random.default_rng(seed)
    above = [game[:, None] > thresholds for game in scores]  # [runs, thresholds] a game
    counts = np.zeros((resamples, len(thresholds)))
    for game in above:
        drawn = generator.integers(len(game), size=(resamples, len(game)))
        counts += game[drawn].sum(axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(counts / sum(map(len, scores)), (tail, 1 - tail), axis=0)
    return low, high


Pairs = Sequence[tuple[np.ndarray, np.ndarray]]


def probability_of_improvement(pairs: Pairs) -> float:
    """The probability that a run of one variant beats a run of another on the same game, a mean over games.

    Equation 3 of the paper: in each game the share of pairs of runs in which the first has more, with ties as
    a half (the Mann-Whitney statistic).

    Args:
      pairs: scores of both variants, [runs] and [other runs], for each game.
    """
    return float(np.mean([_share_above(*pair) for pair in pairs]))


def improvement_interval(
    pairs: Pairs, *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Returns the ends of its stratified bootstrap interval, drawn as in `stratified_bootstrap`.

    NaNs where the spread of a variant is not known.
    """
    if not all(spread_is_known(of_variant) for of_variant in zip(*pairs, strict=True)):
        return float("nan"), float("nan")
    generator = np.random.default_rng(seed)
    values = np.zeros(resamples)
    for pair in pairs:
        drawn = [scores[generator.integers(len(scores), size=(resamples, len(scores)))] for scores in pair]
        values += _share_above(*drawn) / len(pairs)
    tail = (1 - confidence) / 2
    low, high = np.quantile(values, (tail, 1 - tail))
    return float(low), float(high)


def _share_above(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The share of pairs in which the first has more, [..., n] and [..., m] to [...]."""
    difference = first[..., :, None] - second[..., None, :]
    return ((difference > 0) + 0.5 * (difference == 0)).mean(axis=(-2, -1))


def over_seeds(
    curves: Sequence[tuple[np.ndarray, np.ndarray]], points: int = 200
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The steps that all of several curves cover: steps, mean, least and greatest value, each [P].

    A mean that goes on where some of the curves have ended, or not begun, would be one of other runs.

    Args:
      curves: steps and values [n] of each run, n of its own; of a run without a point all share nothing.
      points: how many steps, where curves do not have the same ones already.
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


def at_shared_steps(
    curves: Sequence[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray]:
    """The steps [P] at which every curve has a point of its own, and the curves' values there [N, P].

    Args:
      curves: steps and values [n] of each of N runs, n of its own; steps grow.
    """
    shared = functools.reduce(np.intersect1d, [steps for steps, _ in curves])
    return shared, np.stack([values[np.isin(steps, shared)] for steps, values in curves])
