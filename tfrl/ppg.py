"""python -m tfrl.ppg: train phasic policy gradient, which learns values and policy in turns, on procgen."""

from __future__ import annotations

from functools import partial

from tfrl.algorithms.ppg import READER, PPGAgent
from tfrl.cli import endings
from tfrl.training import command

main = partial(command.run, READER, PPGAgent)

if __name__ == "__main__":
    endings.run(main)
