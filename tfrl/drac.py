"""python -m tfrl.drac: train data-regularised PPO (DrAC, UCB-DrAC), which generalises better, on procgen."""

from __future__ import annotations

from functools import partial

from tfrl.algorithms.drac import READER, DrACAgent
from tfrl.cli import endings
from tfrl.training import command

main = partial(command.run, READER, DrACAgent)

if __name__ == "__main__":
    endings.run(main)
