"""The families of envs: the specs of each env, and how to make it.

The module of a family is imported only when one of its envs is used, and imports no slow library itself.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfrl.envs import callables, facts
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
      chooses_levels: True if the class takes the levels of `EnvSpec.level_replay`.
      fps: frames per second for videos; 0: each env has its own.
      modes: distribution modes that all envs of the family have.
      further_modes: modes of only some envs, with the names of these envs.
    """

    implementation: str
    preset: str
    level_sets: tuple[str, ...] = LEVEL_SETS
    names: tuple[str, ...] = ()
    steps_beside: bool = True
    chooses_levels: bool = False
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
        chooses_levels=True,
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
        chooses_levels=True,
        fps=0,
    ),
}


def family(env: str) -> Family:
    """The family of an env, by its name; Gymnasium's if no other family has the name."""
    env = own_name(env)
    return next((known for known in FAMILIES.values() if env in known.names), FAMILIES["gymnasium"])


def specs(task: EnvSettings) -> tuple[ArraySpec, ActionSpec]:
    """The specs of the observations and actions of the env of a task or an `EnvSpec`.

    If action masks are used, they are part of the observations.

    Raises:
      ValueError: the env does not exist, or its spaces are not supported.
      EnvError: its first reset or step fails.
    """
    if (known := family(task.env)).names:
        return known.env_class.observation_spec, known.env_class.action_spec
    return facts.facts_of(task).specs(task.action_masks)


def check(task: EnvSettings) -> None:
    """Raises like `specs`, and if the task has settings that the family of its env does not have."""
    env = task.env
    if env == facts.NO_ENV and getattr(task, "level_sets", True):
        raise ValueError("--env none is for algorithms that learn from recorded data, with their --dataset")
    if family(env).names:
        for name in ("env_kwargs", "frame_skip"):
            if getattr(task, name):
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} is for Gymnasium's envs, and {env} is not one: leave it out")
    elif env != facts.NO_ENV and not (
        callables.is_name(env) or re.fullmatch(r"\S+-v\d+", env)
    ):  # an id of Gymnasium
        from tfrl.envs.making import did_you_mean

        if advice := callables.as_module(env):
            raise ValueError(f"there is no env {env!r}; {advice}")
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
            f'--action-masks must needs info["action_mask"], which {env} does not give at its reset, or a '
            "mask in its observation or by action_masks(); leave --action-masks out"
        )


def check_levels(task: EnvSettings) -> None:
    """Raises EnvError if level replay cannot choose the levels of a Gymnasium env, which this makes."""
    if family(task.env).names:
        return
    from tfrl.envs import calls
    from tfrl.envs.making import opened

    with opened(task.env, json.dumps(dict(task.env_kwargs), sort_keys=True)) as env:
        calls.check_levels(task.env, env, range(task.start_level, task.start_level + task.num_levels))


def facts_text(task: EnvSettings) -> str | None:
    """The content of `tfrl.envs.facts.FACTS_FILE` for the env of a task; None if a family has its name."""
    if family(task.env).names:
        return None
    return facts.text_of(task.env, task.env_kwargs, facts.facts_of(task))


def advice(task: EnvSettings) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Notes and warnings about the env of a task, for its user. Raises like `specs`."""
    if family(task.env).names:
        return (), ()
    known = facts.facts_of(task)
    notes, longest, own = list(known.notes), task.max_episode_steps, known.time_limit
    if task.action_masks == "never" and known.mask_source:
        notes = [f"the action masks of {task.env} are not used: --action-masks never"]
    if longest and own and own < longest and callables.is_name(task.env):  # of an id, it has been removed
        notes.append(
            f"the time limit within the env, {own:,} steps, comes before --max-episode-steps {longest:,}"
        )
    return tuple(notes), known.warnings


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
    facts.forget_facts(name)
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
    return family(task.env).fps or facts.facts_of(task).fps / frames_per_step(task)


def frames_per_step(task: EnvSettings) -> int:
    """The frames of the env in a step of the agent: --frame-skip, which is 4 by default for Atari's games."""
    if task.frame_skip is not None:
        return task.frame_skip
    if family(task.env).names or callables.is_name(task.env):
        return 1
    from tfrl.envs.making import default_frame_skip

    return default_frame_skip(task.env, task.env_kwargs)


def reward_threshold(env: str) -> float | None:
    """The mean return at which an env counts as solved; None if Gymnasium has no threshold."""
    if family(env).names or callables.is_name(env):  # wrappers of a callable may have changed the rewards
        return None
    from tfrl.envs.making import find_spec

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
        processes = 1 if not known.names and facts.facts_of(spec).with_opengl else 0
    if not processes:
        return known.env_class(spec, indices)
    from tfrl.envs.subprocesses import SubprocessVecEnv

    return SubprocessVecEnv(known.env_class, spec, indices, processes)
