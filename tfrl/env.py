"""python -m tfrl.env ENV: describe an env, say what tfrl makes of it, and check it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np

from tfrl.algorithms.registry import ALGORITHMS, reader
from tfrl.cli import endings, flags
from tfrl.cli.errors import EnvError, UserError
from tfrl.cli.flags import COUNT, NATURAL, Range
from tfrl.config.run import RLSettings, Task, check_task
from tfrl.envs import registry
from tfrl.envs.facts import Facts, facts_of
from tfrl.envs.observations import BY_METHOD, IN_INFO, IN_OBSERVATION
from tfrl.run.console import Console

_USAGE = "python -m tfrl.env ENV"
_MASKS = {
    "": "none",
    IN_INFO: 'from info["action_mask"]',
    IN_OBSERVATION: 'from observation["action_mask"]',
    BY_METHOD: "from action_masks()",
}
_SLOW = 2e-3
"""Seconds of a step from which --env-processes help."""
_LARGE = 100.0
"""Real numbers from which --normalize-observations helps."""


@dataclass(frozen=True)
class Options:
    """The env and its check."""

    env_kwargs: str = "{}"
    """Keyword arguments of a Gymnasium env, as JSON: '{"size": 8}'."""
    frame_skip: Annotated[int | None, Range(1, 1000)] = None
    """Times that a Gymnasium env repeats each action. None: 4 for Atari's images, otherwise 1."""
    max_episode_steps: Annotated[int | None, COUNT] = None
    """Truncate an episode after this many steps. None: the env's own limit."""
    action_masks: Literal["auto", "never", "must"] = "auto"
    """auto: use the masks that the env gives; never: ignore masks; must: refuse an env without masks."""
    steps: Annotated[int, COUNT] = 1000
    """Random steps of the check."""
    seed: Annotated[int, NATURAL] = 1
    """Seed of the envs and the actions."""
    strict: bool = False
    """A warning also gives the exit code 2."""


def main(arguments: Sequence[str]) -> int:
    """Describes and checks an env; returns the exit code."""
    words, options = flags.parse(
        Options,
        arguments,
        _USAGE,
        "Describe an env, say what tfrl makes of it, and check it with random actions. The exit code is 2 if "
        "no run can train on it.",
    )
    settings: dict[str, Any] = {
        "env": registry.own_name(flags.one(words, "env", _USAGE)),
        "env_kwargs": flags.coerce(options.env_kwargs, dict, "--env-kwargs"),
        **{name: getattr(options, name) for name in ("frame_skip", "max_episode_steps", "action_masks")},
    }
    task = Task(**settings)
    check_task(task)
    notes, warnings = map(list, registry.advice(task))
    known = None if registry.family(task.env).names else facts_of(task)
    readers = {name: _settings(name, settings) for name in ALGORITHMS}
    console = Console()
    console.summary(_description(task, known, readers))
    from tfrl.envs import checking

    try:
        played = checking.play(task, options.steps, options.seed)
        if known is not None:
            warnings += checking.silent_faults(task, options.steps, options.seed)
    except (ValueError, EnvError) as error:
        raise UserError(f"{str(error).rstrip('.')}.") from error.__cause__
    if not played.resumes_exactly and not warnings:
        warnings.append(
            "the same seed and actions do not give the same steps, so a resumed run begins new episodes: "
            "draw from self.np_random alone"
        )
    console.summary(_results(played))
    notes += _hints(task, known, played, readers)
    for note in notes:
        console.message(f"note: {note}.")
    for warning in warnings:
        console.message(f"warning: {warning}.")
    if not warnings:
        console.message("The check has found no fault.")
    return 2 if options.strict and warnings else 0


def _settings(algorithm: str, settings: Mapping[str, Any]) -> RLSettings | None:
    """The settings of an algorithm for the env; None if it cannot train on it."""
    try:
        return reader(algorithm).of_values({name: x for name, x in settings.items() if x not in (None, {})})
    except UserError:
        return None


def _description(task: Task, known: Facts | None, readers: Mapping[str, RLSettings | None]) -> dict[str, str]:
    """The facts about an env, and what tfrl makes of them."""
    observation, action = registry.specs(task)
    rows = {"env": task.env, "observes": str(observation), "takes": str(action)}
    if known is not None:
        source = known.mask_source if observation.num_actions else ""
        rows["action masks"] = _MASKS[source]
        limit = task.max_episode_steps or known.time_limit
        rows["time limit"] = f"{limit:,} steps" if limit else "none that is known"
        rows["frames"] = f"{known.fps:g} a second" + (", drawn with OpenGL" if known.with_opengl else "")
    else:
        rows["level sets"] = ", ".join(task.level_sets)
    rows["a stored observation"] = (
        f"{np.dtype(observation.dtype).itemsize * np.prod(observation.shape):,} bytes"
    )
    usable = {name: config for name, config in readers.items() if config is not None}
    rows["algorithms"] = ", ".join(usable) or "none"
    if (config := usable.get("ppo")) is not None:
        mlp = f" of {config.hidden}" if config.small_network else ""
        rows["network of ppo"] = f"{config.torso}{mlp}, by --preset {config.preset}"
        how = {"observations": "normalize_observations", "rewards": "normalize_rewards"}
        normalized = [what for what, name in how.items() if getattr(config, name)]
        rows["normalised by ppo"] = " and ".join(normalized) or "nothing"
    rows["resume"] = "replays the actions of the episode"
    if known is None or known.saves_state:
        rows["resume"] = "restores the state of the env"
    elif known.draws_globally:
        rows["resume"] = "begins new episodes"
    return rows


def _results(played: Any) -> dict[str, str]:
    """The results of the check."""
    rows = {
        "checked": f"{played.steps:,} steps of random actions, {played.seconds * 1e6:,.0f} µs each",
        "rewards": f"{played.rewards[0]:g} to {played.rewards[1]:g} a step",
        "resumes exactly": "yes" if played.resumes_exactly else "no, it begins new episodes",
    }
    if played.lengths:
        lengths, returns = np.array(played.lengths), np.array(played.returns)
        few, most, cut = lengths.min(), lengths.max(), played.truncated
        rows["episodes"] = f"{len(lengths):,} of {few:,} to {most:,} steps, {cut:,} truncated"
        rows["returns"] = f"mean {returns.mean():.4g}, {returns.min():.4g} to {returns.max():.4g}"
    return rows


def _hints(
    task: Task, known: Facts | None, played: Any, readers: Mapping[str, RLSettings | None]
) -> list[str]:
    """Sentences about settings that may help."""
    found = []
    if not played.lengths and not (task.max_episode_steps or known is None or known.time_limit):
        found.append(
            f"no episode has ended in {played.steps:,} steps, and no time limit is known: "
            "--max-episode-steps gives one"
        )
    if played.seconds > _SLOW and known is not None:
        found.append(
            f"a step takes {played.seconds * 1e3:.1f} ms: --env-processes steps envs at the same time"
        )
    config = readers["ppo"]
    if played.largest > _LARGE and not getattr(config, "normalize_observations", True):
        found.append(
            f"observations have numbers up to {played.largest:.4g}: --normalize-observations may help"
        )
    return found


if __name__ == "__main__":
    endings.run(main)
