"""Published figures: procgen's score ranges, final returns and learning curves; returns of any env.

data/README.md names the sources.
"""

import csv
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class PublishedReturn:
    """A return that another project published.

    Attributes:
      env, algorithm: the names in that project; the version of the env may differ.
      env_steps: the length of the training.
      mean: over the runs.
      spread: usually a standard deviation; None if it is not published.
      runs: the number of runs.
      source: the place of publication.
    """

    env: str
    algorithm: str
    env_steps: int
    mean: float
    spread: float | None
    runs: int
    source: str


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


RANGES: Mapping[str, str] = {
    "paper": "Cobbe et al. 2020 (arXiv:1912.01588), appendix C",
    "rliable": "train-procgen's code, which rliable (Agarwal et al. 2021) and most later papers use",
}
"""The sources of the two sets of ranges."""
_OF_RLIABLE = {("jumper", "easy"): (1.0, 10.0), ("leaper", "easy"): (1.5, 10.0)}
"""The ranges of rliable that differ from the paper's."""


def score_range(env: str, distribution_mode: str, ranges: str = "paper") -> tuple[float, float] | None:
    """The lowest and the highest return of a game, from one of `RANGES`; None without published ranges."""
    scores = _scores().get(env)
    if scores is None or distribution_mode not in ("easy", "hard"):
        return None
    if ranges == "rliable" and (env, distribution_mode) in _OF_RLIABLE:
        return _OF_RLIABLE[env, distribution_mode]
    return scores[f"{distribution_mode}_min"], scores[f"{distribution_mode}_max"]


def normalized_return(
    env: str, distribution_mode: str, episode_return: float, ranges: str = "paper"
) -> float | None:
    """The score (R - min) / (max - min): 0 for a useless policy, 1 for a perfect one.

    `ranges` is one of `RANGES`. None for envs and modes without published ranges.
    """
    found = score_range(env, distribution_mode, ranges)
    return None if found is None else (episode_return - found[0]) / (found[1] - found[0])


_FINAL = {
    ("easy", 200): (25_000_000, {"train": "easy200_25M_train", "test": "easy200_25M_test"}),
    ("easy", 0): (25_000_000, {"train": "easy_all_25M"}),
    ("hard", 500): (200_000_000, {"train": "hard500_200M_train", "test": "hard500_200M_test"}),
    ("hard", 0): (200_000_000, {"train": "hard_all_200M"}),
}  # env steps and columns of procgen_scores.csv, by distribution mode and training levels


def published_returns(
    game: str, *, distribution_mode: str = "easy", num_levels: int = 200
) -> tuple[int, dict[str, float]] | None:
    """The final returns of train-procgen's PPO by level set, and the number of env steps.

    For training on all levels (0), only the training returns. None if nothing is published.
    """
    final = _FINAL.get((distribution_mode, num_levels))
    if final is None or game not in _scores():
        return None
    return final[0], {level_set: _scores()[game][column] for level_set, column in final[1].items()}


def published_curve(game: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    """A learning curve (easy, 200 levels): env steps [P] and the runs' episode returns [N, P].

    split: `train` for the 200 levels, `test` for the full distribution.
    """
    curve = _curves()[game, split]
    return curve[0, :, 0], curve[:, :, 1]


@functools.cache
def _returns() -> tuple[PublishedReturn, ...]:
    """Reads returns.csv."""
    with (_DATA / "returns.csv").open(newline="", encoding="utf-8") as file:
        _, *rows = csv.reader(file)
    return tuple(
        PublishedReturn(
            env, algorithm, int(steps), float(mean), float(spread) if spread else None, int(runs), source
        )
        for env, algorithm, steps, mean, spread, runs, source in rows
    )


def returns_elsewhere(
    env: str, algorithm: str, *, distribution_mode: str = "easy", num_levels: int = 200
) -> list[PublishedReturn]:
    """The returns that other projects published for an env and an algorithm, with their versions and
    variants.

    For procgen, only returns for the same mode and number of training levels.
    """
    task = f"procgen-{env} {distribution_mode}{num_levels}" if env in _scores() else _without_version(env)
    return [
        found
        for found in _returns()
        if _without_version(found.env) == task and algorithm == found.algorithm.split("-")[-1]
    ]


def _without_version(env: str) -> str:
    return re.sub(r"-v\d+$", "", env)
