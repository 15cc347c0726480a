"""Settings: one file a section or algorithm, with ranges, presets and checks.

A run's config.yaml begins with its algorithm; what reads runs of any algorithm asks here.
"""

from __future__ import annotations

import dataclasses
import importlib
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfrl.cli import settings
from tfrl.cli.errors import UnknownFlagError, UserError
from tfrl.cli.flags import flag, is_switch, nearest, other_name
from tfrl.cli.settings import Reader

ALGORITHMS = ("ppo", "drac", "ppg", "impala", "dqn", "ddpg", "td3", "sac", "reinforce")
"""The names of `python -m tfrl.NAME`, each with a module here that has a `READER`."""


def reader(algorithm: str) -> Reader:
    """The reader of an algorithm's settings. Raises UserError if there is no such algorithm."""
    if algorithm not in ALGORITHMS:
        known, hint = ", ".join(ALGORITHMS), _variant(algorithm) or nearest(algorithm, ALGORITHMS)
        raise UserError(f"there is no algorithm {algorithm!r}{hint}; known: {known}.")
    return importlib.import_module(f"tfrl.algorithms.{algorithm}").READER


def parse(of: Reader, arguments: Sequence[str]) -> Any:
    """The settings of a command line; of a flag that other algorithms alone have, it says whose it is."""
    try:
        return of.parse(arguments)
    except UnknownFlagError as error:
        having = owners(error.name)
        if not having or other_name(error.name, of.flag_kinds):
            raise
        *others, last = (f"{name}'s" for name in having)
        whose = f"{', '.join(others)} and {last}" if others else last
        raise UnknownFlagError(error.spelled, error.name, f" (it is {whose})") from None


def owners(name: str) -> list[str]:
    """The algorithms with a setting of that name, or a switch that is `no_` and that name's rest."""
    of = {algorithm: reader(algorithm) for algorithm in ALGORITHMS}
    return [
        algorithm
        for algorithm, reads in of.items()
        if name in reads.flag_kinds or is_switch(reads.flag_kinds.get(name.removeprefix("no_")))
    ]


def _variant(word: str) -> str:
    """The algorithm and the choice, of a setting that it has alone, that parts of a word name: `ucb-drac`."""
    parts = word.lower().replace("_", "-").split("-")
    for algorithm in ALGORITHMS:
        for name, kind in reader(algorithm).flag_kinds.items():
            choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
            found = [choice for choice in choices if choice in parts]
            if found and owners(name) == [algorithm]:
                return f" (did you mean {algorithm} with {flag(name)} {found[0]}?)"
    return ""


def algorithm_of(path: Path) -> str:
    """The algorithm of a config.yaml: PPO where it names none, as those of the first version do."""
    return settings.algorithm_of(path) or "ppo"


def from_yaml(path: Path) -> Any:
    """The settings of a run of any algorithm, unchecked. Raises UserError."""
    return reader(algorithm_of(path)).from_yaml(path)


def validate(config: Any) -> None:
    """Raises UserError for the first setting of any algorithm that cannot work, or would do nothing."""
    reader(config.algorithm).validate(config)


def hyperparameters(config: Any) -> tuple[dict[str, Any], set[str]]:
    """The settings that decide a result, and the names of those that differ from the preset's.

    Args:
      config: the settings of a run of any algorithm.

    Returns:
      name -> value of all deciding settings; the names that tell the run from others of its preset, `env`
      and `seed` always among them.
    """
    of = reader(config.algorithm)
    names = [field.name for section in config.decisive for field in dataclasses.fields(section)]
    values = {
        "algorithm": config.algorithm,
        **{name: getattr(config, name) for name in (*names, "precision")},
    }
    plain = of.complete(of.kind(**of.presets[config.preset]))
    return values, {"env", "seed"} | {name for name in names if values[name] != getattr(plain, name)}
