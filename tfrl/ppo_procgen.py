"""python -m tfrl.ppo_procgen: train PPO on procgen."""

from tfrl.algorithms.ppo import PPOAgent
from tfrl.algorithms.registry import reader
from tfrl.cli import endings
from tfrl.training.command import Command

main = Command(PPOAgent, reader("ppo_procgen"))

if __name__ == "__main__":
    endings.run(main)
