"""The supervised trainer of `python -m resnet.train`."""
