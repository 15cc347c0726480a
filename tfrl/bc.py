"""python -m tfrl.bc: clone the policy of recorded data."""

from tfrl.algorithms.bc import BCAgent
from tfrl.cli import endings
from tfrl.training.command import Command

main = Command(BCAgent)

if __name__ == "__main__":
    endings.run(main)
