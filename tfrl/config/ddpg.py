"""The settings of DDPG: its section, presets and checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tfrl.cli.settings import COUNT, NOT_NEGATIVE, Range, Reader
from tfrl.config import actors, replay
from tfrl.config.continuous import OF_ENVS, SUMMARIES, TASKS
from tfrl.config.replay import Actors, Ahead, Hardware, Learners, Replay, ReplaySettings, Run, Task, Torso


@dataclass(frozen=True)
class DDPG:
    """The hyperparameters of DDPG."""

    exploration_noise: float = 0.1
    """Standard deviation of the noise upon actions, which are between -1 and 1."""
    policy_delay: int = 1
    """Gradient steps of the critics for one of the actor, and of the target networks (see --target-every)."""
    noise_correlation: float = 0.0
    """Correlation of the exploration noise of a step with that of the step before in an episode; 0.85 is the
    paper's Ornstein-Uhlenbeck process."""


# A dataclass collects its fields from the last base to the first.
@dataclass(frozen=True)
class Config(Run, Actors, Learners, Ahead, Hardware, Torso, DDPG, Replay, Task, ReplaySettings):
    """All settings of a DDPG run. One field a flag."""

    algorithm: ClassVar[str] = "ddpg"
    decisive: ClassVar[tuple[type, ...]] = (Task, Replay, DDPG, Ahead, Torso)


PRESETS: Mapping[str, Mapping[str, Any]] = {
    **TASKS,
    "mountain-car": {**TASKS["mountain-car"], "exploration_noise": 0.5},
    "cleanrl": {**TASKS["cleanrl"], "learning_starts": 25_000, "policy_delay": 2},
}
"""The presets, by what they change in the defaults; TD3's, too."""

RANGES: dict[str, Range] = {
    "exploration_noise": NOT_NEGATIVE,
    "policy_delay": COUNT,
    "noise_correlation": Range(0, 0.9999),
}


def validate(config: Config) -> None:
    """Raise UserError for the first setting that cannot work on any machine."""
    replay.check(config, RANGES)


READER = Reader(
    Config,
    sections=(Task, Replay, DDPG, Torso, Hardware, Ahead, Actors, Learners, Run),
    presets=PRESETS,
    preset_summaries=SUMMARIES,
    default_preset=lambda task: OF_ENVS.get(task.env, "default"),
    defaults={"env": "Pendulum-v1"},
    complete=replay.complete,
    before={"policy_delay": 1},
    kept=actors.kept,
    check=validate,
    prog="python -m tfrl.ddpg",
    summary="Train DDPG on an env with continuous actions.",
)
