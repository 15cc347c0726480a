"""python -m tfrl.ddpg: train DDPG on an env with continuous actions."""

from __future__ import annotations

from functools import partial

from tfrl.algorithms.ddpg import READER, DDPGAgent
from tfrl.cli import endings
from tfrl.training import command

main = partial(command.run, READER, DDPGAgent)

if __name__ == "__main__":
    endings.run(main)
