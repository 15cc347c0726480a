"""python -m tfrl.impala: train IMPALA, whose envs are stepped while it learns."""

from __future__ import annotations

from functools import partial

from tfrl.algorithms.impala import READER, ImpalaAgent
from tfrl.cli import endings
from tfrl.training import command

main = partial(command.run, READER, ImpalaAgent)

if __name__ == "__main__":
    endings.run(main)
