"""Facts about Gymnasium's envs that a run needs before it makes its envs.

They come from the first reset and step of an env. A file beside a policy also has them, so that loading the
policy needs no env.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tfrl.envs.observations import ArraySpec, Part
from tfrl.envs.spec import ActionSpec, EnvSettings

FILE = "env.json"


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


def of(task: EnvSettings) -> Facts:
    """The facts about the env of a task. This process finds them once, or reads them from a file.

    Raises:
      ValueError: the env does not exist or cannot be made; its observations or actions are not supported.
      EnvError: its first reset or step fails, or returns values of the wrong kind.
    """
    key = _key(task.env, task.env_kwargs)
    if key not in _known:
        from tfrl.envs.gymnasium_env import find_facts

        _known[key] = find_facts(*key)
    return _known[key]


def forget(env: str) -> None:
    """Drops the facts about an env, whose name may have another meaning now."""
    for key in [key for key in _known if key[0] == env]:
        del _known[key]


def text(task: EnvSettings) -> str:
    """The content of the file for the env of a task. Raises like `of`."""
    facts = of(task)
    action = {"kind": type(facts.action).__name__, **dataclasses.asdict(facts.action)}
    found = facts._asdict() | {"observation": dataclasses.asdict(facts.observation), "action": action}
    return json.dumps({"env": task.env, "env_kwargs": dict(task.env_kwargs), "facts": found}, indent=2) + "\n"


def remember(folder: Path) -> None:
    """Uses the facts in the folder's file for its env, if the file exists and is readable."""
    try:
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
        found = {name: _with_tuples(value) for name, value in content["facts"].items()}
        parts = tuple(Part(**part) for part in found["observation"].pop("parts"))
        observation = ArraySpec(**found.pop("observation"), parts=parts)
        kind = {kind.__name__: kind for kind in ActionSpec.__subclasses__()}[found["action"].pop("kind")]
        action = kind(**found.pop("action"))
        key = _key(content["env"], content["env_kwargs"])
        _known[key] = Facts(observation, action, **found)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return


def _with_tuples(value: Any) -> Any:
    """JSON's lists become tuples."""
    if isinstance(value, dict):
        return {name: _with_tuples(part) for name, part in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
