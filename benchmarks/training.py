"""Trains the runs that a benchmark of learning looks at, or finds them trained."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import command
from tfrl import config as settings
from tfrl import suite
from tfrl.reporting import runs


def train(
    flags: Sequence[str], seeds: Sequence[int], logdir: str, *, algorithm: str = "ppo"
) -> list[runs.Run]:
    """Runs of an algorithm, one a seed, in folders of their own; one that is complete is only read.

    Raises:
      UserError: a folder has a run of other settings.
      TrainingError: a trainer failed.
    """
    folders = []
    for seed in seeds:
        of_run = [*flags, "--seed", str(seed), "--logdir", logdir]
        config = settings.reader(algorithm).parse(of_run)
        suite.check_folder(config)
        if not suite.is_done(config):
            command.finish([sys.executable, "-m", f"tfrl.{algorithm}", *of_run])
        folders.append(config.run_dir)
    return [runs.load(folder) for folder in folders]
