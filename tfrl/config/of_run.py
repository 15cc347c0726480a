"""The settings of a run, from its folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tfrl.cli.errors import UserError
from tfrl.config import from_yaml
from tfrl.config.run import RLSettings
from tfrl.envs import facts
from tfrl.run.folder import SETTINGS_FILE, is_of


def folder(word: str) -> Path:
    """The folder that a command's argument names: a path, or the name of a run in logs/."""
    path, named = Path(word), Path("logs", word)
    return named if named.is_dir() and not path.exists() else path


def settings(path: Path) -> RLSettings:
    """The settings of the run in a folder.

    Raises:
      UserError: there is no such folder, or it holds no settings of a run.
    """
    if not path.is_dir():
        there = "is a file, not" if path.exists() else "does not exist: give"
        raise UserError(f"{path} {there} the folder of a run.")
    if not (path / SETTINGS_FILE).is_file():
        raise UserError(f"{path} is not the folder of a run: it has no {SETTINGS_FILE}.")
    if is_of(path, "dataset"):
        raise UserError(f"{path} is a run of resnet.train, which has its scores in results.json.")
    facts.remember(path)
    config = from_yaml(path / SETTINGS_FILE)
    try:
        # Checked as settings of a new run, except for what only a command line can get wrong.
        dataclasses.replace(config, run_name=None, logdir="logs").validate()
    except UserError as error:
        raise UserError(f"{path / SETTINGS_FILE}: {error}") from None
    return config
