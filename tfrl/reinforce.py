"""python -m tfrl.reinforce: train REINFORCE; other processes step the envs, one agent chooses all actions."""

from tfrl.algorithms.reinforce import ReinforceAgent
from tfrl.cli import endings
from tfrl.training.command import Command

main = Command(ReinforceAgent)

if __name__ == "__main__":
    endings.run(main)
