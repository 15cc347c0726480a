"""python -m tfrl.impala: train IMPALA, whose envs are stepped while it learns."""

from __future__ import annotations

from collections.abc import Sequence

from tfrl.algorithms.impala import READER
from tfrl.cli import endings
from tfrl.training import command


def main(arguments: Sequence[str]) -> int:
    """Trains with the settings of the command line; the exit code."""
    return command.run(
        READER,
        arguments,
        learner="tfrl.training.actor_learner:ActorLearner",
        agent="tfrl.algorithms.impala:ImpalaAgent",
    )


if __name__ == "__main__":
    endings.run(main)
