"""The families of envs: facts about each env, and how to make it.

The module of a family is imported only when one of its envs is used, and imports no slow library itself.
Facts about one of Gymnasium's envs come from its first reset and step, or from a file beside a policy, so
that loading the policy needs no env.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tfrl.envs import callables
from tfrl.envs.observations import Part
from tfrl.envs.spec import ActionSpec, ArraySpec, EnvSettings, EnvSpec, VecEnv

TRAIN, TEST = LEVEL_SETS = ("train", "test")
"""The level sets of an env with levels; an env without levels has only `test`."""


@dataclass(frozen=True)
class Family:
    """The envs that one class implements.

    Attributes:
      implementation: "module:class", a `VecEnv` that takes an `EnvSpec` and the global indices of the wanted
        envs.
      preset: PPO's preset for these envs.
      level_sets: the level sets that evaluations play.
      names: the names for `--env`, whose specs are attributes of the class; empty for Gymnasium, which has
        its own ids.
      steps_beside: True if `act` returns while the envs still step.
      fps: frames per second for videos; 0: each env has its own.
      modes: distribution modes that all envs of the family have.
      further_modes: modes of only some envs, with the names of these envs.
    """

    implementation: str
    preset: str
    level_sets: tuple[str, ...] = LEVEL_SETS
    names: tuple[str, ...] = ()
    steps_beside: bool = True
    fps: int = 15
    modes: tuple[str, ...] = ()
    further_modes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def env_class(self) -> Any:
        """The class that `implementation` names."""
        module, _, name = self.implementation.partition(":")
        return getattr(importlib.import_module(module), name)


_PROCGEN = (
    *("bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot"),
    *("heist", "jumper", "leaper", "maze", "miner", "ninja", "plunder", "starpilot"),
)

FAMILIES: Mapping[str, Family] = {
    "procgen": Family(
        implementation="tfrl.envs.procgen:Procgen",
        preset="openai-easy",
        names=_PROCGEN,
        modes=("easy", "hard"),
        further_modes={
            "extreme": ("chaser", "dodgeball", "leaper", "starpilot"),
            "memory": ("caveflyer", "dodgeball", "heist", "jumper", "maze", "miner"),
            "exploration": ("caveflyer", "climber", "coinrun", "heist", "jumper", "leaper", "maze", "ninja"),
        },
    ),
    "toys": Family(
        implementation="tfrl.envs.catch:Catch",
        preset="openai-easy",
        names=("catch",),
        modes=("easy", "hard"),
    ),
    "gymnasium": Family(
        implementation="tfrl.envs.gymnasium:GymnasiumVec",
        preset="gymnasium",
        level_sets=(TEST,),
        steps_beside=False,
        fps=0,
    ),
}


def family(env: str) -> Family:
    """The family of an env, by its name; Gymnasium's if no other family has the name."""
    env = own_name(env)
    return next((known for known in FAMILIES.values() if env in known.names), FAMILIES["gymnasium"])


FACTS_FILE = "env.json"
NO_ENV = "none"
"""The env of a run that learns from recorded data alone; the set has its spaces."""


class Facts(NamedTuple):
    """Facts about an env.

    Attributes:
      observation, action: the specs.
      action_mask: True if its reset returns info["action_mask"].
      fps: frames per second for videos; 30 if the env names no rate.
      with_opengl: True if OpenGL draws it, or may draw it; other envs draw in milliseconds.
      saves_state: True if it has `get_state()` and `set_state(state)`, and they are exact.
    """

    observation: ArraySpec
    action: ActionSpec
    action_mask: bool
    fps: float
    with_opengl: bool
    saves_state: bool

    def specs(self, action_masks: str) -> tuple[ArraySpec, ActionSpec]:
        """The specs of observations and actions; observations contain the action mask if it is used.

        `action_masks` is the setting: auto, never or must.
        """
        masked = action_masks != "never" and self.action_mask
        observation = self.observation.with_mask(self.action.mask_size) if masked else self.observation
        return observation, self.action


_known: dict[tuple[str, str], Facts] = {}  # by env and kwargs as JSON text


def _key(env: str, kwargs: Mapping[str, Any]) -> tuple[str, str]:
    return env, json.dumps(dict(kwargs), sort_keys=True)


def facts_of(task: EnvSettings) -> Facts:
    """The facts about Gymnasium's env of a task. This process finds them once, or reads them from a file.

    Raises:
      ValueError: the env does not exist or cannot be made; its observations or actions are not supported.
      EnvError: its first reset or step fails, or returns values of the wrong kind.
    """
    key = _key(task.env, task.env_kwargs)
    if key not in _known and task.env == NO_ENV:
        raise ValueError("--env none needs --dataset, the set that has the spaces")
    if key not in _known:
        from tfrl.envs.gymnasium import find_facts

        _known[key] = find_facts(*key)
    return _known[key]


def is_known(env: str) -> bool:
    """True if this process has the facts about an env without arguments."""
    return _key(env, {}) in _known


def specs(task: EnvSettings) -> tuple[ArraySpec, ActionSpec]:
    """The specs of the observations and actions of the env of a task or an `EnvSpec`.

    If action masks are used, they are part of the observations.

    Raises:
      ValueError: the env does not exist, or its spaces are not supported.
      EnvError: its first reset or step fails.
    """
    if (known := family(task.env)).names:
        return known.env_class.observation_spec, known.env_class.action_spec
    return facts_of(task).specs(task.action_masks)


def facts_text(task: EnvSettings) -> str | None:
    """The content of FACTS_FILE for the env of a task; None if tfrl knows the env by its name."""
    return None if family(task.env).names else text_of(task.env, task.env_kwargs, facts_of(task))


def text_of(env: str, kwargs: Mapping[str, Any], facts: Facts) -> str:
    """The content of FACTS_FILE for these facts."""
    action = {"kind": type(facts.action).__name__, **dataclasses.asdict(facts.action)}
    found = facts._asdict() | {"observation": dataclasses.asdict(facts.observation), "action": action}
    return json.dumps({"env": env, "env_kwargs": dict(kwargs), "facts": found}, indent=2) + "\n"


def remember_none(text: str) -> None:
    """Makes the facts of this content of a FACTS_FILE those of the env `none`."""
    content = json.loads(text)
    _remember({**content, "env": NO_ENV, "env_kwargs": {}})


def remember_facts(folder: Path) -> None:
    """Uses the facts in a folder's FACTS_FILE for its env, if the file exists and is readable."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        _remember(json.loads((folder / FACTS_FILE).read_text(encoding="utf-8")))


def _remember(content: Mapping[str, Any]) -> None:
    found = {name: _with_tuples(value) for name, value in content["facts"].items()}
    parts = tuple(Part(**part) for part in found["observation"].pop("parts"))
    observation = ArraySpec(**found.pop("observation"), parts=parts)
    kind = {kind.__name__: kind for kind in ActionSpec.__subclasses__()}[found["action"].pop("kind")]
    action = kind(**found.pop("action"))
    _known[_key(content["env"], content["env_kwargs"])] = Facts(observation, action, **found)


def _with_tuples(value: Any) -> Any:
    """JSON's lists become tuples."""
    if isinstance(value, dict):
        return {name: _with_tuples(part) for name, part in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def check(task: EnvSettings) -> None:
    """Raises like `specs`, and if the task has settings that the family of its env does not have."""
    env = task.env
    if env == NO_ENV and getattr(task, "level_sets", True):
        raise ValueError("--env none is for algorithms that learn from recorded data, with their --dataset")
    if family(env).names:
        for name in ("env_kwargs", "frame_skip"):
            if getattr(task, name):
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} is for Gymnasium's envs, and {env} is not one: leave it out")
    elif env != NO_ENV and not (
        callables.is_name(env) or re.fullmatch(r"\S+-v\d+", env)
    ):  # an id of Gymnasium
        from tfrl.envs.gymnasium import did_you_mean

        known = ", ".join(env_names())
        raise ValueError(
            f"there is no env {env!r}{did_you_mean(env, env_names())}; known: {known}, Gymnasium's ids, and "
            "MODULE:ID or MODULE:FUNCTION of your own"
        )
    observation, action = specs(task)
    if observation.num_actions and (task.frame_skip or 1) > 1:
        raise ValueError(
            f"--frame-skip {task.frame_skip} would repeat actions that the action mask of {env} forbids by "
            "then; leave one out, --frame-skip or, with --action-masks never, the mask"
        )
    if task.action_masks == "must" and not action.mask_size:
        raise ValueError(
            f"--action-masks must needs discrete actions, and {env} has {action.kind} ones; leave "
            "--action-masks out"
        )
    if task.action_masks == "must" and not observation.num_actions:
        raise ValueError(
            f'--action-masks must needs info["action_mask"], which {env} does not give at its reset; leave '
            "--action-masks out"
        )


def name_of(env: str | Callable[..., Any]) -> str:
    """The name of an env, or of a callable that makes one; this process then finds the callable by name.

    Raises ValueError for other objects, such as an env.
    """
    if isinstance(env, str):
        return env
    if not callable(env):
        raise ValueError(
            f"env must be an id or a function that makes an env, not a {type(env).__name__}: for example "
            "lambda: gymnasium.make(...)"
        )
    name = callables.give(env)
    for key in [key for key in _known if key[0] == name]:
        del _known[key]  # the name may have had another meaning
    return name


def own_name(env: str) -> str:
    """The registry's name of an env: coinrun for Gym's `procgen:procgen-coinrun-v0`."""
    found = re.fullmatch(r"(?:procgen:)?procgen-(\w+)-v0", env)
    return found[1] if found else env


def file_name(env: str) -> str:
    """An env's name for file names: dashes replace slashes, colons and brackets."""
    return re.sub(r"[^\w.-]+", "-", env).strip("-")[:100]


def games() -> tuple[str, ...]:
    """The 16 procgen games, sorted."""
    return _PROCGEN


def env_names() -> tuple[str, ...]:
    """The names that `--env` takes in addition to Gymnasium's ids."""
    return tuple(name for known in FAMILIES.values() for name in known.names)


def level_set_title(env: str, level_set: str) -> str:
    """The name of a level set in messages; "evaluation" for envs without levels."""
    if TRAIN not in family(env).level_sets:
        return "evaluation"
    return {TRAIN: "training levels", TEST: "unseen levels"}[level_set]


def frames_per_second(task: EnvSettings) -> float:
    """The agent's steps per second in videos of the task's env. Raises like `specs`."""
    return family(task.env).fps or facts_of(task).fps / (task.frame_skip or 1)


def reward_threshold(env: str) -> float | None:
    """The mean return at which an env counts as solved; None if Gymnasium has no threshold."""
    if family(env).names or callables.is_name(env):  # wrappers of a callable may have changed the rewards
        return None
    from tfrl.envs.gymnasium import find_spec

    try:
        threshold = find_spec(env).reward_threshold
    except ValueError:  # the task's own check reports it
        return None
    return None if threshold is None else float(threshold)


def distribution_modes(env: str) -> tuple[str, ...]:
    """The distribution modes of an env; none if it has no levels."""
    known = family(env)
    return (*known.modes, *(mode for mode, having in known.further_modes.items() if env in having))


def in_words() -> str:
    """The names of all families, for --help."""
    named = [f"{name}: {', '.join(known.names)}" for name, known in FAMILIES.items() if known.names]
    gymnasium = "gymnasium: ids of Gymnasium, such as CartPole-v1, or my_package.my_module:MyEnv-v0"
    own = "or my_package.my_module:make_env, a function that returns a gymnasium.Env"
    return "; ".join([*named, f"{gymnasium}, where the module registers the id, {own}"])


def make(spec: EnvSpec, indices: Sequence[int] | None = None) -> VecEnv:
    """Envs `indices` of the global vector that `spec` describes (all of them when None).

    Env i is the same env on any worker, with any other envs. A distribution mode that does not exist ends the
    process; `tfrl.config.run.check_task` refuses it. Raises ValueError if the env does not exist.
    """
    known = family(spec.env)
    indices = list(range(spec.num_envs) if indices is None else indices)
    processes = min(spec.num_processes, len(indices)) if len(indices) > 1 else 0
    if spec.render:
        processes = 1 if not known.names and facts_of(spec).with_opengl else 0
    if not processes:
        return known.env_class(spec, indices)
    from tfrl.envs.subprocesses import SubprocessVecEnv

    return SubprocessVecEnv(known.env_class, spec, indices, processes)
