"""Runs that have come to their end: told before TensorFlow is imported, which takes seconds."""

from __future__ import annotations

import dataclasses

from tfrl.cli.errors import UserError
from tfrl.config.run import RLSettings
from tfrl.evaluation import policy_files
from tfrl.run import results


def complete(config: RLSettings) -> str | None:
    """The sentence for a run that is complete: its results are of its newest checkpoint. Otherwise None.

    Raises UserError as `check_length` does, and where no checkpoint is valid.
    """
    found = policy_files.results_of_newest(config.run_dir)
    if not results.are_of_all(found, config):
        return None
    check_length(config, found["env_steps"])
    return sentence(config, found["env_steps"], found["episodes"])


def check_length(config: RLSettings, env_steps: int) -> None:
    """Raises UserError where the run is at more env steps than the settings want."""
    beyond = config.steps_per_update - 1 if config.updates_vary else 0  # how far its end may be
    if env_steps > config.run_steps + beyond:
        raise UserError(
            f"{config.run_dir} is at {env_steps:,} env steps, and --total-steps {config.total_steps:,} "
            "is less; give at least as many to go on with it, or another --run-name."
        )


def sentence(config: RLSettings, env_steps: int, episodes: float) -> str:
    """Says that the run is complete after so many env steps and episodes, and how to go on with it."""
    return f"{config.run_dir} is complete; {_advice(config, env_steps, episodes)}."


def _advice(config: RLSettings, env_steps: int, episodes: float) -> str:
    if env_steps < config.run_steps:
        if config.max_episodes is not None and episodes >= config.max_episodes:
            return "without --max-episodes, or with a higher one, it would go on"
        open_again = dataclasses.replace(config, solved_at=None).complete()
        without = "without --solved-at, or " if open_again.solved_at is None else ""
        return f"{without}with a higher {'one' if without else '--solved-at'}, it would go on"
    if "total_steps" in config.may_change:
        return "more --total-steps would go on with it"
    return (
        "its learning rate followed --total-steps to its end; another run goes on with its weights by "
        f"--start-from {config.run_dir}"
    )
