"""python -m tfrl.impact: train IMPACT, PPO from envs that are stepped while the network learns."""

from tfrl.algorithms.impact import IMPACTAgent
from tfrl.cli import endings
from tfrl.training.command import Command

main = Command(IMPACTAgent)

if __name__ == "__main__":
    endings.run(main)
