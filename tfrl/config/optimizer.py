"""The settings of the optimizer that all algorithms have. A section of an algorithm extends them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tfrl.cli.settings import FRACTION, POSITIVE


@dataclass(frozen=True)
class Optimizer:
    """The optimizer."""

    optimizer: Literal["adam", "nadam", "rmsprop", "sgd"] = "adam"
    """Optimizer of the weights; rmsprop and sgd have no momentum here."""
    rmsprop_decay: Annotated[float, FRACTION] = 0.99
    """Decay rate of the mean square of gradients in rmsprop."""
    adam_epsilon: Annotated[float, POSITIVE] = 1e-8
    """Epsilon of the optimizer: adam and nadam add it to the root of the mean square of gradients, rmsprop to
    the mean square."""


def ineffective(config: Optimizer) -> dict[str, str]:
    """The names of settings that have no effect with the optimizer, each with why."""
    found = {} if config.optimizer == "rmsprop" else {"rmsprop_decay": "without --optimizer rmsprop"}
    return found | ({"adam_epsilon": "with --optimizer sgd"} if config.optimizer == "sgd" else {})
