"""python -m tfrl.ppo_procgen: train PPO on procgen."""

from tfrl.algorithms.ppo import PPOAgent
from tfrl.cli import endings
from tfrl.training.command import Command

main = Command(PPOAgent, command="python -m tfrl.ppo_procgen", defaults={"env": "coinrun"})

if __name__ == "__main__":
    endings.run(main)
