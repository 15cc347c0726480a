"""Networks on a torso of the zoo, their action distributions, and their weights as files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfrl.config.run import RLSettings
from tfrl.envs import callables

if TYPE_CHECKING:
    from tfrl.networks.network import Network as Network

ROWS_OF_OWN_TORSOS = 8
"""Rows of every part of a forward pass of a user's torso on CPUs. Another number of rows may change the order
of a layer's sums, and so the last bits.
"""


def of_settings(config: RLSettings, precision: str) -> Any:
    """Makes the network that a run's settings describe: a `Network`.

    Args:
      config: a run's settings.
      precision: of the torso, "float32" or "bfloat16".

    Raises:
      ValueError: the zoo cannot build it.
    """
    network = config.make_network(precision)
    if any(map(callables.is_name, (config.torso, config.critic_torso or ""))):
        network.fixed_rows = ROWS_OF_OWN_TORSOS
    return network
