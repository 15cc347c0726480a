"""The settings of TD3: its section, presets and checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tfrl.cli.settings import NOT_NEGATIVE, Range, Reader
from tfrl.config import actors, ddpg, replay
from tfrl.config.continuous import OF_ENVS, SUMMARIES
from tfrl.config.ddpg import DDPG
from tfrl.config.replay import Actors, Ahead, Hardware, Learners, Replay, ReplaySettings, Run, Task, Torso


@dataclass(frozen=True)
class TD3(DDPG):
    """The hyperparameters of TD3."""

    policy_delay: int = 2
    """Gradient steps of the critics for one of the actor, and of the target networks (see --target-every)."""
    target_noise: float = 0.2
    """Standard deviation of the noise upon the target actor's actions."""
    target_noise_clip: float = 0.5
    """Bound of that noise."""


# A dataclass collects its fields from the last base to the first.
@dataclass(frozen=True)
class Config(Run, Actors, Learners, Ahead, Hardware, Torso, TD3, Replay, Task, ReplaySettings):
    """All settings of a TD3 run. One field a flag."""

    algorithm: ClassVar[str] = "td3"
    decisive: ClassVar[tuple[type, ...]] = (Task, Replay, TD3, Ahead, Torso)


RANGES: dict[str, Range] = {
    **ddpg.RANGES,
    "target_noise": NOT_NEGATIVE,
    "target_noise_clip": NOT_NEGATIVE,
}


def validate(config: Config) -> None:
    """Raise UserError for the first setting that cannot work on any machine."""
    replay.check(config, RANGES)


READER = Reader(
    Config,
    sections=(Task, Replay, TD3, Torso, Hardware, Ahead, Actors, Learners, Run),
    presets=ddpg.PRESETS,
    preset_summaries=SUMMARIES,
    default_preset=lambda task: OF_ENVS.get(task.env, "default"),
    defaults={"env": "Pendulum-v1"},
    complete=replay.complete,
    kept=actors.kept,
    check=validate,
    prog="python -m tfrl.td3",
    summary="Train TD3 on an env with continuous actions.",
)
