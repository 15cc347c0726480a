"""python -m tfrl.dqn: train DQN on an env with discrete actions."""

from tfrl.algorithms.dqn import DQNAgent
from tfrl.cli import endings
from tfrl.training.command import Command

main = Command(DQNAgent)

if __name__ == "__main__":
    endings.run(main)
