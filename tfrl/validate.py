"""Are settings possible? Each mistake is one sentence with the value and what would be right."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import resnet
from tfrl.envs.games import distribution_modes, env_names
from tfrl.errors import UserError
from tfrl.flags import flag, nearest

if TYPE_CHECKING:
    from tfrl.config import Config


class FolderSettings(Protocol):
    """Settings that name a run's folder."""

    logdir: str
    run_name: str | None


class Range(NamedTuple):
    """Finite numbers from `low` to `high`; without `low` itself if it is `above`."""

    low: float
    high: float = math.inf
    above: bool = False

    def holds(self, value: float) -> bool:
        """Whether `value` is inside."""
        enough = value > self.low if self.above else value >= self.low
        return enough and value <= self.high and math.isfinite(value)

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.above else f"at least {self.low:g}"
        return low if self.high == math.inf else f"{low} and at most {self.high:.10g}"


_INT32_MAX = 2**31 - 1  # procgen's C++ options and the random keys are 32-bit
POSITIVE = Range(0, above=True)
NATURAL = Range(0)
COUNT = Range(1)
FRACTION = Range(0, 1)
UNSIGNED = Range(0, _INT32_MAX)

_RANGES: dict[str, Range] = {
    "num_levels": UNSIGNED,
    "start_level": UNSIGNED,
    "total_steps": COUNT,
    "seed": UNSIGNED,
    "num_envs": COUNT,
    "num_steps": COUNT,
    "epochs": COUNT,
    "num_minibatches": COUNT,
    "lr": POSITIVE,
    "critic_lr": POSITIVE,
    "clip_ratio": Range(0, 1, above=True),
    "gamma": FRACTION,
    "gae_lambda": FRACTION,
    "entropy_coef": NATURAL,
    "value_coef": NATURAL,
    "max_grad_norm": POSITIVE,
    "target_kl": POSITIVE,
    "adam_epsilon": POSITIVE,
    "replicas": NATURAL,
    "micro_batch": NATURAL,
    "env_threads": NATURAL,
    "cluster_timeout": POSITIVE,
    "stall_timeout": NATURAL,
    "checkpoint_every": COUNT,
    "keep_checkpoints": COUNT,
    "eval_every": NATURAL,
    "record_every": NATURAL,
    "eval_episodes": COUNT,
}


def validate(config: Config) -> None:
    """Raise UserError for the first setting that cannot work on any machine."""
    check_ranges(config, _RANGES)
    _check_names(config)
    check_game(config)
    if config.critic_lr is not None and config.share_torso:
        raise UserError(
            f"--critic-lr {config.critic_lr} needs --no-share-torso: a shared torso learns at --lr alone."
        )
    if config.freeze_torso and config.torso_weights is None:
        raise UserError("--freeze-torso needs --torso-weights: random weights would stay random.")
    if config.strategy == "one-device" and config.replicas > 1:
        raise UserError(f"--strategy one-device has one replica; got --replicas {config.replicas}.")
    if config.num_steps % config.num_minibatches:
        raise UserError(
            f"--num-steps must be divisible by --num-minibatches {config.num_minibatches}; "
            f"got {config.num_steps}; {_multiples_near(config.num_steps, config.num_minibatches)} would do."
        )
    if config.total_steps < config.batch_size:
        raise UserError(
            f"--total-steps must be at least one update, --num-envs {config.num_envs} x --num-steps "
            f"{config.num_steps} = {config.batch_size}; got {config.total_steps}."
        )
    # What fails for one worker fails for more: their shares are fractions of its own.
    check_topology(config, workers=1, replicas_per_worker=max(1, config.replicas))


def check_ranges(config: Any, ranges: Mapping[str, Range]) -> None:
    """Raise UserError for the first of the settings that is outside its range."""
    for name, allowed in ranges.items():
        value = getattr(config, name)
        if value is not None and not allowed.holds(value):
            raise UserError(f"{flag(name)} must be {allowed}; got {value}.")


def check_topology(config: Config, workers: int, replicas_per_worker: int) -> None:
    """Raise UserError if the envs, or a replica's minibatch, do not divide by what there is."""
    replicas = workers * replicas_per_worker
    if config.num_envs % replicas:
        made_of = f" ({workers} workers x {replicas_per_worker})" if workers > 1 else ""
        raise UserError(
            f"--num-envs must be divisible by the number of replicas, {replicas}{made_of}; "
            f"got {config.num_envs}; {_multiples_near(config.num_envs, replicas)} would do."
        )
    share = config.batch_size // (replicas * config.num_minibatches)
    if config.micro_batch and share % config.micro_batch:
        raise UserError(
            f"--micro-batch must divide a replica's minibatch of {share} samples; got {config.micro_batch}; "
            f"{_divisors_near(share, config.micro_batch)} would do."
        )


def _check_names(config: Config) -> None:
    torsos = [name for name in resnet.names() if len(resnet.entry(name).input_shape) == 3]  # for images
    if config.torso not in torsos:
        reason = "takes no images" if config.torso in resnet.names() else "is not a network of the zoo"
        hint = nearest(config.torso, torsos)
        raise UserError(f"--torso {config.torso} {reason}{hint}; known: {', '.join(torsos)}.")
    check_folder_names(config)


def check_folder_names(config: FolderSettings) -> None:
    """Raise UserError if --logdir and --run-name cannot name a folder."""
    if not config.logdir or "\0" in config.logdir:
        raise UserError(f"--logdir must be a folder's path; got {config.logdir!r}.")
    name = config.run_name
    if name is not None and (name in ("", ".", "..") or len(name) > 200 or {"/", "\\", "\0"} & {*name}):
        raise UserError(
            f"--run-name must be a folder's name of at most 200 characters, no slashes; got {name[:60]!r}."
        )


def check_game(config: Config) -> None:
    """Raise UserError if the game, or its distribution mode, does not exist."""
    if config.env not in env_names():
        known = ", ".join(env_names())
        raise UserError(f"there is no game {config.env!r}{nearest(config.env, env_names())}; known: {known}.")
    modes = distribution_modes(config.env)
    if config.distribution_mode not in modes:
        raise UserError(
            f"{config.env} has no distribution mode {config.distribution_mode!r}; it has {', '.join(modes)}."
        )


def _multiples_near(value: int, divisor: int) -> str:
    below = value // divisor * divisor
    return f"{below} or {below + divisor}" if below else f"{divisor}"


def _divisors_near(value: int, wanted: int) -> str:
    small = [d for d in range(1, math.isqrt(value) + 1) if value % d == 0]
    divisors = sorted({*small, *(value // d for d in small)})
    below = [str(d) for d in divisors if d < wanted][-1:]
    above = [str(d) for d in divisors if d > wanted][:1]
    return " or ".join(below + above)
