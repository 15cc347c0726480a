"""Runs side by side: which differ by their seed alone, and what train-procgen published of the same games."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tfrl.cli.flags import flag
from tfrl.config.ppo import DECISIVE
from tfrl.envs.published import normalized_return, published_curve
from tfrl.evaluation.episodes import LEVEL_SETS
from tfrl.reporting.runs import Run, published_applies

# What a result depends on, except for what tells the runs of one experiment apart.
_DECISIVE = {field.name for section in DECISIVE for field in dataclasses.fields(section)}
_DECISIVE -= {"env", "preset", "seed", "total_steps"}


@dataclass(frozen=True)
class Group:
    """Runs of one game whose settings differ by the seed alone.

    Attributes:
      env: the game; mode: its distribution mode.
      variant: what tells the group's settings from those of other groups, "" where nothing does.
      runs: one a seed.
    """

    env: str
    mode: str
    variant: str
    runs: tuple[Run, ...]

    @property
    def label(self) -> str:
        """For legends."""
        return self.variant or "tfrl"

    def scores(self, level_set: str) -> np.ndarray:
        """The runs' final normalised scores, float64 [runs], without those that have none."""
        scores = np.array([run.normalized(run.final_return(level_set)) for run in self.runs])
        return scores[np.isfinite(scores)]


def group(runs: Sequence[Run]) -> list[Group]:
    """Groups, sorted by game and then in the order of their first runs."""
    differing = sorted(set(differences(runs)) & _DECISIVE - {"distribution_mode"})
    members: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        variant = ", ".join(f"{flag(name)[2:]} {getattr(run.config, name)}" for name in differing)
        members.setdefault((run.config.env, run.config.distribution_mode, variant), []).append(run)
    groups = [Group(*key, tuple(found)) for key, found in members.items()]
    return sorted(groups, key=lambda g: (g.env, g.mode))


def variants(groups: Sequence[Group]) -> list[str]:
    """The labels of all groups, each once, in their order."""
    return list(dict.fromkeys(g.label for g in groups))


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """The settings that are not the same in all runs, each with its value in every run."""
    settings = [dataclasses.asdict(run.config) for run in runs]
    values = {name: [str(s[name]) for s in settings] for name in settings[0]}
    return {name: of_runs for name, of_runs in values.items() if len(set(of_runs)) > 1}


def published_scores(group: Group) -> Mapping[str, np.ndarray]:
    """Normalised scores of train-procgen's 3 runs after as many env steps, float64 [3] for each level set.

    Empty where nothing was published of the same task, or not of as many or as few steps.
    """
    steps = int(np.median([run.env_steps for run in group.runs]))
    if not published_applies(group.runs[0].config):
        return {}
    scores = {}
    for level_set in LEVEL_SETS:
        at, returns = published_curve(group.env, level_set)
        if not at[0] <= steps <= 1.02 * at[-1]:
            return {}
        reached = [np.interp(steps, at, run) for run in returns]
        scores[level_set] = np.array([normalized_return(group.env, group.mode, r) for r in reached])
    return scores
