"""A file with facts about the env of a policy, so that loading the policy needs no env."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

from tfrl.envs import registry
from tfrl.envs.spec import EnvSettings

FILE = "env.json"
_PACKAGE = "tfrl.envs."  # the file may name only classes of this package


def text(task: EnvSettings) -> str | None:
    """The content of the file for the env of a task; None if tfrl knows the env by its name."""
    facts = registry.facts(task)
    if facts is None:
        return None
    content = {"env": task.env, "env_kwargs": dict(task.env_kwargs), "facts": _encoded(facts)}
    return json.dumps(content, indent=2) + "\n"


def remember(folder: Path) -> None:
    """Uses the facts in the folder's file for its env, if the file exists and is readable."""
    try:
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
        facts = _decoded(content["facts"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError):
        return
    registry.remember(content["env"], content["env_kwargs"], facts)


def _encoded(value: Any) -> Any:
    """Dataclasses and named tuples become {"class": ..., "fields": ...}, recursively; tuples lists."""
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif hasattr(value, "_asdict"):
        fields = value._asdict()
    elif isinstance(value, dict):
        return {name: _encoded(part) for name, part in value.items()}
    else:
        return [_encoded(part) for part in value] if isinstance(value, tuple | list) else value
    kind = f"{type(value).__module__}:{type(value).__qualname__}"
    return {"class": kind, "fields": {name: _encoded(part) for name, part in fields.items()}}


def _decoded(content: Any) -> Any:
    """The inverse of `_encoded`; lists become tuples. Raises ValueError for a class outside this package."""
    if isinstance(content, list):
        return tuple(map(_decoded, content))
    if not isinstance(content, dict):
        return content
    if content.keys() != {"class", "fields"}:
        return {name: _decoded(part) for name, part in content.items()}
    module, _, name = content["class"].partition(":")
    if not module.startswith(_PACKAGE):
        raise ValueError(f"{module} is not of {_PACKAGE}")
    kind = getattr(importlib.import_module(module), name)
    return kind(**{name: _decoded(part) for name, part in content["fields"].items()})
