"""Reads the folders that runs leave, also half-written ones, for the commands that look at them."""

from __future__ import annotations

import csv
import dataclasses
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfrl.cli.errors import UserError
from tfrl.config.of_run import settings
from tfrl.envs.published import normalized_return
from tfrl.run import results
from tfrl.run.folder import SETTINGS_FILE, is_of
from tfrl.run.metrics import PROGRESS_FILE

STEPS = "env_steps"
SPEED = "time/env_steps_per_second"


@dataclass(frozen=True)
class Run:
    """One run's folder.

    Attributes:
      path: the folder.
      config: its settings.
      progress: a float64 array [U] for each column of progress.csv, one entry an update, NaN where there is
        no number; `env_steps` is always there and grows.
      results: results.json of a finished run, else None.
    """

    path: Path
    config: Any
    progress: dict[str, np.ndarray]
    results: dict[str, Any] | None

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    @property
    def env_steps(self) -> int:
        """Env steps so far."""
        steps = self.progress[STEPS]
        return int(steps[-1]) if steps.size else 0

    def points(self, column: str) -> tuple[np.ndarray, np.ndarray]:
        """Env steps and values of a column, both [P], where it has numbers."""
        steps, values = self.progress[STEPS], self.progress.get(column)
        if values is None:
            return np.zeros(0), np.zeros(0)
        known = np.isfinite(values)
        return steps[known], values[known]

    @property
    def is_done(self) -> bool:
        """True if it has come to its end, or to --solved-at, and left results."""
        return self.is_done_for(self.config)

    def is_done_for(self, config: Any) -> bool:
        """The same by other settings, which may want more env steps or another --solved-at."""
        return results.are_of_all(self.results, config, self.env_steps)

    @property
    def precision(self) -> str:
        """The precision of its torso: "float32" or "bfloat16", or "auto" where nobody knows yet."""
        return str((self.results or {}).get("precision", self.config.precision))

    def speed(self, updates: int | None = None) -> float | None:
        """Env steps a second of the last so many updates, by default of all; None before the first one."""
        taken, speeds = np.diff(self.progress[STEPS], prepend=0.0), self.progress.get(SPEED)
        known = np.zeros(0, int) if speeds is None else np.flatnonzero(speeds > 0)
        known = known if updates is None else known[-updates:]
        return float(taken[known].sum() / (taken[known] / speeds[known]).sum()) if known.size else None

    def evaluations(self, level_set: str) -> tuple[np.ndarray, np.ndarray]:
        """Env steps and mean returns of the evaluations on a level set, both float64 [P]."""
        steps, values = self.points(f"eval_{level_set}/return")
        score: Any = self.results
        for key in ("eval", level_set, "return"):
            score = score.get(key) if isinstance(score, dict) else None
        if not isinstance(score, int | float):
            return steps, values
        # results.json holds the last one, which may be without a row of its own.
        at = float(self.results["env_steps"])
        before = steps < at
        return np.append(steps[before], at), np.append(values[before], float(score))

    def training_return(self, env_steps: float) -> float:
        """Mean return of the last 100 episodes while training, at the last update up to `env_steps`.

        NaN where no episode had ended.
        """
        steps, values = self.points("rollout/episode_return")
        values = values[steps <= env_steps]
        return float(values[-1]) if values.size else float("nan")

    def final_return(self, level_set: str) -> float:
        """The last evaluation's mean return on a level set; NaN before the first one.

        On training levels without an evaluation, the mean of the last 100 episodes while training.
        """
        values = self.evaluations(level_set)[1]
        if values.size:
            return float(values[-1])
        return self.training_return(self.env_steps) if level_set == "train" else float("nan")

    def normalized(self, value: float) -> float:
        """A return of this run's env as a normalised score; NaN where no range is published."""
        score = normalized_return(self.config.env, self.config.distribution_mode, value)
        return float("nan") if score is None else score


def load(path: Path) -> Run:
    """Reads a run's folder; rows that are not whole (a run that is being written) are left out.

    Raises:
      UserError: there is no such folder, or it is not a run's.
    """
    run = Run(path, settings(path), read_progress(path / PROGRESS_FILE), results.read(path))
    ended = (run.results or {}).get("env_steps")
    # Those of fewer steps are of the shorter run that this one was before it went on.
    of_now = isinstance(ended, int | float) and ended >= run.env_steps
    return run if of_now else dataclasses.replace(run, results=None)


def find(paths: Iterable[Path], *, deep: bool = False) -> list[Path]:
    """Run folders: those given, and those one level below a given folder that is not one itself.

    Supervised runs, which may lie beside the others, are passed over.

    Args:
      paths: the given folders.
      deep: also those further below, such as the runs of sweeps and suites in a folder of runs.

    Raises:
      UserError: a path that does not exist, or in which there is no run.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir() and not (path / SETTINGS_FILE).is_file():
            below = sorted(_below(path, deep))
            if below and all(is_of(run, "dataset") for run in below):
                raise UserError(f"there are only runs of resnet.train in {path}.")
            below = [run for run in below if not is_of(run, "dataset")]
            if not below:
                raise UserError(f"there is no run in {path}: no {SETTINGS_FILE} there or in a folder below.")
            found += below
        else:
            found.append(path)
    return list(dict.fromkeys(found))


def _below(folder: Path, deep: bool) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        if SETTINGS_FILE in names:
            yield Path(place)
        if SETTINGS_FILE in names or (Path(place) != folder and not deep):
            folders.clear()
        elif "export" in folders:
            folders.remove("export")


def published_applies(config: Any) -> bool:
    """True if train-procgen's published curves are of the same task: easy, 200 levels from 0."""
    same = (config.distribution_mode, config.num_levels, config.start_level) == ("easy", 200, 0)
    return same and normalized_return(config.env, "easy", 0.0) is not None


def read_progress(path: Path) -> dict[str, np.ndarray]:
    """The columns of a progress.csv, as in `Run.progress`; without the file, no rows. Raises UserError."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return {STEPS: np.zeros(0)}
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from None
    whole = text[: text.rfind("\n") + 1]
    try:
        header, *rows = list(csv.reader(whole.splitlines())) or [[STEPS]]
    except csv.Error as error:
        raise UserError(f"{path} is damaged: {error}.") from None
    if header[:1] != [STEPS]:
        raise UserError(f"{path} is not the progress of a run: its first column is not {STEPS}.")
    try:
        table = [[float(cell) if cell else np.nan for cell in row] for row in rows if len(row) == len(header)]
    except ValueError:
        raise UserError(f"{path} is damaged: it holds something else than numbers.") from None
    columns = np.array(table, np.float64).reshape(-1, len(header)).T
    if not (np.isfinite(columns[0]).all() and (np.diff(columns[0], prepend=-1.0) > 0).all()):
        raise UserError(f"{path} is damaged: its {STEPS} do not grow from row to row.")
    return dict(zip(header, columns, strict=True))
