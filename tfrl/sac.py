"""python -m tfrl.sac: train SAC on any env."""

from tfrl.algorithms.sac import READER, SACAgent
from tfrl.cli import endings
from tfrl.training.command import Command

main = Command(READER, SACAgent)

if __name__ == "__main__":
    endings.run(main)
