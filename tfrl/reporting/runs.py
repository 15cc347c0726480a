"""Reads runs, also unfinished ones, and finds the runs that are seeds of one experiment."""

from __future__ import annotations

import csv
import dataclasses
import functools
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfrl.algorithms.runs import read_settings
from tfrl.cli.errors import UserError
from tfrl.cli.flags import flag
from tfrl.cli.settings import SETTINGS_FILE, algorithm_of
from tfrl.cli.streams import tell
from tfrl.config.run import RLSettings, Task, hyperparameters
from tfrl.envs.published import normalized_return, published_curve
from tfrl.envs.registry import LEVEL_SETS, TRAIN, family
from tfrl.run.folder import DATA_FILE, read_json, read_results
from tfrl.run.metrics import LEVELS_FILE, PROGRESS_FILE

if TYPE_CHECKING:
    from tfrl.reporting.supervised import SupervisedRun

STEPS, IMAGES = "env_steps", "images"
SPEEDS = {"env steps": "time/env_steps_per_second", "gradient steps": "time/updates_per_second"}
_TASK = {*Task.__dataclass_fields__, "precision", "eval_greedy"}


@dataclass(frozen=True)
class StoredRun:
    """One run's folder.

    Attributes:
      path: the folder.
      config: its settings.
      progress: the columns of progress.csv by name, float64 [updates], NaN without a number. `env_steps` is
        always there and grows.
      results: the content of results.json of a finished run, otherwise None.
    """

    path: Path
    config: RLSettings
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
        """Env steps and numbers of a column, as the function `points` gives them."""
        return points(self.progress, self.results, column)

    @property
    def is_done(self) -> bool:
        """True if it is complete and has results."""
        return self.is_done_for(self.config) or self.was_stopped

    @property
    def share_done(self) -> float:
        """The part of the run that is done, 0 to 1: by env steps, or by --max-episodes if that is more."""
        if self.is_done:
            return 1.0
        episodes, most = self.progress.get("rollout/episodes", np.zeros(0)), self.config.max_episodes
        shares = [self.env_steps / self.config.run_steps]
        if most is not None and np.isfinite(episodes).any():
            shares.append(float(np.nanmax(episodes)) / most)
        return min(1.0, max(shares))

    @property
    def was_stopped(self) -> bool:
        """True if a callback has stopped it, and it was not trained further."""
        found = self.results or {}
        return "stopped" in found and found.get("env_steps") == self.env_steps

    def is_done_for(self, config: RLSettings) -> bool:
        """True if it has results, and is complete for these settings, which may ask for a longer run."""
        found = self.results
        if found is None:
            return False

        def reached(name: str, wanted: float | None) -> bool:
            value = found.get(name)
            return wanted is not None and isinstance(value, int | float) and value >= wanted

        solved = reached("episode_return", config.solved_at)
        return self.env_steps >= config.run_steps or reached("episodes", config.max_episodes) or solved

    @property
    def data(self) -> dict[str, Any] | None:
        """The episodes and returns of the recorded set that it learns from; None without a set."""
        return read_json(self.path / DATA_FILE)

    @property
    def precision(self) -> str:
        """The precision of its torso: "float32", "bfloat16", or "auto" if it is not known yet."""
        return str((self.results or {}).get("precision", self.config.precision))

    @property
    def speed(self) -> float | None:
        """Env steps, or gradient steps, a second of all updates; None before the first one."""
        return mean_speed(self.progress, SPEEDS[self.config.counts])

    def evaluations(self, level_set: str) -> tuple[np.ndarray, np.ndarray]:
        """Env steps and mean returns of the evaluations on a level set, both float64 [P]."""
        return self.points(f"eval_{level_set}/return")

    def training_return(self, env_steps: float) -> float:
        """Mean return of the last 100 training episodes at the last update up to `env_steps`, or NaN."""
        steps, values = self.points("rollout/episode_return")
        values = values[steps <= env_steps]
        return float(values[-1]) if values.size else float("nan")

    def final_return(self, level_set: str) -> float:
        """The last evaluation's mean return on a level set; NaN before the first one.

        For training levels without an evaluation, the mean of the last 100 training episodes.
        """
        values = self.evaluations(level_set)[1]
        if values.size:
            return float(values[-1])
        return self.training_return(self.env_steps) if level_set == "train" else float("nan")

    def normalized(self, value: float, ranges: str = "paper") -> float:
        """A return of this run's env as a normalised score; NaN without a published range."""
        score = self.config.normalized(value, ranges)
        return float("nan") if score is None else score


def points(
    progress: Mapping[str, np.ndarray], results: Mapping[str, Any] | None, column: str
) -> tuple[np.ndarray, np.ndarray]:
    """Env steps, or images, and numbers of a column of progress.csv, both float64 [P].

    The last evaluation of a run that a callback stopped is in results.json only.
    """
    every = next(iter(progress.values()))
    values = progress.get(column, np.full_like(every, np.nan))
    steps, values = every[np.isfinite(values)], values[np.isfinite(values)]
    (of, _, name), found = column.partition("/"), results or {}
    ended, scores = found.get("env_steps", -1), found.get("eval", {})
    score = scores.get(of.removeprefix("eval_")) if isinstance(scores, dict) else None
    last = score.get(name) if isinstance(score, dict) else None
    if not isinstance(last, int | float) or any(every > ended):  # older results
        return steps, values
    before = steps < ended
    return np.append(steps[before], ended), np.append(values[before], last)


def mean_speed(progress: Mapping[str, np.ndarray], column: str) -> float | None:
    """Env steps, or images, a second of all rows, from the column of speeds; None without a speed."""
    taken = np.diff(next(iter(progress.values())), prepend=0.0)
    speeds = progress.get(column, np.zeros_like(taken))
    known = speeds > 0
    return float(taken[known].sum() / (taken[known] / speeds[known]).sum()) if known.any() else None


def load(path: Path, config: RLSettings | None = None) -> StoredRun:
    """Reads a run's folder, except for a row that is being written; also its settings unless they are given.

    Raises UserError if it has no run.
    """
    config = config or read_settings(path)
    run = StoredRun(path, config, read_progress(path / PROGRESS_FILE), read_results(path))
    ended = (run.results or {}).get("env_steps")
    # Results of fewer steps are older than the resume of this run.
    of_now = isinstance(ended, int | float) and ended >= run.env_steps
    return run if of_now else dataclasses.replace(run, results=None)


def find(paths: Iterable[Path]) -> list[Path]:
    """The run folders among `paths`; for a path that is no run, the run folders directly inside it.

    Supervised runs beside others are left out, with a warning. Raises UserError for a folder without a run.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir() or (path / SETTINGS_FILE).is_file():
            found.append(path)
            continue
        below = sorted({file.parent for file in path.glob(f"*/{SETTINGS_FILE}")} - {path / "export"})
        if not below:
            raise UserError(f"there is no run in {path}: no {SETTINGS_FILE} there or in a folder below.")
        supervised = [run for run in below if is_supervised(run)]
        if 0 < len(supervised) < len(below):
            command = shlex.join([*map(str, supervised), "--out", str(path / "resnet")])
            tell(
                f"warning: runs of resnet.train are left out; report them by python -m tfrl.report {command}"
            )
        found += [run for run in below if run not in supervised] or below
    return list(dict.fromkeys(found))


def is_supervised(run: Path) -> bool:
    """True if the folder holds a run of resnet.train."""
    return algorithm_of(run / SETTINGS_FILE) == "resnet"


def read_progress(path: Path) -> dict[str, np.ndarray]:
    """The columns of a progress.csv, as in `StoredRun.progress`; no rows without the file. Raises UserError.

    The first column of a supervised run is `images`.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return {STEPS: np.zeros(0)}
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from None
    whole = text[: text.rfind("\n") + 1]  # without a row that is being written
    try:
        header, *rows = list(csv.reader(whole.splitlines())) or [[STEPS]]
        table = [[float(cell) if cell else np.nan for cell in row] for row in rows if len(row) == len(header)]
    except (csv.Error, ValueError) as error:
        raise UserError(f"{path} is damaged: {error}.") from None
    if header[:1] not in ([STEPS], [IMAGES]):
        raise UserError(f"{path} is not the progress of a run: its first column is not {STEPS}.")
    columns = np.array(table, np.float64).reshape(-1, len(header)).T
    if not (np.isfinite(columns[0]).all() and (np.diff(columns[0], prepend=-1.0) > 0).all()):
        raise UserError(f"{path} is damaged: its {header[0]} do not increase from row to row.")
    return dict(zip(header, columns, strict=True))


def read_levels(path: Path) -> dict[str, np.ndarray] | None:
    """The columns of the `levels.csv` in a run's folder, float64 [L]; None without level replay."""
    try:
        with (path / LEVELS_FILE).open(newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file)
        return dict(zip(header, np.array(rows, np.float64).T, strict=True))
    except (OSError, ValueError):
        return None


# Groups


@dataclass(frozen=True)
class Group:
    """Seeds of one experiment: runs of one env with equal settings except for those that change no result.

    Attributes:
      env: the env's name.
      mode: its distribution mode.
      label: the variant in legends: its algorithm, and the settings that distinguish it.
      runs: one run for each seed.
      repeated: runs with the settings and the seed of one of `runs`; they are ignored.
    """

    env: str
    mode: str
    label: str
    runs: tuple[StoredRun, ...]
    repeated: tuple[StoredRun, ...] = ()

    @property
    def config(self) -> Any:
        """The settings of the first run."""
        return self.runs[0].config

    @property
    def level_sets(self) -> tuple[str, ...]:
        """The level sets of the env: "train" and "test", or only "test"."""
        return self.config.level_sets

    @property
    def env_steps(self) -> int:
        """Env steps that all runs have reached. Curves are compared up to there."""
        return min(run.env_steps for run in self.runs)

    @property
    def is_done(self) -> bool:
        """True if all runs are done."""
        return all(run.is_done for run in self.runs)

    @property
    def reproduces_published(self) -> bool:
        """True if train-procgen published curves of this task: easy, 200 levels from 0."""
        config = self.config
        same = (self.mode, config.num_levels, config.start_level) == ("easy", 200, 0)
        return same and normalized_return(self.env, "easy", 0.0) is not None

    @functools.cached_property
    def _evaluations(self) -> Mapping[str, list[dict[int, float]]]:
        """The mean returns of each run by env steps, for each level set."""
        return {s: [dict(zip(*run.evaluations(s), strict=True)) for run in self.runs] for s in LEVEL_SETS}

    def scored_at(self, level_set: str) -> int | None:
        """The env steps of the scores; None without an evaluation.

        If all runs are done, this is the end of the longest. Otherwise it is the last step at which most runs
        were evaluated.
        """
        counts = Counter(step for run in self._evaluations[level_set] for step in run)
        if counts and self.is_done:
            return max(run.env_steps for run in self.runs)
        return int(max(counts, key=lambda step: (counts[step], step))) if counts else None

    def returns(self, level_set: str) -> np.ndarray:
        """Mean returns at `scored_at`, float64 [runs], NaN for runs without an evaluation there.

        For training levels without any evaluation, the mean of the last 100 training episodes at `env_steps`.
        """
        at = self.scored_at(level_set)
        if at is None and level_set == TRAIN:
            return np.array([run.training_return(self.env_steps) for run in self.runs])
        if self.is_done:
            return np.array([run.final_return(level_set) for run in self.runs])
        return np.array(
            [np.nan if at is None else run.get(at, np.nan) for run in self._evaluations[level_set]]
        )

    def scores(self, level_set: str, ranges: str = "paper") -> np.ndarray:
        """The normalised `returns`, float64 [n], without NaNs; `ranges` are those of `normalized_return`."""
        scores = np.array([self.runs[0].normalized(value, ranges) for value in self.returns(level_set)])
        return scores[np.isfinite(scores)]

    def published_scores(self) -> dict[str, np.ndarray]:
        """Normalised scores of train-procgen's 3 runs after as many env steps, float64 [3] by level set.

        Empty if no scores of this task and this number of env steps were published.
        """
        if not self.reproduces_published:
            return {}
        scores = {}
        for level_set in LEVEL_SETS:
            steps = self.scored_at(level_set) or self.env_steps
            at, returns = published_curve(self.env, level_set)
            if not at[0] <= steps <= 1.02 * at[-1]:
                return {}
            at_steps = [float(np.interp(steps, at, run)) for run in returns]
            reached = [normalized_return(self.env, self.mode, value) for value in at_steps]
            scores[level_set] = np.array(reached)
        return scores


def group(runs: Sequence[StoredRun]) -> list[Group]:
    """Sorts runs into groups, by env and then by variant, in the order of the variants' first runs.

    If runs have the same settings and seed, such as a run and its copy, only the longest one counts.
    """
    members: dict[tuple[str, str, str], list[StoredRun]] = {}
    for run, label in zip(runs, _labels(runs), strict=True):
        members.setdefault((run.config.env, run.config.distribution_mode, label), []).append(run)
    groups = []
    for key, found in members.items():
        farthest: dict[int, StoredRun] = {}
        for run in sorted(found, key=lambda run: (run.is_done, run.env_steps), reverse=True):
            farthest.setdefault(run.config.seed, run)
        counted = tuple(run for run in found if farthest[run.config.seed] is run)
        repeated = tuple(run for run in found if farthest[run.config.seed] is not run)
        groups.append(Group(*key, counted, repeated))
    order = variants(groups)
    return sorted(groups, key=lambda g: (g.env, g.mode, order.index(g.label)))


def variants(groups: Sequence[Group]) -> list[str]:
    """The different labels of the groups, in their order."""
    return list(dict.fromkeys(g.label for g in groups))


def over_games(groups: Sequence[Group], level_sets: Sequence[str]) -> list[Group]:
    """The groups for statistics over games: all variants have scores on `level_sets` in their games."""
    scored = [g for g in groups if TRAIN in g.level_sets and all(g.scores(s).size for s in level_sets)]
    games = [{g.env for g in scored if g.label == name} for name in variants(scored)]
    return [g for g in scored if all(g.env in of_variant for of_variant in games)]


def steps_title(runs: Iterable[StoredRun]) -> str:
    """The title of the runs' steps: env steps, or gradient steps on recorded data."""
    return " or ".join(dict.fromkeys(run.config.counts for run in runs))


def run_names(runs: Sequence[StoredRun | SupervisedRun]) -> list[str]:
    """The names of runs, or their paths if two have the same name."""
    names = [run.name for run in runs]
    return names if len({*names}) == len(names) else [str(run.path) for run in runs]


def workers_and_replicas(results: Mapping[str, Any]) -> str:
    """The workers of a run, and the replicas of each: "2 x 4", with "?" for an unknown number."""
    workers, replicas = results.get("workers"), results.get("replicas")  # these are of all workers
    return f"{workers or '?'} x {replicas // workers if workers and replicas else '?'}"


def ignored(run: StoredRun | SupervisedRun, kept: StoredRun | SupervisedRun) -> str:
    """The sentence for a run that does not count, because `kept` has its settings and its seed."""
    seed = run.config.seed
    return f"{run.path} is ignored: it has the same settings and the same seed, {seed}, as {kept.path}."


def differences(runs: Sequence[StoredRun]) -> dict[str, list[str]]:
    """The settings that differ between runs, with the value in every run; "-" for a missing setting."""
    return _differing([_settings(run) for run in runs])


def _differing(of_runs: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    values = {name: [of_run.get(name, "-") for of_run in of_runs] for some in of_runs for name in some}
    return {name: found for name, found in values.items() if len({*found}) > 1}


def _settings(run: StoredRun) -> dict[str, str]:
    """A run's settings as texts, with its length in whole updates and its actual precision."""
    found = {f.name: str(getattr(run.config, f.name)) for f in dataclasses.fields(run.config)}
    changed = {"total_steps": f"{run.config.run_steps:,}", "precision": run.precision}
    return {"algorithm": run.config.algorithm, **found, **changed}


def _labels(runs: Sequence[StoredRun]) -> list[str]:
    """The variant of each run: its algorithm, if there are several, and the settings that distinguish it.

    These are settings of the algorithm that differ between its runs, and settings of the task that differ
    between any runs. Games are compared with each other, because statistics are over all games. Other envs
    are not.
    """
    every, algorithms = [_settings(run) for run in runs], [run.config.algorithm for run in runs]
    arenas = ["" if TRAIN in family(run.config.env).level_sets else run.config.env for run in runs]

    @functools.cache
    def distinguishing(arena: str, algorithm: str) -> list[str]:
        peers = [i for i, other in enumerate(arenas) if other == arena]
        alike = [i for i in peers if algorithms[i] == algorithm]
        task = _TASK & _differing([every[i] for i in peers]).keys()
        if len({runs[i].config.total_steps for i in peers}) == 1:
            task.discard("total_steps")  # each algorithm rounds it to its own updates
        compared = hyperparameters(runs[alike[0]].config).keys() | {"eval_greedy"}
        compared -= {"algorithm", "env", "preset", "seed"}
        return sorted(compared & (_differing([every[i] for i in alike]).keys() | task))

    labels = []
    for settings, algorithm, arena in zip(every, algorithms, arenas, strict=True):
        words = [f"{flag(name)[2:]} {settings[name]}" for name in distinguishing(arena, algorithm)]
        labels.append(", ".join([algorithm, *words] if len({*algorithms}) > 1 or not words else words))
    return labels
