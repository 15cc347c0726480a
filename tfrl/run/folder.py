"""Checks of the run's folder, before anything is written and without TensorFlow."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfrl.cli.errors import UserError
from tfrl.cli.flags import flag
from tfrl.cli.settings import SETTINGS_FILE, Settings, SettingsT, is_of, is_of_earlier_version
from tfrl.run.checkpoint import CheckpointStore
from tfrl.run.metrics import EVENT_FILES, PROGRESS_FILE, logged_steps

RESULTS_FILE = "results.json"
EVALUATION_FILE = "eval.json"
BEST_FILE = "checkpoints/best.npz"
LEFT_FILE = "left-by-sweep"  # marks a run that its sweep has replaced

# Any of these makes a folder that of a run.
_TRACES = (SETTINGS_FILE, "checkpoints", PROGRESS_FILE, RESULTS_FILE)
# These files exist only after the first checkpoint.
_LATER = (RESULTS_FILE, "export", BEST_FILE)
# A run also writes these names. In a folder without a run, another program has written them.
_OTHERS = ("export", "videos", "plots", EVALUATION_FILE, "report.html", EVENT_FILES)


def check_run(config: SettingsT, read: Callable[[Path], SettingsT]) -> SettingsT:
    """The settings to start or resume the run with; an existing run keeps its precision for `auto`.

    The trainer checks whether the run is complete, because it knows the run's step.

    Args:
      config: the settings that are asked for.
      read: reads the settings from a file.

    Raises:
      UserError: `--resume` forbids it, the run in the folder has other settings, or its checkpoints are
        missing. A run that was killed before its first checkpoint may start again.
    """
    check_run_folder(config)
    run = config.run_dir
    goes_on = has_checkpoint(run)
    if config.resume == "must" and not goes_on:
        raise UserError(f"--resume must found no checkpoint in {run}; leave --resume out to start this run.")
    if not holds_run(run):
        _check_unused(run)
        return config
    if config.resume == "never":
        raise UserError(
            f"{run} already holds a run, and --resume never does not continue it; choose another --run-name."
        )
    if not (run / SETTINGS_FILE).exists():
        raise UserError(
            f"{run} holds a run without its {SETTINGS_FILE}, so the run cannot be resumed; choose another "
            "--run-name."
        )
    if any(is_of(run, mark) and not hasattr(config, mark) for mark in ("env", "dataset")):
        raise UserError(f"{run} holds a run of another trainer; choose another --run-name.")
    existing = read(run / SETTINGS_FILE)
    if is_of_earlier_version(run / SETTINGS_FILE):
        raise UserError(
            f"{run} holds a run of tfrl 0.1.0, and only tfrl 0.1.0 can resume it; choose another --run-name."
        )
    config = as_it_began(config, existing)
    if not goes_on:
        _check_young(run, existing)
    return config


def holds_run(run: Path) -> bool:
    """True if the folder contains a run or remains of a run."""
    return any((run / trace).exists() for trace in _TRACES)


def as_it_began(config: SettingsT, existing: SettingsT, *, instead: str = "--run-name") -> SettingsT:
    """The settings to resume with; `auto` becomes the precision of the existing run.

    Args:
      config: the settings that are asked for.
      existing: the settings of the existing run.
      instead: the flag that chooses another folder for a new run.

    Raises:
      UserError: settings differ that a resumed run may not change.
    """
    if config.precision == "auto":
        # Its file has what `auto` meant where it began. All workers read it before any of them writes it.
        config = dataclasses.replace(config, precision=existing.precision)
    differing = []
    for name, here in vars(config).items():
        there = getattr(existing, name)
        left_open = name == "precision" and there == "auto"  # in a file that a person wrote
        if here != there and name not in config.may_change and not left_open:
            differing.append(f"{flag(name)} {there} there, {here} here")
    if differing:
        raise UserError(
            f"{config.run_dir} holds a run with other settings: {'; '.join(differing)}. Give the same "
            f"settings to resume it, or choose another {instead}."
        )
    return config


def has_checkpoint(run: Path) -> bool:
    """True if the run in this folder has checkpoints; whether one of them is valid is not looked at."""
    return bool(CheckpointStore(run / "checkpoints", keep=1).updates())


def check_run_folder(config: Settings) -> None:
    """Raise UserError if the run's folder cannot be made or written in; leaves nothing behind."""
    folder = config.run_dir
    try:
        while not (folder.exists() or folder.is_symlink()):
            folder = folder.parent
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        with tempfile.TemporaryDirectory(dir=folder, prefix=".tfrl-"):
            pass
    except OSError as error:
        raise UserError(
            f"cannot write in {folder} for the run's folder {config.run_dir}: {error.strerror}; "
            "choose another --logdir."
        ) from None


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None if there is none that can be read."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def check_writable(path: Path) -> None:
    """Raise UserError if this file could not be written; leaves nothing behind."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}.") from None


def _check_unused(run: Path) -> None:
    """Raises UserError if the folder has files of other programs with names that a run also uses."""
    found = [path.name for name in _OTHERS for path in sorted(run.glob(name))[:1]]
    if found:
        raise UserError(
            f"{run} holds files that belong to no run ({', '.join(found)}); choose another --run-name."
        )


def _check_young(run: Path, existing: Settings) -> None:
    """Raises UserError if a run without checkpoints has results, which a new start would overwrite."""
    # An export that found the disk full has left an empty folder.
    found = [name for name in _LATER if (run / name).is_file() or any((run / name).glob("*"))]
    steps = logged_steps(run / PROGRESS_FILE)
    if steps > existing.checkpoint_every * existing.steps_per_update:
        found.append(f"{steps:,} steps in its {PROGRESS_FILE}")
    if found:
        raise UserError(
            f"{run} holds a run without checkpoints, but with {', '.join(found)}, so it cannot be resumed; "
            "choose another --run-name, or remove the folder."
        )
