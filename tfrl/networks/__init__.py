"""Networks on a torso of the zoo, their action distributions, and their weights as files."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfrl.networks.network import Network as Network

_MODULES = {
    **dict.fromkeys(("ppo", "drac", "ppg", "impala"), "actor_critic"),
    "dqn": "q_network",
    "reinforce": "actor_alone",
    **dict.fromkeys(("ddpg", "td3", "sac"), "actor_and_critics"),
}


def kind(algorithm: str) -> str:
    """The kind of network of an algorithm: those of one kind, by the same settings, have the same weights."""
    module = _MODULES[algorithm]
    return algorithm if module == "actor_and_critics" or algorithm == "ppg" else module


def of_settings(config: Any, precision: str) -> Network:
    """Makes the network that a run's settings describe, of its algorithm's kind.

    Args:
      config: a run's settings.
      precision: of the torso, "float32" or "bfloat16".

    Raises:
      ValueError: the zoo cannot build it.
    """
    module = importlib.import_module(f"tfrl.networks.{_MODULES[config.algorithm]}")
    return module.of_settings(config, precision)
