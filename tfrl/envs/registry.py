"""The games by family, and what is known of each before any is made. Imports no env."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Family:
    """Games that one class plays.

    Attributes:
      module, kind: the class is `kind` of `module`, and follows `tfrl.envs.VecEnv`.
      names: what `--env` takes.
      observation_shape: (H, W, C) of its observations, which are uint8.
      num_actions: A: its actions are 0 ... A - 1.
      further_modes: distribution modes beyond easy and hard, which all have, with the games that have them.
    """

    module: str
    kind: str
    names: tuple[str, ...]
    observation_shape: tuple[int, int, int]
    num_actions: int
    further_modes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_PROCGEN = (
    *("bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot"),
    *("heist", "jumper", "leaper", "maze", "miner", "ninja", "plunder", "starpilot"),
)
_PROCGEN_MODES = {
    "extreme": ("chaser", "dodgeball", "leaper", "starpilot"),
    "memory": ("caveflyer", "dodgeball", "heist", "jumper", "maze", "miner"),
    "exploration": ("caveflyer", "climber", "coinrun", "heist", "jumper", "leaper", "maze", "ninja"),
}

FAMILIES: Mapping[str, Family] = {
    "procgen": Family("tfrl.envs.procgen", "Procgen", _PROCGEN, (64, 64, 3), 15, _PROCGEN_MODES),
    "toys": Family("tfrl.envs.catch", "Catch", ("catch",), (10, 5, 1), 3),
}


def family(env: str) -> Family:
    """The family of a game. Raises ValueError if there is none of that name."""
    for known in FAMILIES.values():
        if env in known.names:
            return known
    raise ValueError(f"there is no game {env!r}")


def games() -> tuple[str, ...]:
    """The 16 procgen games, sorted."""
    return _PROCGEN


def env_names() -> tuple[str, ...]:
    """Everything `--env` takes."""
    return tuple(name for known in FAMILIES.values() for name in known.names)


def distribution_modes(env: str) -> tuple[str, ...]:
    """The distribution modes that a game has; a toy is the same in both of its own. Raises as `family`."""
    further = family(env).further_modes
    return ("easy", "hard", *(mode for mode, having in further.items() if env in having))
