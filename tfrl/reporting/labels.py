"""Names of runs: what tells them apart, in words that legends have room for."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from tfrl.cli.flags import flag
from tfrl.config.task import Task
from tfrl.envs import registry
from tfrl.envs.registry import TRAIN
from tfrl.reporting.runs import Run

_TASK = {field.name for field in dataclasses.fields(Task)} | {"precision"}
_LONGEST = 44  # characters that legends and axes have room for


def run_names(runs: Sequence[Run]) -> list[str]:
    """The names of runs, or where two have the same one, their paths below the folder that all lie in."""
    names = [run.name for run in runs]
    if len({*names}) == len({run.path.resolve() for run in runs}):
        return names
    paths = [run.path.resolve() for run in runs]
    root = os.path.commonpath([path.parent for path in paths])
    return [path.relative_to(root).as_posix() for path in paths]


def labels(runs: Sequence[Run]) -> list[str]:
    """Returns each run's variant in words: its algorithm, where there are several, and what tells it apart.

    Where that is too long for legends, settings that are as in most runs are left out, and
    where it still is, variants have letters.
    """
    several = len({run.config.algorithm for run in runs}) > 1
    compared: dict[str, list[Run]] = {}
    for run in runs:
        compared.setdefault(_compared_with(run), []).append(run)
    told = {key: _told_apart(found) for key, found in compared.items()}
    settings = [told[_compared_with(run)][run.config.algorithm].pop(0) for run in runs]
    algorithms = [run.config.algorithm for run in runs]
    whole = [_in_words(a if several else "", s) for a, s in zip(algorithms, settings, strict=True)]
    if _fit(whole):
        return whole
    unusual = _without_usual(algorithms, settings)
    shorter = [_in_words(a, s) for a, s in zip(algorithms, unusual, strict=True)]
    return shorter if _fit(shorter) else _lettered(algorithms, whole)


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """The settings that are not the same in all runs, each with its value in every run.

    That is "-" for settings that a run's algorithm does not have.
    """
    settings = [_settings(run) for run in runs]
    values = {name: [s.get(name, "-") for s in settings] for some in settings for name in some}
    return {name: of_runs for name, of_runs in values.items() if len(set(of_runs)) > 1}


def _in_words(algorithm: str, settings: Mapping[str, str]) -> str:
    words = [f"{flag(name)[2:]} {value}" for name, value in sorted(settings.items())]
    return ", ".join([algorithm, *words] if algorithm else words)


def _fit(words: Iterable[str]) -> bool:
    return max(map(len, words), default=0) <= _LONGEST


def _without_usual(algorithms: Sequence[str], settings: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Settings of each run that are not as in most: in most of all for the task, else of its algorithm."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for algorithm, of_run in zip(algorithms, settings, strict=True):
        for name, value in of_run.items():
            counts.setdefault((_owner(algorithm, name), name), Counter())[value] += 1
    usual = {key: found.most_common(1)[0][0] for key, found in counts.items()}
    return [
        {name: value for name, value in of_run.items() if value != usual[_owner(algorithm, name), name]}
        for algorithm, of_run in zip(algorithms, settings, strict=True)
    ]


def _owner(algorithm: str, name: str) -> str:
    return "" if name in _TASK else algorithm


def _lettered(algorithms: Sequence[str], whole: Sequence[str]) -> list[str]:
    """The algorithm of each run with a letter, or a number, for each of its labels, in their order."""
    known: dict[str, list[str]] = {}
    for algorithm, label in zip(algorithms, whole, strict=True):
        of_algorithm = known.setdefault(algorithm, [])
        if label not in of_algorithm:
            of_algorithm.append(label)
    names = []
    for algorithm, label in zip(algorithms, whole, strict=True):
        place, of_algorithm = known[algorithm].index(label), known[algorithm]
        name = ascii_uppercase[place] if len(of_algorithm) <= len(ascii_uppercase) else str(place + 1)
        names.append(algorithm if of_algorithm == [algorithm] else f"{algorithm} {name}")
    return names


def _told_apart(runs: Sequence[Run]) -> dict[str, list[dict[str, str]]]:
    """The settings that tell runs apart, by algorithm, run by run: its own that differ, and the task's.

    Lengths that were asked for alike are alike for algorithms that round them to updates of their own.
    """
    of_task = differences(runs).keys() & (_TASK & _decisive(runs[0].config) | {"precision"})
    if len({run.config.total_steps for run in runs}) == 1:
        of_task.discard("total_steps")
    found = {}
    for algorithm in {run.config.algorithm for run in runs}:
        alike = [run for run in runs if run.config.algorithm == algorithm]
        names = differences(alike).keys() & _decisive(alike[0].config) | of_task
        found[algorithm] = [{name: _settings(run)[name] for name in names} for run in alike]
    return found


def _compared_with(run: Run) -> str:
    """Runs for which this is the same are told apart by their settings.

    Games have statistics over all of them; each Gymnasium env is for itself, with settings of its own.
    """
    env = run.config.env
    return "games" if TRAIN in registry.family(env).level_sets else env


def _decisive(config: Any) -> set[str]:
    """The settings that a result depends on.

    The preset is only a short word for others; env and seed tell runs of one experiment apart.
    """
    names = {field.name for section in config.decisive for field in dataclasses.fields(section)}
    return (names | {"precision"}) - {"env", "preset", "seed"}


def _settings(run: Run) -> dict[str, str]:
    """A run's settings by name, in words: its length in whole updates, its precision as it is computed in."""
    config = run.config
    settings = {name: str(value) for name, value in dataclasses.asdict(config).items()}
    total_steps = f"{config.run_steps:,}"
    return {
        "algorithm": config.algorithm,
        **settings,
        "total_steps": total_steps,
        "precision": run.precision,
    }
