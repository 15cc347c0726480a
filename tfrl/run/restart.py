"""Deletes the run in a folder for --resume restart, after a question, so that it begins anew there."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path

from tfrl.cli.errors import UserError
from tfrl.cli.settings import SETTINGS_FILE, Settings
from tfrl.run import files
from tfrl.run.metrics import EVENT_FILES, PROGRESS_FILE
from tfrl.workers.tf_config import LAUNCH, RESTARTED, TFConfig

# The files of a run, as patterns. The settings are deleted last, so that a deletion that was interrupted can
# be repeated.
_FILES = (
    *("results.json", "eval.json", "report.html", PROGRESS_FILE, "episodes.csv", EVENT_FILES, "stop"),
    *(
        "left-by-sweep",
        "failed",
        "videos/*-[0-9]*.mp4",
        "videos/*-[0-9]*.gif",
        "policies/*.npz",
        SETTINGS_FILE,
    ),
    *(f"plots/{name}.png" for name in ("learning_curve", "learning_curves", "final_scores", "training")),
)
_FOLDERS = ("checkpoints", "export", "phase", "heartbeats", "tensorflow")
_BEGUN_BY = ".restarted"
"""A file with the launch (`LAUNCH`) that has deleted the run before."""


def confirm(config: Settings, cluster: TFConfig | None, *, holds_run: bool) -> None:
    """Asks whether --resume restart may delete the run in the folder, unless --yes says so.

    With several workers, the outcome does not depend on the folder, which other workers may see later.

    Raises UserError if the answer is no, or nobody can answer.
    """
    run = config.run_dir
    if cluster is not None and cluster.evaluator is not None:
        raise UserError(
            "--resume restart cannot be given with an evaluator in TF_CONFIG, which may see the old run: "
            "choose another --run-name."
        )
    for name in ("start_from", "torso_weights"):
        path = getattr(config, name, None)
        if path is not None and Path(path).resolve().is_relative_to(run.resolve()):
            raise UserError(
                f"--resume restart would delete {run}, which --{name.replace('_', '-')} needs: choose "
                "another --run-name."
            )
    if config.yes:
        return
    if cluster is not None:
        raise UserError("--resume restart with several workers needs --yes, because no terminal asks them.")
    if not holds_run:
        return
    if sys.stdin is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UserError(f"--resume restart deletes the run in {run}; without a terminal, add --yes.")
    print(f"Delete the run in {run} and begin anew? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UserError(f"nothing is deleted: {run} is left as it was.")


def is_done(run: Path) -> bool:
    """True if an earlier start by the same launcher has deleted the old run, so this start resumes.

    Only the chief asks it.
    """
    launch = os.environ.get(LAUNCH, "")
    return RESTARTED in os.environ and bool(launch) and files.read_text(run / _BEGUN_BY) == launch


def remove_run(run: Path) -> None:
    """Deletes the files of a run, and nothing else in its folder. Raises UserError if this fails."""
    try:
        for name in _FOLDERS:
            if (run / name).is_symlink():
                (run / name).unlink()
            elif (run / name).is_dir():
                shutil.rmtree(run / name)
        for pattern in _FILES:
            for path in list(run.glob(pattern)):
                path.unlink(missing_ok=True)
        for name in ("videos", "plots", "policies"):
            with contextlib.suppress(OSError):  # it is missing, or has files of others
                (run / name).rmdir()
        (run / _BEGUN_BY).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot delete {error.filename or run}: {files.reason(error)}.") from None


def note(run: Path) -> None:
    """Notes that this launch has begun the run anew. Raises UserError if the folder cannot be written."""
    if launch := os.environ.get(LAUNCH):
        try:
            files.write(run / _BEGUN_BY, launch)
        except OSError as error:
            raise UserError(f"cannot write in {run}: {files.reason(error)}.") from None
