"""python -m tfrl.ppo_procgen: train PPO on procgen."""

from tfrl.algorithms.ppo import PROCGEN_READER, PPOAgent
from tfrl.cli import endings
from tfrl.training.command import Command

main = Command(PROCGEN_READER, PPOAgent)

if __name__ == "__main__":
    endings.run(main)
