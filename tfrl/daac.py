"""python -m tfrl.daac: train DAAC or IDAAC, PPO with separate networks for policy and value."""

from tfrl.algorithms.daac import DAACAgent
from tfrl.cli import endings
from tfrl.training.command import Command

main = Command(DAACAgent)

if __name__ == "__main__":
    endings.run(main)
