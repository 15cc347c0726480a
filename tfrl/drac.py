"""python -m tfrl.drac: train data-regularised PPO (DrAC, UCB-DrAC) on procgen."""

from tfrl.algorithms.drac import DrACAgent
from tfrl.cli import endings
from tfrl.training.command import Command

main = Command(DrACAgent)

if __name__ == "__main__":
    endings.run(main)
