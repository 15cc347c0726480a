"""python -m tfrl.reinforce: train REINFORCE, whose observers ask one agent for all of their actions."""

from __future__ import annotations

from tfrl.algorithms.reinforce import READER, ReinforceAgent
from tfrl.cli import endings
from tfrl.training.command import Command

main = Command(READER, ReinforceAgent)

if __name__ == "__main__":
    endings.run(main)
