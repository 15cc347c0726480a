"""Facts about Gymnasium's envs, from their first reset and step.

A process finds the facts about an env once. A file beside a policy keeps them, so that loading the policy
needs no env. Only `find_facts` imports Gymnasium.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tfrl.envs.images import Layout
from tfrl.envs.observations import ACTION_MASK, IN_OBSERVATION, Part
from tfrl.envs.spec import ActionSpec, ArraySpec, EnvSettings

FACTS_FILE = "env.json"
NO_ENV = "none"
"""The env of a run that learns from recorded data alone; the set has its spaces."""


class Facts(NamedTuple):
    """Facts about an env.

    Attributes:
      observation, action: the specs; `observation` has all arrays that the env shows.
      mask_source: where its action mask is, such as IN_INFO, or "" without a mask.
      fps: frames per second for videos; 30 if the env names no rate.
      with_opengl: True if OpenGL draws it, or may draw it; other envs draw in milliseconds.
      saves_state: True if it has `get_state()` and `set_state(state)`, and they are exact.
      draws_globally: True if it draws from a generator of the whole process, which no seed of an env decides.
      time_limit: the steps of an episode at most, by its own time limit; None without one.
      notes: sentences about what tfrl makes of the env's values.
      warnings: sentences about what may harm the training.
    """

    observation: ArraySpec
    action: ActionSpec
    mask_source: str
    fps: float
    with_opengl: bool
    saves_state: bool
    draws_globally: bool = False
    time_limit: int | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def specs(self, action_masks: str) -> tuple[ArraySpec, ActionSpec]:
        """The specs of observations and actions; observations contain the action mask if it is used.

        `action_masks` is the setting: auto, never or must. A mask that is not used stays an ordinary array of
        the observation, if the env shows it there.
        """
        if action_masks == "never" or not self.mask_source:
            return self.observation, self.action
        plain = self.observation
        if self.mask_source == IN_OBSERVATION:
            plain = ArraySpec.of_parts([part for part in plain.parts if part.keys != (ACTION_MASK,)])
        return plain.with_mask(self.action.mask_size), self.action


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
        _known[key] = find_facts(*key)
    return _known[key]


def is_known(env: str) -> bool:
    """True if this process has the facts about an env without arguments."""
    return _key(env, {}) in _known


def find_facts(env_id: str, kwargs: str = "{}") -> Facts:
    """The facts about an env, from its first reset and step.

    Raises:
      ValueError: see `make_env`; or the observations or actions are not supported.
      EnvError: its first reset or step fails, or returns values of the wrong kind.
    """
    # Gymnasium takes a while to import.
    from tfrl.envs.calls import (
        check_calls,
        notes_about,
        saves_exactly,
        saves_state,
        time_limit,
        warnings_about,
    )
    from tfrl.envs.making import action_spec, draws_with_opengl, observation_spec, opened

    with opened(env_id, kwargs) as env:
        observation = observation_spec(env_id, getattr(env, "observation_space", None))
        action = action_spec(env_id, getattr(env, "action_space", None))
        seen = check_calls(env_id, env, observation, action)
        is_exact = False
        if saves_state(env) and not seen.mask_source:  # because this check takes any actions
            with opened(env_id, kwargs) as other:
                is_exact = saves_exactly(env, other, observation)
        return Facts(
            observation,
            action,
            seen.mask_source,
            fps=float(env.metadata.get("render_fps") or 30),
            with_opengl=draws_with_opengl(env_id, env),
            saves_state=is_exact,
            draws_globally=bool(seen.generators),
            time_limit=time_limit(env),
            notes=tuple(notes_about(observation, action, seen)),
            warnings=tuple(warnings_about(env, observation, action, seen)),
        )


def text_of(env: str, kwargs: Mapping[str, Any], facts: Facts) -> str:
    """The content of FACTS_FILE for these facts."""
    action = {"kind": type(facts.action).__name__, **dataclasses.asdict(facts.action)}
    found = facts._asdict() | {"observation": dataclasses.asdict(facts.observation), "action": action}
    return json.dumps({"env": env, "env_kwargs": dict(kwargs), "facts": found}, indent=2) + "\n"


def remember_none(text: str) -> None:
    """Makes the facts of this content of a FACTS_FILE those of the env `none`."""
    _remember({**json.loads(text), "env": NO_ENV, "env_kwargs": {}})


def remember_facts(folder: Path) -> None:
    """Uses the facts in a folder's FACTS_FILE for its env, if the file exists and is readable."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        _remember(json.loads((folder / FACTS_FILE).read_text(encoding="utf-8")))


def _remember(content: Mapping[str, Any]) -> None:
    found = {name: _with_tuples(value) for name, value in content["facts"].items()}
    observation = _array_spec(found.pop("observation"))
    kind = {kind.__name__: kind for kind in ActionSpec.__subclasses__()}[found["action"].pop("kind")]
    action = kind(**found.pop("action"))
    _known[_key(content["env"], content["env_kwargs"])] = Facts(observation, action, **found)


def _array_spec(found: dict[str, Any]) -> ArraySpec:
    """An ArraySpec from its fields."""
    parts = tuple(Part(**_with_layout(part)) for part in found.pop("parts"))
    return ArraySpec(**_with_layout(found), parts=parts)


def _with_layout(found: dict[str, Any]) -> dict[str, Any]:
    layout = found["layout"]
    return found | {"layout": None if layout is None else Layout(**layout)}


def forget_facts(env: str) -> None:
    """Forgets the facts about the envs of a name, which may have another meaning now."""
    for key in [key for key in _known if key[0] == env]:
        del _known[key]


def _with_tuples(value: Any) -> Any:
    """JSON's lists become tuples."""
    if isinstance(value, dict):
        return {name: _with_tuples(part) for name, part in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
