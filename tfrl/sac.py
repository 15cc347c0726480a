"""python -m tfrl.sac: train SAC on an env with discrete or continuous actions."""

from tfrl.algorithms.sac import SACAgent
from tfrl.cli import endings
from tfrl.training.command import Command

main = Command(SACAgent)

if __name__ == "__main__":
    endings.run(main)
