"""Published figures of procgen's games: score ranges, final returns, learning curves (data/README.md)."""

import csv
import functools
from pathlib import Path

import numpy as np

_DATA = Path(__file__).parent / "data"


@functools.cache
def _scores() -> dict[str, dict[str, float]]:
    """Reads procgen_scores.csv: each game's row."""
    with (_DATA / "procgen_scores.csv").open(newline="", encoding="utf-8") as file:
        return {
            row.pop("game"): {key: float(value) for key, value in row.items()} for row in csv.DictReader(file)
        }


@functools.cache
def _curves() -> dict[tuple[str, str], np.ndarray]:
    """Reads procgen_easy200_curves.csv: float64 [run, point, (steps, return)] by game and split."""
    points: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {}
    with (_DATA / "procgen_easy200_curves.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            runs = points.setdefault((row["game"], row["split"]), {})
            point = (float(row["env_steps"]), float(row["episode_return_mean"]))
            runs.setdefault(row["run"], []).append(point)
    return {key: np.array(list(runs.values())) for key, runs in points.items()}


def normalized_return(env: str, distribution_mode: str, episode_return: float) -> float | None:
    """The score (R - min) / (max - min), from 0 for a policy that does nothing of use to 1 for a perfect one.

    The ranges are those of Cobbe et al. 2020, https://arxiv.org/abs/1912.01588, appendix C. None where none
    is published: other modes than easy and hard, other envs than procgen's.
    """
    scores = _scores().get(env)
    if scores is None or distribution_mode not in ("easy", "hard"):
        return None
    low, high = scores[f"{distribution_mode}_min"], scores[f"{distribution_mode}_max"]
    return (episode_return - low) / (high - low)


def published_returns(game: str) -> dict[str, float]:
    """The final returns of a game by column of procgen_scores.csv, `easy200_25M_test` say."""
    ranges = ("easy_min", "easy_max", "hard_min", "hard_max")
    return {name: value for name, value in _scores()[game].items() if name not in ranges}


def published_curve(game: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    """A learning curve (easy, 200 levels): env steps [P] and the runs' episode returns [N, P].

    split: `train` for the 200 levels, `test` for the full distribution.
    """
    curve = _curves()[game, split]
    return curve[0, :, 0], curve[:, :, 1]
