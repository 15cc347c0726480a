"""python -m tfrl.td3_bc: train TD3+BC from recorded data."""

from tfrl.algorithms.td3_bc import TD3BCAgent
from tfrl.cli import endings
from tfrl.training.command import Command

main = Command(TD3BCAgent)

if __name__ == "__main__":
    endings.run(main)
