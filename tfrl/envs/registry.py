"""The families of envs: what is known of each env before any is made, and how one is made.

Nothing here imports an env's library until an env of its family is asked for.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tfrl.envs.spec import ActionSpec, ArraySpec, Discrete, EnvSpec
from tfrl.envs.vec_env import VecEnv

TRAIN, TEST = LEVEL_SETS = ("train", "test")
"""The level sets of an env that has levels; one without levels has `test` alone."""


@dataclass(frozen=True)
class Family:
    """Envs that one class plays.

    Attributes:
      module, kind: the class is `kind` of `module`; it is made of an `EnvSpec` and the global indices of the
        wanted envs, and follows `VecEnv`.
      names: what `--env` takes; empty for a family that knows its names itself.
      specs: the observation and action spec of an env by name; raises ValueError with a sentence for a name
        that it does not know.
      level_sets: those that evaluations play.
      preset: of PPO, for an env of this family.
      fps: frames a second at which people see its envs play; 0: each env has its own.
      steps_beside: `act` returns while the envs still step.
      modes: distribution modes that all envs of the family have.
      further_modes: those that some have, with their names.
    """

    module: str
    kind: str
    names: tuple[str, ...]
    specs: Callable[[str], tuple[ArraySpec, ActionSpec]]
    level_sets: tuple[str, ...]
    preset: str
    steps_beside: bool = True
    fps: int = 15
    modes: tuple[str, ...] = ()
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
_EASY_AND_HARD = ("easy", "hard")


def _images(*shape: int, actions: int) -> Callable[[str], tuple[ArraySpec, ActionSpec]]:
    return lambda name: (ArraySpec(shape, "uint8"), Discrete(actions))


def _gymnasium_specs(name: str) -> tuple[ArraySpec, ActionSpec]:
    from tfrl.envs.gymnasium_ids import specs_of

    return specs_of(name)


FAMILIES: Mapping[str, Family] = {
    "procgen": Family(
        *("tfrl.envs.procgen", "Procgen", _PROCGEN, _images(64, 64, 3, actions=15), LEVEL_SETS),
        *("openai-easy", True, 15, _EASY_AND_HARD, _PROCGEN_MODES),
    ),
    "toys": Family(
        *("tfrl.envs.catch", "Catch", ("catch",), _images(10, 5, 1, actions=3), LEVEL_SETS),
        *("openai-easy", True, 15, _EASY_AND_HARD),
    ),
    "gymnasium": Family(
        *("tfrl.envs.gymnasium", "GymnasiumVec", (), _gymnasium_specs, (TEST,)),
        *("gymnasium", False, 0),
    ),
}


def family(env: str) -> Family:
    """The family of an env, by name; of an unknown name, Gymnasium's, which looks further."""
    return next((known for known in FAMILIES.values() if env in known.names), FAMILIES["gymnasium"])


def specs(env: str) -> tuple[ArraySpec, ActionSpec]:
    """The specs of an env's observations and actions. Raises ValueError, a sentence, if it is unknown."""
    return family(env).specs(env)


def check(env: str) -> None:
    """Raise ValueError, with a sentence for the user, if there is no env of that name that can be learned."""
    # Gymnasium's ids end in a version; anything else is meant to be a game.
    if family(env).names or re.fullmatch(r"\S+-v\d+", env):
        specs(env)
        return
    from tfrl.envs.gymnasium_ids import nearest

    near = nearest(env, env_names())
    hint = f" (did you mean {near}?)" if near else ""
    known = ", ".join(env_names())
    raise ValueError(f"there is no env {env!r}{hint}; known: {known}, and Gymnasium's ids, CartPole-v1 say")


def own_name(env: str) -> str:
    """The registry's name of an env, from any of the spellings that Gym has used for procgen's games."""
    found = re.fullmatch(r"(?:procgen:)?procgen-(\w+)-v0", env)
    return found[1] if found else env


def file_name(env: str) -> str:
    """An env's name as a part of the names of files: the slash and the colon of ids are dashes there."""
    return re.sub(r"[/:]", "-", env)


def games() -> tuple[str, ...]:
    """The 16 procgen games, sorted."""
    return _PROCGEN


def env_names() -> tuple[str, ...]:
    """The names that `--env` takes beside Gymnasium's ids."""
    return tuple(name for known in FAMILIES.values() for name in known.names)


def level_set_title(env: str, level_set: str) -> str:
    """The name of one of an env's level sets for people; "evaluation" where there are no levels."""
    if TRAIN not in family(env).level_sets:
        return "evaluation"
    return {TRAIN: "training levels", TEST: "unseen levels"}[level_set]


def frames_per_second(env: str) -> float:
    """The speed at which people see an env play."""
    if fps := family(env).fps:
        return fps
    from tfrl.envs.gymnasium_ids import frames_per_second

    return frames_per_second(env)


def reward_threshold(env: str) -> float | None:
    """The mean return from which an env counts as solved; None if nothing is said of it, or it is unknown."""
    if family(env).names:
        return None
    from tfrl.envs.gymnasium_ids import reward_threshold

    try:
        return reward_threshold(env)
    except ValueError:  # said by the task's own check
        return None


def draws_with_opengl(env: str) -> bool:
    """True if, as far as is known, OpenGL draws an env's frames for people; others take milliseconds."""
    if family(env).fps:
        return False
    from tfrl.envs.gymnasium_ids import draws_with_opengl

    return draws_with_opengl(env)


def distribution_modes(env: str) -> tuple[str, ...]:
    """The distribution modes that an env has; none for one without levels."""
    known = family(env)
    return (*known.modes, *(mode for mode, having in known.further_modes.items() if env in having))


def in_words() -> str:
    """The names of all families, for --help."""
    named = [f"{name}: {', '.join(known.names)}" for name, known in FAMILIES.items() if known.names]
    return "; ".join([*named, "gymnasium: ids of Gymnasium, such as CartPole-v1"])


def make(spec: EnvSpec, indices: Sequence[int] | None = None) -> VecEnv:
    """Envs `indices` of the global vector that `spec` describes (all of them when None).

    Env i is the same env whichever worker holds it, and in whatever company.

    Raises:
      ValueError: there is no such env, or not in this distribution mode.
    """
    known = family(spec.name)
    modes = distribution_modes(spec.name)
    if modes and spec.distribution_mode not in modes:  # procgen's C++ would end the process
        raise ValueError(f"{spec.name} has no distribution mode {spec.distribution_mode!r}")
    kind = getattr(importlib.import_module(known.module), known.kind)
    indices = list(range(spec.num_envs) if indices is None else indices)
    if spec.render and draws_with_opengl(spec.name):
        from tfrl.envs.apart import Apart

        return Apart(kind, spec, indices)
    return kind(spec, indices)
