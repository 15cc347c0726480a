"""python -m tfrl.reinforce: train REINFORCE, whose observers ask one agent for all of their actions."""

from __future__ import annotations

from collections.abc import Sequence

from tfrl.algorithms.reinforce import READER
from tfrl.cli import endings
from tfrl.training import command


def main(arguments: Sequence[str]) -> int:
    """Trains with the settings of the command line; the exit code."""
    return command.run(
        READER,
        arguments,
        learner="tfrl.training.episodic:EpisodicLearner",
        agent="tfrl.algorithms.reinforce:ReinforceAgent",
    )


if __name__ == "__main__":
    endings.run(main)
