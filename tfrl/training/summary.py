"""The table of settings that is printed before the first update."""

from __future__ import annotations

import json
import shlex

from tfrl.algorithms.algorithm import Agent
from tfrl.config.actors import DistributedSettings
from tfrl.config.run import Network, RLSettings
from tfrl.envs import registry
from tfrl.envs.registry import TRAIN
from tfrl.run.session import Session, tensorboard


def rows(config: RLSettings, session: Session, agent: Agent) -> dict[str, str]:
    """The titles and texts of the table's rows about the task, the algorithm and the network."""
    torso = config.torso + (f" of {config.hidden}" if config.torso == "mlp" else "")
    if isinstance(config, Network) and config.memory != "none":
        torso += f" and {config.memory} of {config.memory_size}"
    width = f"width {config.torso_width}, " if config.torso_width != 1 else ""
    lines = {
        **_env(config),
        "preset": config.preset,
        "length": _length(config),
        **agent.summary,
        **_actors(config),
        "network": f"{torso}, {width}{agent.num_parameters:,} parameters",
    }
    if (start := session.started_from) is not None:
        lines["started from"] = f"{start['run']}, at {start['env_steps']:,} env steps"
    return lines


def next_commands(config: RLSettings) -> list[str]:
    """Commands for a finished run, and a line of Python that loads its policy."""
    run = shlex.quote(str(config.run_dir))
    commands = {
        tensorboard(config): "curves",
        f"python -m tfrl.report {run}": "a page with curves and scores",
        f"python -m tfrl.record {run}": "a video of the policy",
        f"python -m tfrl.evaluate {run}": "returns of more episodes",
        f"policy = tfrl.load({str(config.run_dir)!r})": "in Python; then policy(observations)",
    }
    width = max(map(len, commands))
    return [f"{command.ljust(width)}  # {text}" for command, text in commands.items()]


def _env(config: RLSettings) -> dict[str, str]:
    observation, action = registry.specs(config)
    limit = config.max_episode_steps
    more = {"observes": str(observation), "takes": str(action)} | (
        {"episodes": f"truncated after {limit:,} steps"} if limit else {}
    )
    if TRAIN not in config.level_sets:
        kwargs = f", {json.dumps(config.env_kwargs)}" if config.env_kwargs else ""
        skip = f", each action {config.frame_skip} times" if config.frame_skip else ""
        return {"env": f"{config.env}{kwargs}{skip}", **more}
    levels = f"levels {config.start_level} to {config.start_level + config.num_levels - 1}"
    if not config.num_levels:
        levels = "all levels"
    if config.distribution_mode == "exploration":
        levels = "a single level"
    return {"game": f"{config.env}, {config.distribution_mode}, {levels}", **more}


def _actors(config: RLSettings) -> dict[str, str]:
    if not (isinstance(config, DistributedSettings) and config.is_ahead):
        return {}
    by = f"{config.actors} actors on Ray" if config.actors else "a thread"
    most = "at the most " if config.free_running else ""
    return {"actors": f"{by}, {most}{config.lag} updates behind"}


def _length(config: RLSettings) -> str:
    steps = config.run_steps
    if config.updates_vary:
        return f"{steps:,} env steps, up to the end of an update"
    rounded = "" if steps == config.total_steps else f", --total-steps {config.total_steps:,} rounded up"
    return f"{steps:,} env steps ({config.num_updates:,} updates{rounded})"
