"""python -m tfrl.ppo_procgen: train PPO on procgen."""

from __future__ import annotations

from collections.abc import Sequence

from tfrl.algorithms.ppo import PROCGEN_READER
from tfrl.cli import endings
from tfrl.training import command


def main(arguments: Sequence[str]) -> int:
    """Trains with the settings of the command line; the exit code."""
    return command.run(
        PROCGEN_READER,
        arguments,
        learner="tfrl.training.actor_learner:learner_of_settings",
        agent="tfrl.algorithms.ppo:PPOAgent",
    )


if __name__ == "__main__":
    endings.run(main)
