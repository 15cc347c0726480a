"""python -m tfrl.ppo: train PPO on any env."""

from __future__ import annotations

from functools import partial

from tfrl.algorithms.ppo import READER, PPOAgent
from tfrl.cli import endings
from tfrl.training import command

main = partial(command.run, READER, PPOAgent)

if __name__ == "__main__":
    endings.run(main)
