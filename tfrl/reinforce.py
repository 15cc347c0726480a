"""python -m tfrl.reinforce: train REINFORCE, whose observers ask one agent for all of their actions."""

from __future__ import annotations

from functools import partial

from tfrl.algorithms.reinforce import READER, ReinforceAgent
from tfrl.cli import endings
from tfrl.training import command

main = partial(command.run, READER, ReinforceAgent)

if __name__ == "__main__":
    endings.run(main)
