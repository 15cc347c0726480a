"""Runs side by side: which are seeds of one experiment, and what was published of the same games."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tfrl.envs.published import (
    PublishedReturn,
    normalized_return,
    published_curve,
    published_returns,
    returns_elsewhere,
)
from tfrl.envs.registry import LEVEL_SETS, TRAIN, level_set_title
from tfrl.reporting.labels import labels
from tfrl.reporting.runs import Run, published_applies

PUBLISHED = "train-procgen's PPO (published)"
"""The name of published curves and scores, which stand beside runs of any algorithm."""


@dataclass(frozen=True)
class Group:
    """Seeds of one experiment: runs of one env that differ in nothing else that decides a result.

    Runs may have come to different env steps. Their curves are compared as far as all have come, and their
    scores where most of them were evaluated.

    Attributes:
      env: the env's name.
      mode: its distribution mode.
      algorithm: what trained them.
      variant: what tells the group from others, its algorithm and settings, "" where nothing does.
      runs: one a seed.
      repeated: runs of the same settings whose seed is that of one of `runs`, which do not count.
    """

    env: str
    mode: str
    algorithm: str
    variant: str
    runs: tuple[Run, ...]
    repeated: tuple[Run, ...] = ()

    @property
    def label(self) -> str:
        """The name of the variant in legends."""
        return self.variant or self.algorithm

    @property
    def level_sets(self) -> tuple[str, ...]:
        """The level sets of the env: "train" and "test", or, without levels, "test" alone."""
        return self.runs[0].config.level_sets

    @property
    def env_steps(self) -> int:
        """Env steps that all runs have reached."""
        return min(run.env_steps for run in self.runs)

    @cached_property
    def _evaluations(self) -> Mapping[str, list[dict[int, float]]]:
        """Every run's mean returns by env steps, for each level set."""
        return {s: [dict(zip(*run.evaluations(s), strict=True)) for run in self.runs] for s in LEVEL_SETS}

    @property
    def ended_apart(self) -> bool:
        """True if all runs are done, each after env steps of its own, as --solved-at ends them."""
        return all(run.is_done for run in self.runs) and len({run.env_steps for run in self.runs}) > 1

    def scored_at(self, level_set: str) -> int | None:
        """The last env step at which most runs were evaluated; None where none was.

        Of runs that `ended_apart`, the end of the last one; each has its scores at its own.
        """
        if self.ended_apart and any(self._evaluations[level_set]):
            return max(run.env_steps for run in self.runs)
        counts = Counter(step for run in self._evaluations[level_set] for step in run)
        return int(max(counts, key=lambda step: (counts[step], step))) if counts else None

    def returns(self, level_set: str) -> np.ndarray:
        """Mean returns at `scored_at`, float64 [runs], NaN for runs without an evaluation there.

        Of runs that `ended_apart`, those of each one's last evaluation.

        On training levels that no run was evaluated on, those of the last 100 episodes while training, when
        all runs had come as far.
        """
        at = self.scored_at(level_set)
        if at is None and level_set == "train":
            return np.array([run.training_return(self.env_steps) for run in self.runs])
        if self.ended_apart:
            return np.array([run.final_return(level_set) for run in self.runs])
        return np.array([of_run.get(at, np.nan) for of_run in self._evaluations[level_set]])

    def scores(self, level_set: str) -> np.ndarray:
        """The runs' normalised `returns`, float64 [n], without those that have none."""
        scores = np.array([self.runs[0].normalized(value) for value in self.returns(level_set)])
        return scores[np.isfinite(scores)]

    def notes(self) -> list[str]:
        """Sentences about everything that keeps these runs from being whole seeds of one experiment."""
        name = f"{self.env}, {self.variant}" if self.variant else self.env
        found = []
        for run in self.repeated:
            (kept,) = (other for other in self.runs if other.config.seed == run.config.seed)
            found.append(
                f"{run.path} does not count: its settings and its seed, {run.config.seed}, are those of "
                f"{kept.path}."
            )
        if len({run.env_steps for run in self.runs}) > 1:
            reached = ", ".join(
                f"{run.config.seed} at {run.env_steps:,}{'' if run.is_done else ' (not finished)'}"
                for run in self.runs
            )
            found.append(
                f"{name}: the seeds have come to different env steps ({reached}), so curves are compared up "
                f"to {self.env_steps:,}."
            )
        on_scores = {s: self._note_on_scores(s) for s in self.level_sets}
        if len({*on_scores.values()}) == 1:  # as evaluations are on both
            on_scores = {"": on_scores["test"]}
        titles = {s: f" on {level_set_title(self.env, s)}" if s else "" for s in on_scores}
        return found + [
            f"{name}: scores{titles[s]} are those {note}." for s, note in on_scores.items() if note
        ]

    def _note_on_scores(self, level_set: str) -> str | None:
        at = self.scored_at(level_set)
        returns = self.returns(level_set)
        missing = [str(run.config.seed) for run, r in zip(self.runs, returns, strict=True) if np.isnan(r)]
        last = max(run.env_steps for run in self.runs)
        if self.ended_apart:
            return f"at each seed's end, after {self.env_steps:,} to {last:,} env steps"
        if at is None or len(self.runs) == 1 or (at == last and not missing):
            return None
        without = f", without seed {' and '.join(missing)}, not evaluated there" if missing else ""
        return f"after {at:,} env steps{without}"


def group(runs: Sequence[Run]) -> list[Group]:
    """Sorts runs into groups, by env and then by variant, in the order of the variants' first runs.

    Of runs with the same settings and seed, a run and its copy say, the one that has come farthest counts.
    Algorithms have settings of their own, but the task should be the same for all: where it is not, labels
    say so.
    """
    members: dict[tuple[str, ...], list[Run]] = {}
    for run, label in zip(runs, labels(runs), strict=True):
        config = run.config
        members.setdefault((config.env, config.distribution_mode, config.algorithm, label), []).append(run)
    groups = [Group(*key, *_one_a_seed(found)) for key, found in members.items()]
    order = variants(groups)
    return sorted(groups, key=lambda g: (g.env, g.mode, order.index(g.label)))


def variants(groups: Sequence[Group]) -> list[str]:
    """The labels of all groups, each once, in their order."""
    return list(dict.fromkeys(g.label for g in groups))


def paired_returns(
    groups: Sequence[Group], level_set: str
) -> dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]]:
    """The evaluated returns [runs] of every two variants, by their labels: a pair a game that both have.

    A pair of variants is there once, in the order of the groups.
    """
    found: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]] = {}
    evaluated = []
    for g in groups:
        if level_set in g.level_sets:
            returns = g.returns(level_set)
            evaluated.append((g, returns[np.isfinite(returns)]))
    order = variants(groups)
    for g, ours in evaluated:
        for other, theirs in evaluated:
            same_game = (g.env, g.mode) == (other.env, other.mode)
            if same_game and order.index(g.label) < order.index(other.label) and ours.size and theirs.size:
                found.setdefault((g.label, other.label), []).append((ours, theirs))
    return found


def over_games(groups: Sequence[Group], level_sets: Sequence[str]) -> list[Group]:
    """The groups that statistics over games are of, by their scores on all of `level_sets`.

    Variants are compared on the same games: those for which every variant has scores.
    """
    scored = [g for g in groups if TRAIN in g.level_sets and all(g.scores(s).size for s in level_sets)]
    games = [{g.env for g in scored if g.label == name} for name in variants(scored)]
    return [g for g in scored if all(g.env in of_variant for of_variant in games)]


def notes(groups: Sequence[Group]) -> list[str]:
    """Sentences that readers of a report about these groups must know."""
    found = [note for g in groups for note in g.notes()]
    found += _notes_on_levels(groups) + _notes_on_phases(groups)
    found += _notes_on_games(groups) + _notes_on_lengths(groups) + _notes_on_actions(groups)
    shared = over_games(groups, ["test"])
    names = variants(shared)
    for name in names:
        members = [(g, s) for g in shared if g.label == name for s in LEVEL_SETS if g.scores(s).size]
        at = sorted({g.scored_at(s) or g.env_steps for g, s in members})
        if len(at) > 1:
            found.append(
                f"Statistics over games{f' of {name}' if len(names) > 1 else ''} join scores after "
                f"{' and '.join(f'{step:,}' for step in at)} env steps."
            )
    return found + _notes_on_seeds(shared)


def published_scores(group: Group) -> Mapping[str, np.ndarray]:
    """Normalised scores of train-procgen's 3 runs after as many env steps, float64 [3] for each level set.

    Empty where nothing was published of the same task, or not of as many or as few steps.
    """
    if not published_applies(group.runs[0].config):
        return {}
    scores = {}
    for level_set in LEVEL_SETS:
        steps = group.scored_at(level_set) or group.env_steps
        at, returns = published_curve(group.env, level_set)
        if not at[0] <= steps <= 1.02 * at[-1]:
            return {}
        reached = [np.interp(steps, at, run) for run in returns]
        scores[level_set] = np.array([normalized_return(group.env, group.mode, r) for r in reached])
    return scores


def published_of_games(groups: Sequence[Group], level_set: str) -> list[np.ndarray]:
    """The `published_scores` of each game of these groups, once, at its first group's env steps.

    Empty unless there are some of every game.
    """
    games: dict[tuple[str, str], Mapping[str, np.ndarray]] = {}
    for g in groups:
        games.setdefault((g.env, g.mode), published_scores(g))
    return [scores[level_set] for scores in games.values()] if all(games.values()) else []


def published_finals(group: Group) -> tuple[int, dict[str, float]] | None:
    """Final returns of train-procgen's runs of the same task: after how many env steps, and by level set."""
    config = group.runs[0].config
    if config.start_level:
        return None
    return published_returns(group.env, distribution_mode=group.mode, num_levels=config.num_levels)


def returns_of_others(group: Group) -> list[PublishedReturn]:
    """The returns that other projects published for the group's env, in any version, and its algorithm."""
    config = group.runs[0].config
    if config.start_level:
        return []
    levels = {"distribution_mode": group.mode, "num_levels": config.num_levels}
    return returns_elsewhere(group.env, config.published_as, **levels)


def _notes_on_levels(groups: Sequence[Group]) -> list[str]:
    """A sentence where some have unseen levels and others trained on all."""
    games = [g for g in groups if TRAIN in g.level_sets]
    of_all = list(dict.fromkeys(g.label for g in games if not g.runs[0].config.has_unseen_levels))
    if not of_all or len(of_all) == len(variants(games)):
        return []
    return [f"{_and(of_all)} trained on all levels, so what is called unseen levels is nothing new there."]


def _notes_on_phases(groups: Sequence[Group]) -> list[str]:
    """A sentence for each variant with phases of which no run of an env has come to the end of one."""
    phasic = [g for g in groups if g.runs[0].config.updates_alike > 1]
    envs: dict[tuple[str, int], list[str]] = {}
    for g in phasic:
        updates = g.runs[0].config.updates_alike
        if all(run.env_steps < updates * run.config.steps_per_update for run in g.runs):
            envs.setdefault((g.label, updates), []).append(g.env)
    found = []
    for (label, updates), short in envs.items():
        all_are = len(short) == sum(g.label == label for g in phasic)
        where = "" if all_are else f" in {_and(short)}"
        found.append(f"{label} has not had an auxiliary phase{where}: one comes after {updates} updates.")
    return found


def _notes_on_lengths(groups: Sequence[Group]) -> list[str]:
    """Sentences about games of which variants have scores after different env steps."""
    games: dict[tuple[str, str], list[Group]] = {}
    for g in groups:
        if g.scored_at("test") is not None:
            games.setdefault((g.env, g.mode), []).append(g)
    alike: dict[str, list[str]] = {}
    for (env, _), members in games.items():
        at = [g.scored_at("test") for g in members]
        update = max(run.config.steps_per_update for g in members for run in g.runs)
        if max(at) - min(at) >= update:  # less than that is rounding
            words = "; ".join(f"{g.label}: {step:,}" for g, step in zip(members, at, strict=True))
            alike.setdefault(words, []).append(env)
    return [
        f"Scores of {_and(envs)} that are compared are after different env steps ({words})."
        for words, envs in alike.items()
    ]


def _notes_on_actions(groups: Sequence[Group]) -> list[str]:
    """Sentences about games of which some runs were evaluated by the most likely actions, not all."""
    by_way: dict[tuple[str, str], dict[bool, list[str]]] = {}
    for g in groups:
        for run in g.runs:
            ways = by_way.setdefault((g.env, g.mode), {})
            ways.setdefault(run.config.eval_greedy, []).append(g.label)
    mixed: dict[str, list[str]] = {}
    for (env, _), ways in by_way.items():
        if len(ways) > 1:
            greedy, drawn = (_and(dict.fromkeys(ways[way])) for way in (True, False))
            words = f"of {greedy} by the most likely actions, of {drawn} by drawn ones"
            mixed.setdefault(words, []).append(env)
    return [f"Evaluations on {_and(envs)} were not made alike: {words}." for words, envs in mixed.items()]


def _notes_on_games(groups: Sequence[Group]) -> list[str]:
    """Sentences where variants have not all got scores of the same games."""
    scored = [g for g in groups if TRAIN in g.level_sets and g.scores("test").size]
    counted = {g.env for g in over_games(groups, ["test"])}
    left_out = {g.env: [other.label for other in scored if other.env == g.env] for g in scored}
    lacking = [
        f"{env} (only {_and(dict.fromkeys(names))})" for env, names in left_out.items() if env not in counted
    ]
    if not lacking:
        return []
    if not counted:
        return [f"There are no statistics over games, as none has scores of all: {', '.join(lacking)}."]
    of_all = f"{_and(sorted(counted))}, which all have scores of"
    found = [f"Normalised scores over games are of {of_all}; left out: {', '.join(lacking)}."]
    if len(variants(scored)) > 2:
        found.append("Probabilities of improvement are over all games that two of them have.")
    return found


def _notes_on_seeds(shared: Sequence[Group]) -> list[str]:
    """A sentence for each variant that has more seeds of one game than of another."""
    found = []
    for name in variants(shared):
        of_count: dict[int, list[str]] = {}
        for g in shared:
            if g.label == name:
                of_count.setdefault(g.scores("test").size, []).append(g.env)
        if len(of_count) > 1:
            seeds = _and(f"{n} of {_and(envs)}" for n, envs in sorted(of_count.items(), reverse=True))
            so = "games with more weigh more" + (", and there are no intervals" if 1 in of_count else "")
            found.append(f"Statistics over games of {name} are of all its seeds, {seeds}: {so}.")
    return found


def _and(names: Iterable[str]) -> str:
    """Names in a row: "a, b and c"."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _one_a_seed(runs: Sequence[Run]) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """Returns the runs that count, one a seed, and the others."""
    farthest: dict[int, Run] = {}
    for run in sorted(runs, key=lambda run: (run.is_done, run.env_steps), reverse=True):
        farthest.setdefault(run.config.seed, run)
    return (
        tuple(run for run in runs if farthest[run.config.seed] is run),
        tuple(run for run in runs if farthest[run.config.seed] is not run),
    )
