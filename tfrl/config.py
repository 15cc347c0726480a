"""The settings of a PPO run: a frozen dataclass, its presets, its YAML file and its command line.

Nothing here imports TensorFlow or an env, so that `--help` and a bad setting are answered at once.
"""

import dataclasses
import re
import sys
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml

from tfrl.flags import read_flags, read_yaml
from tfrl.validate import validate

# The sections below are the groups of --help. `Config` joins them into one flat set of fields; the text under
# a field is its help.


@dataclass(frozen=True)
class Task:
    """What is learned."""

    env: str = "coinrun"
    """A procgen game (coinrun, procgen-coinrun-v0 or procgen:procgen-coinrun-v0), or the toy catch."""
    preset: Literal["openai-easy", "openai-hard", "cookbook"] = "openai-easy"
    """A whole set of defaults, listed above; flags and files win over it."""
    distribution_mode: Literal["easy", "hard", "extreme", "memory", "exploration"] = "easy"
    """Procgen's difficulty; every game has easy and hard."""
    num_levels: int = 200
    """Training levels; 0: unlimited."""
    start_level: int = 0
    """The first training level."""
    total_steps: int = 25_000_000
    """Length of the run in env steps, all workers together; 1e6 is fine."""
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
    """Lower the learning rate linearly to 0 over --total-steps."""
    adam_epsilon: float = 1e-5
    """Adam's epsilon."""
    normalize_rewards: bool = True
    """Divide rewards by the standard deviation of the running discounted return."""


@dataclass(frozen=True)
class Network:
    """The network."""

    torso: str = "impala"
    """The part from image to features; `python -m resnet` lists the names."""
    share_torso: bool = True
    """Policy and value are two heads on one torso; otherwise each has its own."""
    torso_weights: str | None = None
    """The folder of a finished run of `python -m resnet.train`, whose torso this one starts from."""
    freeze_torso: bool = False
    """Keep the weights of --torso-weights as they are, and train the heads alone."""


@dataclass(frozen=True)
class Hardware:
    """Where it runs. The result is the same up to rounding."""

    strategy: Literal["auto", "one-device", "mirrored", "multi-worker"] = "auto"
    """auto: multi-worker where TF_CONFIG is set, mirrored on several GPUs or --replicas, else one-device."""
    replicas: int = 0
    """Replicas in this process; on a CPU, as many logical devices are made. 0: one, or one for each GPU."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the torso; all else is float32. auto: bfloat16 where the hardware computes in it."""
    micro_batch: int = 0
    """Sum gradients over parts of this many samples: less memory, the same step. 0: chosen for speed."""
    env_threads: int = 0
    """Threads that step this process's envs; 0: chosen by the number of cores."""
    communication: Literal["auto", "ring", "nccl"] = "auto"
    """How workers sum gradients."""
    cluster_timeout: float = 120.0
    """Seconds to wait for all workers to appear before giving up."""
    stall_timeout: float = 0.0
    """Seconds without an answer from a worker before giving up; 0: many times the measured update time."""


@dataclass(frozen=True)
class Run:
    """The run's folder."""

    logdir: str = "logs"
    """The run's folder is LOGDIR/RUN_NAME."""
    run_name: str | None = None
    """None: ENV-seedSEED, coinrun-seed1 say, so that the same command goes on with the same run."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: go on from its checkpoint, if any; never: refuse an existing run; must: refuse a new one."""
    checkpoint_every: int = 10
    """Updates between checkpoints."""
    keep_checkpoints: int = 3
    """Checkpoints that are kept."""
    eval_every: int = 0
    """Updates between evaluations; 0: at the end only."""
    record_every: int = 0
    """Updates between short videos; 0: none."""
    eval_episodes: int = 128
    """Episodes of an evaluation, on training levels and as many on unseen ones."""


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
    def batch_size(self) -> int:
        """Env steps of one update, all workers together."""
        return self.num_envs * self.num_steps

    @property
    def num_updates(self) -> int:
        """Updates until `total_steps` env steps are reached or passed."""
        return -(-self.total_steps // self.batch_size)


@dataclass(frozen=True)
class Command:
    """This command."""

    config: str | None = None
    """A YAML file of settings, such as a run's config.yaml; flags win over it."""
    print_config: bool = False
    """Print the settings that result, as YAML, and end."""


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
        "critic_lr": 1e-4,
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
_ALIASES = {"update_freq": "num_steps", "actor_lr": "lr"}
_SECTIONS = (Task, PPO, Network, Hardware, Run, Command)
_CONFIG_KINDS = typing.get_type_hints(Config)
_COMMAND_KINDS = _CONFIG_KINDS | typing.get_type_hints(Command)


def default_run_name(env: str, seed: int) -> str:
    """The name of a run that was given none: the same for the same command, so that it resumes."""
    return f"{env}-seed{seed}"


def parse(argv: Sequence[str], prog: str = "python -m tfrl.ppo_procgen") -> Config:
    """The settings of a command line: the preset's, over them the --config file's, over them the flags'.

    Answers --help, --print-config and tyro's shell completion by SystemExit(0). Raises UserError for anything
    that cannot be meant.
    """
    if any(token in ("-h", "--help") or token.startswith("--tyro-") for token in argv):
        _help(argv, prog)
    flags = read_flags(_COMMAND_KINDS, _ALIASES, argv)
    path, print_config = flags.pop("config", None), flags.pop("print_config", False)
    config = _resolve((_read_file(path) if path else {}) | flags)
    validate(config)
    if print_config:
        sys.stdout.write(to_yaml(config))
        raise SystemExit(0)
    return config


def to_yaml(config: Config) -> str:
    """The settings as a YAML file that `from_yaml` and --config take back exactly."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def from_yaml(path: str | Path) -> Config:
    """The settings of a YAML file; those it leaves out are its preset's. Raises UserError."""
    return _resolve(read_yaml(_CONFIG_KINDS, _ALIASES, path))


def _read_file(path: str) -> dict[str, Any]:
    """The file's settings, without a run name that follows from its env and seed, which flags may change."""
    values = read_yaml(_CONFIG_KINDS, _ALIASES, path)
    if _resolve(values).run_name == _resolve({**values, "run_name": None}).run_name:
        values.pop("run_name", None)
    return values


def _resolve(values: dict[str, Any]) -> Config:
    preset = values.get("preset", Config.preset)
    config = Config(**{**PRESETS[preset], **values})
    env = _game(config.env)
    return dataclasses.replace(
        config, env=env, run_name=config.run_name or default_run_name(env, config.seed)
    )


def _game(spelled: str) -> str:
    """The game's own name from any of the spellings that Gym has used."""
    found = re.fullmatch(r"(?:procgen:)?procgen-(\w+)-v0", spelled)
    return found[1] if found else spelled


def _help(argv: Sequence[str], prog: str) -> NoReturn:
    """Print the help, or the completion script, and end."""
    import tyro

    presets = "\n\n".join(f"{name} ({_PRESET_SUMMARIES[name]}){_changes(name)}." for name in PRESETS)
    fields = [
        (section.__name__, tyro.conf.OmitArgPrefixes[section], dataclasses.field(default_factory=section))
        for section in _SECTIONS
    ]
    flags = dataclasses.make_dataclass("Flags", fields)
    tyro.cli(
        flags, prog=prog, description=f"Train PPO on procgen. The presets:\n\n{presets}", args=list(argv)
    )
    raise SystemExit(0)


def _changes(preset: str) -> str:
    """What the preset changes, written as flags' names and values."""
    changes = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in PRESETS[preset].items())
    return changes and f": {changes}"
