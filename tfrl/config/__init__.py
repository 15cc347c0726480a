"""Settings that several algorithms share, with their checks. This file reads the settings of any run."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfrl.cli.errors import UserError
from tfrl.cli.flags import coerce, field_types, nearest
from tfrl.cli.settings import SETTINGS_FILE, NoResult, Reader, Settings, algorithm_of
from tfrl.envs import callables, registry
from tfrl.envs.facts import remember_facts

if TYPE_CHECKING:
    from tfrl.config.run import RLSettings

ALGORITHMS = (
    *("ppo", "drac", "daac", "ppg", "impala", "dqn", "ddpg", "td3", "sac", "reinforce"),
    *("bc", "iql", "td3_bc", "cql"),  # from recorded data
)
"""The names of `python -m tfrl.NAME`, beside ppo_procgen and resnet, the supervised trainer."""


def reader(algorithm: str) -> Reader:
    """The reader of the settings of `python -m tfrl.ALGORITHM`; a user's algorithm is `module:Class`.

    Raises UserError if there is no such algorithm.
    """
    if callables.is_name(algorithm):
        try:
            return reader_of(callables.find(algorithm))
        except ValueError as error:
            raise UserError(f"{error}.") from None
    known = ("ppo_procgen", *ALGORITHMS, "resnet")
    if algorithm not in known:
        hint = nearest(algorithm, known, 0.7)  # a2c is not like sac
        raise UserError(f"there is no algorithm {algorithm!r}{hint}; known: {', '.join(known)}.")
    return importlib.import_module(f"tfrl.{algorithm}").main.reader


@functools.cache
def reader_of(agent: Any) -> Reader:
    """The reader of an algorithm's settings. Raises UserError if the algorithm has none.

    Args:
      agent: the class of the algorithm, which extends `tfrl.algorithms.algorithm.Agent`.
    """
    kind = getattr(agent, "settings", None)
    name = getattr(agent, "__name__", repr(agent))
    if not (isinstance(kind, type) and issubclass(kind, Settings)):
        raise UserError(f"{name} must have `settings`, a dataclass such as tfrl.algorithms.ppo.Config.")
    if not (hasattr(agent, "defaults") and hasattr(agent, "env")):
        raise UserError(f"{name} must extend tfrl.algorithms.algorithm.Agent.")
    package, _, module = agent.__module__.rpartition(".")
    if package == "tfrl.algorithms":
        algorithm, command = module, f"python -m tfrl.{module}"
    else:  # a user's
        algorithm = callables.give(agent)
        command = f"python -m tfrl {algorithm}"
    presets = {preset: {**changes, **agent.defaults} for preset, changes in kind.presets.items()}
    hints, known = typing.get_type_hints(kind), [field.name for field in dataclasses.fields(kind)]
    for preset in presets.values():
        for setting, value in preset.items():
            if setting not in known:
                raise UserError(f"{name} has no setting {setting}{nearest(setting, known)}.")
            preset[setting] = coerce(value, hints[setting], f"{setting} in the defaults of {name}")
    if algorithm != kind.algorithm or agent.defaults:
        fields = {
            "algorithm": algorithm,
            "presets": presets,
            "sections": _with_own(kind, agent),
            "__module__": agent.__module__,
        }
        kind = dataclasses.dataclass(frozen=True)(type(f"{name}Settings", (kind,), fields))
    summary = (agent.__doc__ or f"Train {agent.__name__}.").partition("\n")[0]
    return Reader(kind, f"{summary} Envs: {registry.in_words()}", command, {"env": agent.env})


def _with_own(kind: type[Settings], agent: Any) -> tuple[type, ...]:
    """The sections of a dataclass, and one more for the settings of the agent's own file that are in none."""
    others = (base for base in kind.__mro__ if base.__module__ != agent.__module__)
    ours = [base for base in others if base.__module__.startswith("tfrl.")]
    known = {name for base in (*ours, *kind.sections) for name in getattr(base, "__dataclass_fields__", ())}
    own = [(name, of_type) for name, of_type in field_types(kind).items() if name not in known]
    if not own:
        return kind.sections
    section = dataclasses.make_dataclass(agent.__name__, own, namespace={"__doc__": kind.__doc__})
    return (kind.sections[0], section, *kind.sections[1:])


def from_yaml(path: Path) -> RLSettings:
    """The settings of a run of any algorithm, unchecked; PPO's if the file names none. Raises UserError."""
    return reader(algorithm_of(path) or "ppo").from_yaml(path)


def run_folder(word: str) -> Path:
    """The folder of a run, or a policy in it: a path, or the name of a run in logs/."""
    path, named = Path(word), Path("logs", word)
    return named if named.exists() and not path.exists() else path


def folder_of(path: Path) -> Path:
    """The folder of a run, from this folder or from the path of a policy, RUN/policies/NAME.npz."""
    return path.parent.parent if path.is_file() else path


def of_run(path: Path) -> RLSettings:
    """The settings of the run in a folder.

    Raises UserError if there is no such folder, or it holds no settings of a run.
    """
    if not path.is_dir():
        there = "is a file, not" if path.exists() else "does not exist: give"
        raise UserError(f"{path} {there} the folder of a run.")
    if not (path / SETTINGS_FILE).is_file():
        raise UserError(
            f"{path} is not the folder of a run: it has no {SETTINGS_FILE}; python -m tfrl.status lists "
            "the runs."
        )
    if algorithm_of(path / SETTINGS_FILE) == "resnet":
        raise UserError(f"{path} is a run of resnet.train; evaluate it with python -m resnet.evaluate.")
    remember_facts(path)
    config = from_yaml(path / SETTINGS_FILE)
    try:
        # The folder's name is not checked.
        dataclasses.replace(config, run_name=None, logdir="logs").validate()
    except UserError as error:
        raise UserError(f"{path / SETTINGS_FILE}: {error}") from None
    return config


def hyperparameters(config: RLSettings) -> dict[str, Any]:
    """The settings that decide the result of a run, by name."""
    sections: list[Any] = [section for section in config.sections if not issubclass(section, NoResult)]
    names = [field.name for section in sections for field in dataclasses.fields(section)]
    return {"algorithm": config.algorithm, **{name: getattr(config, name) for name in (*names, "precision")}}
