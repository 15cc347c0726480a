"""python -m tfrl.sac: train SAC on any env."""

from __future__ import annotations

from functools import partial

from tfrl.algorithms.sac import READER, SACAgent
from tfrl.cli import endings
from tfrl.training import command

main = partial(command.run, READER, SACAgent)

if __name__ == "__main__":
    endings.run(main)
