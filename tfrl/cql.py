"""python -m tfrl.cql: train CQL from recorded data."""

from tfrl.algorithms.cql import CQLAgent
from tfrl.cli import endings
from tfrl.training.command import Command

main = Command(CQLAgent)

if __name__ == "__main__":
    endings.run(main)
