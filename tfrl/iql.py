"""python -m tfrl.iql: train IQL from recorded data."""

from tfrl.algorithms.iql import IQLAgent
from tfrl.cli import endings
from tfrl.training.command import Command

main = Command(IQLAgent)

if __name__ == "__main__":
    endings.run(main)
