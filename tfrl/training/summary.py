"""What a run says of itself before it trains."""

from __future__ import annotations

import shlex

from tfrl.config.ppo import Config
from tfrl.run.checkpoint import Checkpoint
from tfrl.run.folder import RunSettings
from tfrl.workers.strategy import Runtime


def rows(
    config: Config, runtime: Runtime, num_parameters: int, found: Checkpoint | None, logged: int
) -> dict[str, str]:
    """The settings that matter, by title.

    Args:
      found: the checkpoint that the run continues from, if any.
      logged: the env steps that progress.csv had reached before that.
    """
    levels = f"levels {config.start_level} to {config.start_level + config.num_levels - 1}"
    if not config.num_levels:
        levels = "all levels"
    if config.distribution_mode == "exploration":
        levels = "a single level"
    minibatch = config.batch_size // config.num_minibatches
    lines = {
        "game": f"{config.env}, {config.distribution_mode}, {levels}",
        **hardware(runtime),
        "length": _length(config),
        "envs": f"{config.num_envs} x {config.num_steps} steps an update, {config.epochs} epochs of "
        f"{config.num_minibatches} minibatches of {minibatch:,}",
        "network": network(config.torso, config.torso_width, num_parameters),
        **folder(config),
    }
    if found is not None:
        lines["continues at"] = f"{found.env_steps:,} env steps (update {found.update})"
    lost, since = (logged, "before the first") if found is None else (logged - found.env_steps, "after that")
    if lost > 0:
        lines["lost"] = f"{lost:,} env steps {since} checkpoint, which are taken again"
    return lines


def _length(config: Config) -> str:
    steps = config.num_updates * config.batch_size
    rounded = "" if steps == config.total_steps else f", --total-steps {config.total_steps:,} rounded up"
    return f"{steps:,} env steps ({config.num_updates:,} updates{rounded})"


def network(name: str, width: int, num_parameters: int) -> str:
    """What any trainer trains."""
    return f"{name}, {f'width {width}, ' if width != 1 else ''}{num_parameters:,} parameters"


def hardware(runtime: Runtime) -> dict[str, str]:
    """Where any trainer computes."""
    return {
        "computes on": f"{runtime.device}, {runtime.precision}",
        "strategy": f"{type(runtime.strategy).__name__}, {runtime.num_workers} worker(s), "
        f"{runtime.replicas} replica(s) in all",
    }


def folder(config: RunSettings) -> dict[str, str]:
    """Where any trainer writes."""
    return {"run": str(config.run_dir), "curves": tensorboard(config)}


def tensorboard(config: RunSettings) -> str:
    """The command that shows any trainer's curves, as a shell takes it."""
    return shlex.join(["tensorboard", "--logdir", config.logdir])
