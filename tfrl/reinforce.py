"""python -m tfrl.reinforce: train REINFORCE, whose observers ask one agent for all of their actions."""

from __future__ import annotations

from collections.abc import Sequence

from tfrl.cli import endings
from tfrl.config.reinforce import READER, Config
from tfrl.envs import registry
from tfrl.experience import rollout
from tfrl.training import command


def main(arguments: Sequence[str]) -> int:
    """Trains with the settings of the command line; the exit code."""
    return command.run(
        READER,
        arguments,
        learner="tfrl.training.episodic:EpisodicLearner",
        agent="tfrl.agents.reinforce:ReinforceAgent",
        check_memory=_check_memory,
    )


def _check_memory(config: Config, workers: int, here: int) -> None:
    """Raise UserError if the observations of episodes as long as they may be do not fit into the memory."""
    rollout.check_memory(registry.specs(config.env)[0], config.num_envs, config.max_steps, workers, here)


if __name__ == "__main__":
    endings.run(main)
