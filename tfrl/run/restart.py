"""Removal of the run that stands in a folder, for --resume restart; nothing else there is touched."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfrl.cli.errors import UserError
from tfrl.run import event_files, files
from tfrl.run.folder import SETTINGS_FILE, check_same_trainer, holds_run
from tfrl.run.metrics import PROGRESS_FILE, logged_steps
from tfrl.workers.tf_config import LAUNCH

_MARK = ".restarted"  # in the run's folder: the launch that has begun it anew
# Patterns of what a run and the commands about it write. First what vouches for the rest.
_OWN = """
results.json eval.json report.html left-by-sweep .stopped stop
export/policy export/saved_model export/model.keras export/weights.npz export/config.yaml
checkpoints/best.npz checkpoints/update-* checkpoints/pieces/* phase/*-envs-*.npy
heartbeats/worker-*.json tensorflow/worker-*.log
videos/*-test-[0-9]*.mp4 videos/*-test-[0-9]*.gif videos/*-train-[0-9]*.mp4 videos/*-train-[0-9]*.gif
plots/learning_curve.png plots/learning_curves.png plots/final_scores.png plots/generalization_gap.png
plots/performance_profiles.png plots/training.png plots/model.png
"""
_FOLDERS = "export checkpoints/pieces checkpoints phase heartbeats tensorflow videos plots"


def check(config: Any, arguments: Sequence[str]) -> None:
    """Asks on a terminal whether the run in the folder may be removed, where --resume restart would.

    Args:
      config: the trainer's settings.
      arguments: of the command line; --yes among them answers the question.

    Raises:
      UserError: the answer is no; there is no terminal and no --yes; the run is not this trainer's.
    """
    run = config.run_dir
    if config.resume != "restart" or not holds_run(run) or _is_done(run):
        return
    check_same_trainer(config)
    if "--yes" in arguments:
        return
    steps = f", {logged_steps(run / PROGRESS_FILE):,} steps long"
    if not sys.stdin.isatty():
        raise UserError(
            f"--resume restart removes the run in {run}{steps}; without a terminal it needs --yes."
        )
    try:
        answer = input(f"Remove the run in {run}{steps}, and begin anew? [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise UserError(f"the run in {run} is left as it is.")


def remove(run: Path) -> bool:
    """Removes the files of the run in a folder, and says whether there was one to be removed.

    Whoever calls it holds the run's lock.

    Raises UserError if something cannot be removed.
    """
    if not holds_run(run) or _is_done(run):
        return False
    try:
        for path in (*(path for name in _OWN.split() for path in run.glob(name)), *event_files.of_run(run)):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for folder in (run / name for name in _FOLDERS.split()):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        for name in (PROGRESS_FILE, SETTINGS_FILE):
            (run / name).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot remove the run in {run}: {files.reason(error)}.") from None
    return True


def note(run: Path) -> None:
    """Notes that this launch has begun the run anew, so that its later attempts go on with it."""
    if launch := _launch():
        files.write(run / _MARK, launch)


def _launch() -> str:
    """The launch or SLURM job that this process is an attempt of; empty for a command of its own."""
    return os.environ.get(LAUNCH) or os.environ.get("SLURM_JOB_ID", "")


def _is_done(run: Path) -> bool:
    """Whether an earlier attempt of this launch, or of a job that SLURM started again, has begun it anew."""
    again = LAUNCH in os.environ or "SLURM_RESTART_COUNT" in os.environ
    return again and files.read_text(run / _MARK) == _launch()
