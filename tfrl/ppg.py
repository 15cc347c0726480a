"""python -m tfrl.ppg: train phasic policy gradient, which learns values and policy in turns."""

from tfrl.algorithms.ppg import PPGAgent
from tfrl.cli import endings
from tfrl.training.command import Command

main = Command(PPGAgent)

if __name__ == "__main__":
    endings.run(main)
