"""The settings of SAC: its section, presets and checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tfrl.cli.errors import UserError
from tfrl.cli.settings import POSITIVE, Range, Reader
from tfrl.config import actors, replay
from tfrl.config.continuous import OF_ENVS, SUMMARIES, TASKS
from tfrl.config.replay import Actors, Ahead, Hardware, Learners, Replay, ReplaySettings, Run, Task, Torso
from tfrl.envs import registry
from tfrl.envs.spec import Box, Discrete


@dataclass(frozen=True)
class SAC:
    """The hyperparameters of SAC."""

    alpha: float | None = None
    """The temperature, the weight of the entropy; None: learned, so that the policy has --entropy-target."""
    alpha_lr: float | None = None
    """The learned temperature's own learning rate; None: --lr."""
    entropy_target: float | None = None
    """Entropy (nats) to keep; None: -1 for each number of a continuous action, 0.98 log A for A discrete
    actions."""
    noise_correlation: float = 0.0
    """Correlation of the exploration noise of a step with that of the step before in an episode: close to 1,
    it explores further. 0: the paper's."""


# A dataclass collects its fields from the last base to the first.
@dataclass(frozen=True)
class Config(Run, Actors, Learners, Ahead, Hardware, Torso, SAC, Replay, Task, ReplaySettings):
    """All settings of a SAC run. One field a flag."""

    algorithm: ClassVar[str] = "sac"
    decisive: ClassVar[tuple[type, ...]] = (Task, Replay, SAC, Ahead, Torso)
    action_spaces: ClassVar[tuple[type, ...]] = (Box, Discrete)

    @property
    def idle(self) -> dict[str, str]:
        """The names of settings that have no effect beside the others, each with why."""
        of_learning = () if self.alpha is None else ("entropy_target", "alpha_lr")
        return super().idle | dict.fromkeys(of_learning, "with a fixed --alpha")


PRESETS: Mapping[str, Mapping[str, Any]] = {
    **TASKS,
    "cleanrl": {**TASKS["cleanrl"], "critic_lr": 1e-3, "alpha_lr": 1e-3},
}
"""The settings that each preset changes in Config's defaults."""

RANGES: dict[str, Range] = {
    "alpha": POSITIVE,
    "alpha_lr": POSITIVE,
    "entropy_target": Range(-1e6, 1e6),
    "noise_correlation": Range(0, 0.9999),
}


def validate(config: Config) -> None:
    """Raise UserError for the first setting that cannot work on any machine."""
    replay.check(config, RANGES)
    if config.noise_correlation and isinstance(registry.specs(config)[1], Discrete):
        raise UserError(
            f"--noise-correlation is for continuous actions, and {config.env} has discrete ones; "
            "leave it out."
        )


READER = Reader(
    Config,
    sections=(Task, Replay, SAC, Torso, Hardware, Ahead, Actors, Learners, Run),
    presets=PRESETS,
    preset_summaries=SUMMARIES,
    default_preset=lambda task: OF_ENVS.get(task.env, "default"),
    defaults={"env": "Pendulum-v1"},
    complete=replay.complete,
    before={"alpha_lr": None},
    kept=actors.kept,
    check=validate,
    prog="python -m tfrl.sac",
    summary="Train SAC on an env with continuous or discrete actions.",
)
