"""python -m tfrl.dqn: train DQN on an env with discrete actions."""

from __future__ import annotations

from functools import partial

from tfrl.algorithms.dqn import READER, DQNAgent
from tfrl.cli import endings
from tfrl.training import command

main = partial(command.run, READER, DQNAgent)

if __name__ == "__main__":
    endings.run(main)
