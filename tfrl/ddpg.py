"""python -m tfrl.ddpg: train DDPG on an env with continuous actions."""

from tfrl.algorithms.ddpg import DDPGAgent
from tfrl.cli import endings
from tfrl.training.command import Command

main = Command(DDPGAgent)

if __name__ == "__main__":
    endings.run(main)
