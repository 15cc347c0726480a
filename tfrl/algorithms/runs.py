"""The runs in folders: their settings and their policies, of any algorithm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tfrl.algorithms.registry import reader
from tfrl.cli.errors import UserError
from tfrl.cli.flags import check_ranges
from tfrl.cli.settings import SETTINGS_FILE, algorithm_of
from tfrl.envs.facts import remember_facts
from tfrl.networks.weights import (
    PolicySource,
    check_has_start,
    check_same_network,
    read_evaluated,
    read_state,
    split_checkpoint,
    start_folder,
    warn_on_stderr,
    weights_of,
)

if TYPE_CHECKING:
    from tfrl.config.run import RLSettings


def from_yaml(path: Path) -> RLSettings:
    """The settings of a run of any algorithm, unchecked; PPO's if the file names none. Raises UserError."""
    return reader(algorithm_of(path) or "ppo").from_yaml(path)


def run_folder(word: str) -> Path:
    """The folder of a run, or a policy in it: a path, or the name of a run in logs/."""
    path, named = Path(word), Path("logs", word)
    return named if named.exists() and not path.exists() else path


def folder_of(path: Path) -> Path:
    """The folder of a run, from this folder or from the path of a policy, RUN/policies/NAME.npz."""
    return path.parent.parent if path.is_file() and path.suffix == ".npz" else path


def read_settings(path: Path) -> RLSettings:
    """The settings of the run in a folder, of which only the numbers are checked: a report needs neither its
    env nor its network.

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
        raise UserError(
            f"{path} is a run of resnet.train and has no policy to play, record or start from; evaluate it "
            "with python -m resnet.evaluate, or start from its torso with --torso-weights."
        )
    remember_facts(path)
    config = from_yaml(path / SETTINGS_FILE)
    try:
        check_ranges(config)
    except UserError as error:
        raise UserError(f"{path / SETTINGS_FILE}: {error}") from None
    return config


def of_run(path: Path) -> RLSettings:
    """The settings of the run in a folder, checked. Raises UserError like `read_settings`, or for a
    setting that cannot work.
    """
    config = read_settings(path)
    of = reader(algorithm_of(path / SETTINGS_FILE) or "ppo")
    try:
        # Neither the folder's name is checked, nor whether all settings had an effect.
        of.check(dataclasses.replace(config, run_name=None, logdir="logs"))
    except UserError as error:
        raise UserError(f"{path / SETTINGS_FILE}: {error}") from None
    return config


def find_policy(path: Path, checkpoint: str, warn: Callable[[str], None] = warn_on_stderr) -> PolicySource:
    """Finds a policy in the folder of a run or of an export, or in a file of `keep_evaluated`.

    Args:
      path: the folder, as in `split_checkpoint`, or the file.
      checkpoint: as in `split_checkpoint`; an export has only "last".
      warn: called with a sentence for each damaged checkpoint; by default it writes to stderr.

    Raises:
      UserError: the folder is not one of a run, or the checkpoint is missing or damaged.
    """
    path, checkpoint = split_checkpoint(path, checkpoint)
    config = of_run(folder_of(path))
    is_evaluated = path.is_file() and path.suffix == ".npz"
    found = read_evaluated(path, checkpoint) if is_evaluated else read_state(path, checkpoint, warn)
    steps = config.run_steps if found.env_steps is None else found.env_steps
    return PolicySource(config, weights_of(found.arrays), found.name, steps)


def check_start(config: RLSettings) -> None:
    """Raises UserError if a run cannot start from that of --start-from; needs no TensorFlow."""
    run = start_folder(config)
    name = f"--start-from {config.start_from}"
    if getattr(config, "torso_weights", None) is not None:
        raise UserError(f"{name} gives all weights, and --torso-weights those of the torso: leave one out.")
    try:
        there = of_run(run)
    except UserError as error:
        raise UserError(f"--start-from: {error}") from error.__cause__
    check_has_start(config)
    check_same_network(name, config, there)
