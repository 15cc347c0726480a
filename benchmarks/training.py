"""Trains the runs that a benchmark of learning looks at, or finds them trained."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import command
from tfrl.algorithms import registry as settings
from tfrl.cli.settings import SETTINGS_FILE
from tfrl.config.run import RLSettings
from tfrl.reporting import runs
from tfrl.run.folder import RESULTS_FILE, as_it_began, check_run_folder


def train(
    flags: Sequence[str],
    seeds: Sequence[int],
    logdir: str,
    *,
    algorithm: str = "ppo",
    only_read: bool = False,
) -> list[runs.StoredRun]:
    """Runs of an algorithm, one a seed, in folders of their own; one that is complete is only read.

    `only_read` leaves out the runs that are not complete.

    Raises:
      UserError: a folder has a run of other settings.
      TrainingError: a trainer failed.
    """
    folders = []
    for seed in seeds:
        of_run = [*flags, "--seed", str(seed), "--logdir", logdir]
        config = settings.reader(algorithm).parse(of_run)
        _check_folder(config)
        if not _is_done(config):
            if only_read:
                continue
            command.finish([sys.executable, "-m", f"tfrl.{algorithm}", *of_run])
        folders.append(config.run_dir)
    return [runs.load(folder) for folder in folders]


def _check_folder(config: RLSettings) -> None:
    """Raises UserError where the run's folder cannot be written, or holds a run of other settings."""
    check_run_folder(config)
    file = config.run_dir / SETTINGS_FILE
    if file.is_file():
        as_it_began(config, settings.reader(config.algorithm).from_yaml(file), instead="--logdir")


def _is_done(config: RLSettings) -> bool:
    """True if the run of these settings has come to its end, and left results."""
    if not (config.run_dir / RESULTS_FILE).is_file():
        return False
    return runs.load(config.run_dir).is_done_for(config)
