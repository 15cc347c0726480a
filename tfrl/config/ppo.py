"""The settings of a PPO run: a frozen dataclass, its presets, and which values are possible.

Nothing here imports TensorFlow or an env, so that `--help` and a bad setting are answered at once.
"""

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import resnet
from tfrl.cli import settings
from tfrl.cli.errors import UserError
from tfrl.cli.flags import nearest
from tfrl.cli.settings import (
    COUNT,
    FRACTION,
    MOST,
    NATURAL,
    NOT_NEGATIVE,
    POSITIVE,
    WIDTH,
    Range,
    Reader,
    check_folder_names,
    check_ranges,
    in_words,
)
from tfrl.envs.registry import FAMILIES, distribution_modes, env_names, family

# The sections below are the groups of --help. `Config` joins them into one flat set of fields; the text under
# a field is its help.


@dataclass(frozen=True)
class Task:
    """What is learned."""

    env: str = "coinrun"
    """A game, listed above: coinrun, procgen-coinrun-v0 and procgen:procgen-coinrun-v0 are the same."""
    preset: Literal["openai-easy", "openai-hard", "cookbook"] = "openai-easy"
    """A whole set of defaults, listed above; flags and files win over it."""
    distribution_mode: Literal["easy", "hard", "extreme", "memory", "exploration"] = "easy"
    """Procgen's difficulty; every game has easy and hard. exploration is a single level."""
    num_levels: int = 200
    """Training levels; 0: unlimited."""
    start_level: int = 0
    """The first training level; needs --num-levels."""
    total_steps: int = 25_000_000
    """Length of the run in env steps, all workers together, rounded up to whole updates; 1e6 is fine."""
    seed: int = 1
    """Decides everything random."""


@dataclass(frozen=True)
class PPO:
    """How it is learned."""

    num_envs: int = 64
    """Envs, all workers together; must be divisible by the number of replicas."""
    num_steps: int = 256
    """Env steps of a rollout, in each env (alias --update-freq); must be divisible by --num-minibatches."""
    epochs: int = 3
    """Passes over a rollout."""
    num_minibatches: int = 8
    """Gradient steps in a pass."""
    lr: float = 5e-4
    """Adam's learning rate (alias --actor-lr)."""
    critic_lr: float | None = None
    """The critic's own learning rate, with --no-share-torso; None: --lr."""
    clip_ratio: float = 0.2
    """How far from 1 the ratio of new to old action probability is rewarded."""
    clip_value: bool = True
    """Clip the change of the value as well, by the same amount."""
    gamma: float = 0.999
    """Discount of one env step."""
    gae_lambda: float = 0.95
    """Generalised advantage estimation: 0 trusts the critic, 1 the returns."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus."""
    value_coef: float = 0.5
    """Weight of the value loss, which is half the squared error."""
    max_grad_norm: float = 0.5
    """The gradient is clipped to this global norm."""
    target_kl: float | None = None
    """Ends an update's passes once the policy has moved this far (approximate KL, nats); None: never."""
    anneal_lr: bool = False
    """Lower the learning rate linearly to 0 over --total-steps, which a run then keeps."""
    adam_epsilon: float = 1e-5
    """Adam's epsilon."""
    normalize_rewards: bool = True
    """Divide rewards by the standard deviation of the running discounted return."""


@dataclass(frozen=True)
class Network:
    """The network."""

    torso: str = "impala"
    """The part from image to features; `python -m resnet` lists the names."""
    torso_width: int = 1
    """Multiplies the channels of impala and impala-pooled."""
    share_torso: bool = True
    """Policy and value are two heads on one torso; otherwise each has its own."""
    torso_weights: str | None = None
    """The folder of a finished run of `python -m resnet.train`, whose torso this one starts from."""
    freeze_torso: bool = False
    """Keep the weights of --torso-weights as they are, and train the heads alone."""


@dataclass(frozen=True)
class Hardware(settings.Hardware):
    """Where it runs. The result is the same up to rounding."""

    env_threads: int = 0
    """Threads that step this process's envs; 0: chosen by the number of cores."""


@dataclass(frozen=True)
class Run(settings.Run):
    """The run's folder."""

    run_name: str | None = None
    """None: ENV-seedSEED, coinrun-seed1 say, so that the same command goes on with the same run."""
    eval_every: int = 0
    """Updates between evaluations; 0: at the end only."""
    record_every: int = 0
    """Updates between short videos; 0: none."""
    eval_episodes: int = 128
    """Episodes of an evaluation, on training levels and as many on unseen ones; beyond 64
    rounded up to a multiple of 64."""


# A dataclass collects its fields from the last base to the first.
@dataclass(frozen=True)
class Config(Run, Hardware, Network, PPO, Task):
    """All settings of a run; the defaults are the preset openai-easy. One field a flag.

    `parse` gives checked ones with `run_name` filled in.
    """

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return Path(self.logdir) / (self.run_name or default_run_name(self.env, self.seed))

    @property
    def has_unseen_levels(self) -> bool:
        """Whether there are levels that training does not play: not where it plays all, or the only one."""
        return self.num_levels > 0 and self.distribution_mode != "exploration"

    @property
    def torso_options(self) -> dict[str, Any]:
        """What the torso is built with otherwise than PPO builds it by itself."""
        return {"width": self.torso_width} if self.torso_width != 1 else {}

    @property
    def in_parts(self) -> bool:
        """Forward passes and gradients are computed in parts, which the cores of a CPU share."""
        return True

    @property
    def batch_size(self) -> int:
        """Env steps of one update, all workers together."""
        return self.num_envs * self.num_steps

    @property
    def num_updates(self) -> int:
        """Updates until `total_steps` env steps are reached or passed."""
        return -(-self.total_steps // self.batch_size)

    @property
    def may_change(self) -> frozenset[str]:
        """What the run may go on with otherwise than it began: its length, unless that sets the rates."""
        free = {"preset", "eval_every", "eval_episodes", "record_every", "env_threads"}
        return settings.MAY_CHANGE | free | (set() if self.anneal_lr else {"total_steps"})


DECISIVE = (Task, PPO, Network)
"""The sections of Config that a result depends on."""

PRESETS: dict[str, dict[str, Any]] = {
    "openai-easy": {},
    "openai-hard": {
        "distribution_mode": "hard",
        "num_levels": 500,
        "total_steps": 200_000_000,
        "num_envs": 256,
    },
    "cookbook": {
        "num_envs": 8,
        "num_steps": 16,
        "num_minibatches": 1,
        "lr": 1e-4,
        "clip_ratio": 0.1,
        "clip_value": False,
        "gamma": 0.99,
        "normalize_rewards": False,
        "torso": "cookbook",
        "share_torso": False,
    },
}
"""What each preset changes in Config's defaults."""

_PRESET_SUMMARIES = {
    "openai-easy": "train-procgen's settings for easy levels; the defaults below",
    "openai-hard": "train-procgen's settings for hard levels, of its four workers together",
    "cookbook": "the TensorFlow 2 cookbook's recipe, there to compare with",
}
EPISODES = Range(1, 1_000_000)
"""Of an evaluation."""

_RANGES: dict[str, Range] = {
    **settings.RANGES,
    "num_levels": NATURAL,
    "start_level": NATURAL,
    "total_steps": Range(1, 1e15),
    "num_envs": Range(1, 1_000_000),
    "num_steps": COUNT,
    "epochs": Range(1, 1000),
    "num_minibatches": COUNT,
    "lr": POSITIVE,
    "critic_lr": POSITIVE,
    "clip_ratio": Range(0, 1, above=True),
    "gamma": FRACTION,
    "gae_lambda": FRACTION,
    "entropy_coef": NOT_NEGATIVE,
    "value_coef": NOT_NEGATIVE,
    "max_grad_norm": POSITIVE,
    "target_kl": POSITIVE,
    "adam_epsilon": POSITIVE,
    "torso_width": WIDTH,
    "env_threads": Range(0, 1024),
    "eval_every": NATURAL,
    "record_every": NATURAL,
    "eval_episodes": EPISODES,
}


def default_run_name(env: str, seed: int) -> str:
    """The name of a run that was given none: the same for the same command, so that it resumes."""
    return f"{env}-seed{seed}"


def hyperparameters(config: Config) -> tuple[dict[str, Any], set[str]]:
    """What a result depends on, and which of it tells this run from another of the same preset."""
    names = [field.name for section in DECISIVE for field in dataclasses.fields(section)]
    values = {name: getattr(config, name) for name in (*names, "precision")}
    plain = Config(**PRESETS[config.preset])
    return values, {"env", "seed"} | {name for name in names if values[name] != getattr(plain, name)}


def _complete(config: Config) -> Config:
    """With the game's own name, from any of the spellings that Gym has used, and the run's folder."""
    found = re.fullmatch(r"(?:procgen:)?procgen-(\w+)-v0", config.env)
    env = found[1] if found else config.env
    name = default_run_name(env, config.seed) if config.run_name is None else config.run_name
    return dataclasses.replace(config, env=env, run_name=name, logdir=settings.expand_home(config.logdir))


def validate(config: Config) -> None:
    """Raise UserError for the first setting that cannot work on any machine."""
    check_ranges(config, _RANGES)
    _check_torso(config)
    check_folder_names(config)
    check_game(config)
    _check_size(config)
    if config.start_level and not config.has_unseen_levels:
        why = "exploration is a single level" if config.num_levels else "--num-levels 0 is all levels"
        raise UserError(f"--start-level {config.start_level} would do nothing: {why}; leave it out.")
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
    if config.batch_size > MOST:
        raise UserError(
            f"--num-envs {config.num_envs} x --num-steps {config.num_steps} = {config.batch_size} is too "
            f"many env steps for one update, which has at most {MOST}."
        )
    if config.total_steps < config.batch_size:
        raise UserError(
            f"--total-steps must be at least one update, --num-envs {config.num_envs} x --num-steps "
            f"{config.num_steps} = {config.batch_size}; got {config.total_steps}."
        )
    # What fails for one worker fails for more: their shares are fractions of its own.
    check_topology(config, workers=1, replicas_per_worker=max(1, config.replicas))


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


def _check_torso(config: Config) -> None:
    torsos = [name for name in resnet.names() if len(resnet.entry(name).input_shape) == 3]  # for images
    if config.torso not in torsos:
        reason = "takes no images" if config.torso in resnet.names() else "is not a network of the zoo"
        hint = nearest(config.torso, torsos)
        raise UserError(f"--torso {config.torso} {reason}{hint}; known: {', '.join(torsos)}.")
    if config.torso_options and not resnet.entry(config.torso).has_width:
        raise UserError(
            f"--torso {config.torso} has no width to choose, so it cannot be {config.torso_width}; "
            "leave --torso-width out."
        )


def _check_size(config: Config) -> None:
    try:
        resnet.check_size(config.torso, *family(config.env).observation_shape[:2])
    except ValueError as error:
        raise UserError(f"--torso {config.torso} does not suit --env {config.env}: {error}") from None


def check_game(config: Config) -> None:
    """Raise UserError if the game, its distribution mode or the levels do not exist."""
    if config.env not in env_names():
        known = ", ".join(env_names())
        raise UserError(f"there is no game {config.env!r}{nearest(config.env, env_names())}; known: {known}.")
    modes = distribution_modes(config.env)
    if config.distribution_mode not in modes:
        raise UserError(
            f"{config.env} has no distribution mode {config.distribution_mode!r}; it has {', '.join(modes)}."
        )
    if config.start_level + config.num_levels > MOST:
        raise UserError(
            f"--start-level + --num-levels must be at most {MOST}; got {config.start_level} + "
            f"{config.num_levels}."
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


def _preset_help(name: str) -> str:
    changes = in_words(PRESETS[name])
    return f"{name} ({_PRESET_SUMMARIES[name]}){changes and f': {changes}'}."


def _family_help(name: str) -> str:
    return f"{name}: {', '.join(FAMILIES[name].names)}"


READER = Reader(
    Config,
    sections=(*DECISIVE, Hardware, Run),
    presets=PRESETS,
    complete=_complete,
    check=validate,
    prog="python -m tfrl.ppo_procgen",
    summary="\n\n".join(
        [
            f"Train PPO on a game of {'; of '.join(map(_family_help, FAMILIES))}.",
            "The presets:",
            *map(_preset_help, PRESETS),
        ]
    ),
    aliases={"update_freq": "num_steps", "actor_lr": "lr"},
)
parse, from_yaml = READER.parse, READER.from_yaml
