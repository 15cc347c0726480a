"""python -m tfrl.ppo: train PPO on any env."""

from tfrl.algorithms.ppo import PPOAgent
from tfrl.cli import endings
from tfrl.training.command import Command

main = Command(PPOAgent)

if __name__ == "__main__":
    endings.run(main)
