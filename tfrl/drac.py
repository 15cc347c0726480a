"""python -m tfrl.drac: train data-regularised PPO (DrAC, UCB-DrAC), which generalises better, on procgen."""

from __future__ import annotations

from collections.abc import Sequence

from tfrl.algorithms.drac import READER
from tfrl.cli import endings
from tfrl.training import command


def main(arguments: Sequence[str]) -> int:
    """Trains with the settings of the command line; the exit code."""
    return command.run(
        READER,
        arguments,
        learner="tfrl.training.actor_learner:learner_of_settings",
        agent="tfrl.algorithms.drac:DrACAgent",
    )


if __name__ == "__main__":
    endings.run(main)
