"""python -m tfrl.resnet: train a network of the zoo on labelled images, as python -m resnet.train does."""

from resnet.train import main
from tfrl.cli import endings

if __name__ == "__main__":
    endings.run(main)
