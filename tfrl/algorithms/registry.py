"""The algorithms by name, and the readers of their settings."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

from tfrl.cli.errors import UserError
from tfrl.cli.flags import coerce, nearest
from tfrl.cli.settings import Reader, Settings, setting_types
from tfrl.envs import callables, registry

ALGORITHMS = {
    "ppo": "PPOAgent",
    "drac": "DrACAgent",
    "daac": "DAACAgent",
    "ppg": "PPGAgent",
    "impala": "ImpalaAgent",
    "impact": "IMPACTAgent",
    "dqn": "DQNAgent",
    "ddpg": "DDPGAgent",
    "td3": "TD3Agent",
    "sac": "SACAgent",
    "reinforce": "ReinforceAgent",
    # from recorded data
    "bc": "BCAgent",
    "iql": "IQLAgent",
    "td3_bc": "TD3BCAgent",
    "cql": "CQLAgent",
}
"""The class in `tfrl/algorithms/NAME.py` of each `python -m tfrl.NAME`, beside ppo_procgen and resnet, the
supervised trainer."""
_KNOWN = ("ppo_procgen", *ALGORITHMS, "resnet")


def agent_of(algorithm: str) -> Any:
    """The class of an algorithm: a name, or a user's `module:Class`. Raises UserError if there is none."""
    if callables.is_name(algorithm):
        try:
            return callables.find(algorithm)
        except ValueError as error:
            raise UserError(f"{error}.") from None
    name = "ppo" if algorithm == "ppo_procgen" else algorithm
    if name not in ALGORITHMS:
        hint = nearest(algorithm, _KNOWN, 0.7)  # a2c is not like sac
        raise UserError(f"there is no algorithm {algorithm!r}{hint}; known: {', '.join(_KNOWN)}.")
    return getattr(importlib.import_module(f"tfrl.algorithms.{name}"), ALGORITHMS[name])


def reader(algorithm: str) -> Reader:
    """The reader of the settings of `python -m tfrl.ALGORITHM`; a user's algorithm is `module:Class`.

    Raises UserError if there is no such algorithm.
    """
    if algorithm == "resnet":
        from resnet.config import READER

        return READER
    found = reader_of(agent_of(algorithm))
    if algorithm != "ppo_procgen":
        return found
    return dataclasses.replace(found, command="python -m tfrl.ppo_procgen", defaults={"env": "coinrun"})


@functools.cache
def reader_of(agent: Any) -> Reader:
    """The reader of an algorithm's settings. Raises UserError if the algorithm has none.

    Args:
      agent: the class of the algorithm, which extends `tfrl.algorithms.algorithm.Agent`.
    """
    kind = getattr(agent, "settings", None)
    name = getattr(agent, "__name__", repr(agent))
    if not (isinstance(kind, type) and issubclass(kind, Settings)):
        raise UserError(
            f"{name} must have `settings`, a dataclass such as the Config of tfrl.algorithms.ppo or .dqn."
        )
    if not (hasattr(agent, "defaults") and hasattr(agent, "env")):
        raise UserError(f"{name} must extend tfrl.algorithms.algorithm.Agent.")
    package, _, module = agent.__module__.rpartition(".")
    if package == "tfrl.algorithms":
        algorithm, command = module, f"python -m tfrl.{module}"
    else:  # a user's
        algorithm = callables.give(agent)
        command = f"python -m tfrl {algorithm}"
    types, overrides = setting_types(kind), {}
    for setting, value in agent.defaults.items():
        if setting not in types:
            raise UserError(f"{name} has no setting {setting}{nearest(setting, types)}.")
        overrides[setting] = coerce(value, types[setting], f"{setting} in the defaults of {name}")
    summary = (agent.__doc__ or f"Train {name}.").partition("\n")[0]
    summary = f"{summary} Envs: {registry.in_words()}"
    return Reader(kind, summary, command, algorithm, {"env": agent.env}, overrides, own=name)
