"""python -m tfrl.ppg: train phasic policy gradient, which learns values and policy in turns, on procgen."""

from __future__ import annotations

from collections.abc import Sequence

from tfrl.algorithms.ppg import READER
from tfrl.cli import endings
from tfrl.training import command


def main(arguments: Sequence[str]) -> int:
    """Trains with the settings of the command line; the exit code."""
    return command.run(
        READER,
        arguments,
        learner="tfrl.training.phasic:PhasicLearner",
        agent="tfrl.algorithms.ppg:PPGAgent",
    )


if __name__ == "__main__":
    endings.run(main)
