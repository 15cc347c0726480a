"""python -m tfrl.impala: train IMPALA; envs are stepped while the network learns."""

from tfrl.algorithms.impala import ImpalaAgent
from tfrl.cli import endings
from tfrl.training.command import Command

main = Command(ImpalaAgent)

if __name__ == "__main__":
    endings.run(main)
