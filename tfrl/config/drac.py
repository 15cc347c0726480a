"""The settings of data-regularised PPO (Raileanu et al. 2021, arXiv:2006.12862)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from tfrl.cli.errors import UserError
from tfrl.cli.settings import NOT_NEGATIVE
from tfrl.config import ppo, ppo_presets
from tfrl.config.actors import Actors, Ahead, Learners
from tfrl.config.ppo import PPO
from tfrl.config.run import Hardware, Network, Run, Task
from tfrl.envs import registry
from tfrl.envs.spec import Discrete

UCB = "ucb"
AUGMENTATIONS = (
    *("crop", "random-conv", "grayscale", "flip", "rotate", "cutout", "cutout-color", "color-jitter"),
)
"""The names in `tfrl.ops.augment`, in the order of the authors' code; TensorFlow is not imported here."""
REGULARIZERS = {
    "train/policy_regularizer": "KL of augmented observations (nats)",
    "train/value_regularizer": "value loss of augmented observations",
}
"""The metrics of DrAC's losses with their titles; RAD has no such losses."""
_OF_COLORS, _OF_SQUARES = ("grayscale", "cutout-color", "color-jitter"), ("rotate",)


@dataclass(frozen=True)
class DrAC:
    """The hyperparameters that DrAC adds to PPO's."""

    augment: Literal[(*AUGMENTATIONS, UCB)] = "crop"
    """Augmentation of the observations; ucb: a bandit chooses one before every update (UCB-DrAC)."""
    augment_coef: float = 0.1
    """Weight of the losses that draw policy and value of a changed observation to those of the true one."""
    augment_use: Literal["drac", "rad"] = "drac"
    """drac: those losses; rad: PPO's losses of observations augmented after acting, to compare; as published
    (RAD, Laskin et al. 2020), the policy acts on the augmented ones that it learns from."""


# A dataclass collects its fields from the last base to the first.
@dataclass(frozen=True)
class Config(DrAC, ppo.Config):
    """All settings of a run of data-regularised PPO. One field a flag."""

    algorithm: ClassVar[str] = "drac"
    decisive: ClassVar[tuple[type, ...]] = (Task, PPO, DrAC, Ahead, Network)

    @property
    def metric_titles(self) -> dict[str, str]:
        """The metrics of updates that reports draw, with their titles."""
        return super().metric_titles | {
            name: title for name, title in REGULARIZERS.items() if self.augment_use == "drac"
        }

    @property
    def augmentations(self) -> tuple[str, ...]:
        """The names of those that are used: one, or all that suit the env's images."""
        return fitting(registry.specs(self)[0].shape) if self.augment == UCB else (self.augment,)

    @property
    def idle(self) -> dict[str, str]:
        """The names of settings that have no effect beside the others, each with why."""
        unused = {"augment_coef": "with --augment-use rad"} if self.augment_use == "rad" else {}
        return super().idle | unused

    @property
    def published_as(self) -> str:
        """The algorithm under whose name others published what these settings train."""
        return "rad" if self.augment_use == "rad" else self.algorithm


_AUTHORS = {"normalize_advantages": "batch"}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "openai-easy": _AUTHORS,
    "openai-hard": {**ppo_presets.PRESETS["openai-hard"], **_AUTHORS},
    "gymnasium": {**ppo_presets.PRESETS["gymnasium"], "normalize_observations": False},
}
"""The settings that each preset changes in Config's defaults."""
_SUMMARIES = {
    "openai-easy": "the authors' settings, which are for easy levels",
    "openai-hard": "the same with the levels and envs of PPO's openai-hard",
    "gymnasium": "PPO's for Gymnasium envs, for those of images",
}
RANGES = {**ppo.RANGES, "augment_coef": NOT_NEGATIVE}


def fitting(shape: Sequence[int]) -> tuple[str, ...]:
    """The augmentations that images [H, W, C] can be given."""
    height, width, channels = shape
    unfit = (() if channels == 3 else _OF_COLORS) + (() if height == width else _OF_SQUARES)
    return tuple(name for name in AUGMENTATIONS if name not in unfit)


def validate(config: Config) -> None:
    """Raise UserError for the first setting that cannot work on any machine."""
    ppo.validate(config, RANGES)
    observation, action = registry.specs(config)
    if len(observation.shape) != 3:
        raise UserError(f"drac changes images, and {config.env} shows vectors; ppo trains it.")
    if not isinstance(action, Discrete):
        raise UserError(
            f"drac is for discrete actions, and those of {config.env} are {action.kind}; ppo trains it."
        )
    if config.augment == UCB and config.free_running:
        raise UserError(
            "--augment ucb must know which update's weights acted a rollout, and --free-running leaves it "
            "open; leave one of them out."
        )
    suited = fitting(observation.shape)
    if config.augment not in (*suited, UCB):
        height, width, channels = observation.shape
        raise UserError(
            f"--augment {config.augment} does not suit the images of {config.env}, {height} x {width} with "
            f"{channels} channel(s); {', '.join(suited)} do."
        )


READER = dataclasses.replace(
    ppo.READER,
    kind=Config,
    sections=(Task, PPO, DrAC, Network, Hardware, Ahead, Actors, Learners, Run),
    presets=PRESETS,
    preset_summaries=_SUMMARIES,
    default_preset=ppo.family_preset,
    defaults={"env": "coinrun"},
    check=validate,
    prog="python -m tfrl.drac",
    summary="Train data-regularised PPO (DrAC), on envs that show images and have discrete actions. "
    + registry.in_words(),
)
