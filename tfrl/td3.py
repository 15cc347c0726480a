"""python -m tfrl.td3: train TD3 on an env with continuous actions."""

from tfrl.algorithms.td3 import TD3Agent
from tfrl.cli import endings
from tfrl.training.command import Command

main = Command(TD3Agent)

if __name__ == "__main__":
    endings.run(main)
