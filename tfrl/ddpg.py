"""python -m tfrl.ddpg: train DDPG on an env with continuous actions."""

from __future__ import annotations

from collections.abc import Sequence

from tfrl.algorithms.ddpg import READER
from tfrl.cli import endings
from tfrl.training import command


def main(arguments: Sequence[str]) -> int:
    """Trains with the settings of the command line; the exit code."""
    return command.run(
        READER,
        arguments,
        learner="tfrl.training.off_policy:OffPolicyLearner",
        agent="tfrl.algorithms.ddpg:DDPGAgent",
    )


if __name__ == "__main__":
    endings.run(main)
