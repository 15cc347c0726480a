"""python -m tfrl.ppo_procgen: train PPO on procgen."""

from __future__ import annotations

from functools import partial

from tfrl.algorithms.ppo import PROCGEN_READER, PPOAgent
from tfrl.cli import endings
from tfrl.training import command

main = partial(command.run, PROCGEN_READER, PPOAgent)

if __name__ == "__main__":
    endings.run(main)
