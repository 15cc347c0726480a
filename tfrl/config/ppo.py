"""The settings of PPO: its section, presets and checks.

Nothing here imports TensorFlow or an env, so that `--help` and a bad setting are answered at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from tfrl.cli.errors import UserError
from tfrl.cli.settings import COUNT, FRACTION, MOST, NATURAL, NOT_NEGATIVE, POSITIVE, Range, Reader
from tfrl.config import actors, network, run
from tfrl.config.actors import Actors, Ahead, Learners
from tfrl.config.optimizer import Optimizer
from tfrl.config.ppo_presets import OF_ENVS, PRESETS, SUMMARIES
from tfrl.config.run import Hardware, Network, RLSettings, Run, Task
from tfrl.envs import registry

# The sections are the groups of --help. `Config` joins them into one flat set of fields; the text under a
# field is its help.


@dataclass(frozen=True)
class PPO(Optimizer):
    """The hyperparameters of PPO."""

    num_envs: int = 64
    """Envs, all workers together; must be divisible by the number of replicas."""
    num_steps: int = 256
    """Env steps of a rollout, in each env (alias --update-freq); must be divisible by --num-minibatches."""
    epochs: int = 3
    """Passes over a rollout."""
    num_minibatches: int = 8
    """Gradient steps in a pass."""
    minibatch_size: int = 0
    """Samples of a gradient step, in place of --num-minibatches: a multiple of --num-envs. What does not fill
    the last one is left out of the pass. 0: --num-minibatches decides."""
    lr: float = 5e-4
    """Learning rate (alias --actor-lr)."""
    critic_lr: float | None = None
    """The critic's own learning rate, which implies --no-share-torso; None: --lr."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate: constant, or falling to 0 over --total-steps, which a resumed run must
    then keep."""
    anneal_lr: bool = False
    """The same as --lr-schedule linear."""
    clip_ratio: float = 0.2
    """Distance from 1 beyond which a ratio of new to old action probability is rewarded no more."""
    clip_value: bool = True
    """Clip the change of the value as well, by the same amount; of the squared error alone."""
    value_loss: Literal["squared", "huber"] = "squared"
    """Half the squared error of the value, or Huber's, which grows linearly beyond an error of 1."""
    gamma: float = 0.999
    """Discount of one env step."""
    gae_lambda: float = 0.95
    """Generalised advantage estimation: 0 trusts the critic, 1 the returns."""
    normalize_advantages: Literal["minibatch", "batch"] = "minibatch"
    """The samples whose mean and deviation normalise the advantages."""
    renew_advantages: bool = False
    """Compute values and advantages anew before every epoch, by the weights of then."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus."""
    value_coef: float = 0.5
    """Weight of the value loss, which is half the squared error (see --clip-value and --value-loss)."""
    max_grad_norm: float = 0.5
    """The gradient is clipped to this global norm."""
    free_deviation: bool = False
    """The deviation of continuous actions is a variable of its own, not an output of the network."""
    target_kl: float | None = None
    """Approximate KL (nats) from the old policy at which the passes of an update end; None: never."""
    adam_epsilon: float = 1e-5
    normalize_rewards: bool = True
    """Divide rewards by the standard deviation of the running discounted return."""
    normalize_observations: bool = False
    """Normalise vectors by their running mean and deviation, the same on all workers and saved with the
    policy."""
    normalize_random_steps: int = 0
    """Env steps by random actions before training, from which --normalize-observations takes its mean and
    deviation for good; 0: from all rollouts so far."""


# A dataclass collects its fields from the last base to the first.
@dataclass(frozen=True)
class Config(Run, Actors, Learners, Ahead, Hardware, Network, PPO, Task, RLSettings):
    """All settings of a PPO run; the defaults are the preset openai-easy. One field a flag.

    `parse` gives checked ones with `run_name` filled in.
    """

    algorithm: ClassVar[str] = "ppo"
    decisive: ClassVar[tuple[type, ...]] = (Task, PPO, Ahead, Network)

    @property
    def steps_per_update(self) -> int:
        """Env steps of one update, all workers together."""
        return self.num_envs * self.num_steps

    @property
    def rows_per_step(self) -> int:
        """Samples of one gradient step, all workers together."""
        return self.minibatch_size or self.steps_per_update // self.num_minibatches

    @property
    def steps_per_epoch(self) -> int:
        """Gradient steps of one pass over a rollout."""
        return self.steps_per_update // self.rows_per_step

    @property
    def in_parts(self) -> bool:
        """True if gradients and forward passes are computed in parts, which the cores of a CPU share."""
        return True

    @property
    def least_parts(self) -> int:
        """Equal parts of a minibatch on CPUs; of a small network as many as replicas, up to 4."""
        return math.gcd(4, self.num_envs) if self.small_network else super().least_parts

    @property
    def metric_titles(self) -> dict[str, str]:
        """The metrics of updates that reports draw, with their titles."""
        squared = f"half the squared error{', clipped' if self.clip_value else ''}"
        error = {"squared": squared, "huber": "Huber's"}[self.value_loss]
        return {
            "train/policy_loss": "policy loss",
            "train/value_loss": f"value loss ({error})",
            "train/entropy": "entropy (nats)",
            "train/approx_kl": "approximate KL per update (nats)",
            "train/clip_fraction": "share of clipped ratios",
            "train/explained_variance": "explained variance of returns",
            "train/grad_norm": "gradient norm before clipping",
        }

    @property
    def schedule(self) -> str:
        """The learning rate's schedule, by either of its flags."""
        return "linear" if self.anneal_lr else self.lr_schedule

    @property
    def may_change(self) -> frozenset[str]:
        """The settings that a run may change as it goes on; not its length if the rates depend on it."""
        fixed = set() if self.schedule == "constant" else {"total_steps"}
        return super().may_change - fixed | actors.MAY_CHANGE

    def check_topology(self, workers: int, replicas_per_worker: int) -> None:
        """Raise UserError if the envs, or a replica's minibatch, do not divide by what there is."""
        replicas = workers * replicas_per_worker
        if self.num_envs % replicas:
            made_of = f" ({workers} workers x {replicas_per_worker})" if workers > 1 else ""
            raise UserError(
                f"--num-envs must be divisible by the number of replicas, {replicas}{made_of}; "
                f"got {self.num_envs}; {multiples_near(self.num_envs, replicas)} would do."
            )
        actors.check_topology(self, workers)
        share = self.rows_per_step // replicas
        if self.micro_batch and share % self.micro_batch:
            raise UserError(
                f"--micro-batch must divide a replica's minibatch of {share} samples; got "
                f"{self.micro_batch}; {_divisors_near(share, self.micro_batch)} would do."
            )


RANGES: dict[str, Range] = {
    **actors.RANGES,
    "num_steps": COUNT,
    "epochs": Range(1, 1000),
    "num_minibatches": COUNT,
    "minibatch_size": NATURAL,
    "lr": POSITIVE,
    "critic_lr": POSITIVE,
    "clip_ratio": Range(0, 1, above=True),
    "gamma": FRACTION,
    "gae_lambda": FRACTION,
    "entropy_coef": NOT_NEGATIVE,
    "value_coef": NOT_NEGATIVE,
    "max_grad_norm": POSITIVE,
    "target_kl": POSITIVE,
    "normalize_random_steps": NATURAL,
}


def default_preset(task: Task) -> str:
    """The preset of a command that names none: the env's own, or its family's."""
    return OF_ENVS.get(registry.own_name(task.env)) or family_preset(task)


def family_preset(task: Task) -> str:
    """The preset of the env's family, or that of games where a Gymnasium env shows images."""
    preset = registry.family(task.env).preset
    return "openai-easy" if preset == "gymnasium" and network.shows_images(task) else preset


def validate(config: Config, ranges: Mapping[str, Range] = RANGES) -> None:
    """Raise UserError for the first setting that cannot work on any machine."""
    run.check(config, ranges)
    if config.critic_lr is not None and config.share_torso:
        raise UserError(
            f"--critic-lr {config.critic_lr} needs --no-share-torso: a shared torso learns at --lr alone."
        )
    if config.anneal_lr and config.lr_schedule not in ("constant", "linear"):
        raise UserError(f"--anneal-lr is --lr-schedule linear, not {config.lr_schedule}; give one of them.")
    check_normalization(config)
    _check_sizes(config)
    actors.check(config)
    # What fails for one worker fails for more: their shares are fractions of its own.
    config.check_topology(workers=config.learners, replicas_per_worker=max(1, config.replicas))


def check_normalization(config: Any) -> None:
    """Raise UserError if observations that are no vectors are to be normalised."""
    if config.normalize_random_steps and not config.normalize_observations:
        raise UserError("--normalize-random-steps needs --normalize-observations.")
    if config.normalize_observations and network.shows_images(config):
        raise UserError(
            f"--normalize-observations is for vectors, and {config.env} shows images, which the network "
            "scales by itself; leave it out."
        )


def _check_sizes(config: Config) -> None:
    if config.minibatch_size:
        _check_minibatch_size(config)
    else:
        _check_minibatches(config)
    check_length(config)


def _check_minibatches(config: Any) -> None:
    """Raise UserError if a rollout's env steps are no whole minibatches."""
    if config.num_steps % config.num_minibatches:
        raise UserError(
            f"--num-steps must be divisible by --num-minibatches {config.num_minibatches}; "
            f"got {config.num_steps}; {multiples_near(config.num_steps, config.num_minibatches)} would do."
        )


def check_length(config: Any) -> None:
    """Raise UserError if an update has too many env steps, or the run has less than one update."""
    if config.steps_per_update > MOST:
        raise UserError(
            f"--num-envs {config.num_envs} x --num-steps {config.num_steps} = {config.steps_per_update} is "
            f"too many env steps for one update, which has at most {MOST}."
        )
    if config.total_steps < config.steps_per_update:
        raise UserError(
            f"--total-steps must be at least one update, --num-envs {config.num_envs} x --num-steps "
            f"{config.num_steps} = {config.steps_per_update}; got {config.total_steps}."
        )


def _check_minibatch_size(config: Config) -> None:
    if config.minibatch_size % config.num_envs:
        raise UserError(
            f"--minibatch-size must be a multiple of --num-envs {config.num_envs}; got "
            f"{config.minibatch_size}; {multiples_near(config.minibatch_size, config.num_envs)} would do."
        )
    if config.minibatch_size > config.steps_per_update:
        raise UserError(
            f"--minibatch-size {config.minibatch_size} is more than a rollout of --num-envs "
            f"{config.num_envs} x --num-steps {config.num_steps} = {config.steps_per_update} has."
        )


def multiples_near(value: int, divisor: int) -> str:
    """The multiples of `divisor` on both sides of `value`, in words."""
    below = value // divisor * divisor
    return f"{below} or {below + divisor}" if below else f"{divisor}"


def _divisors_near(value: int, wanted: int) -> str:
    small = [d for d in range(1, math.isqrt(value) + 1) if value % d == 0]
    divisors = sorted({*small, *(value // d for d in small)})
    below = [str(d) for d in divisors if d < wanted][-1:]
    above = [str(d) for d in divisors if d > wanted][:1]
    return " or ".join(below + above)


def complete(config: Any) -> Any:
    """The settings with what follows from others filled in, the schedule of --anneal-lr too."""
    if config.anneal_lr and config.lr_schedule == "constant":
        config = dataclasses.replace(config, lr_schedule="linear")
    return actors.complete(config)


def implied(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that go with flags, in place of the preset's. Raises UserError where two contradict."""
    found: dict[str, Any] = {}
    if "anneal_lr" in flags:
        found["lr_schedule"] = asked = "linear" if flags["anneal_lr"] else "constant"
        given = flags.get("lr_schedule", asked)
        if flags["anneal_lr"] and given != asked:
            raise UserError(f"--anneal-lr is --lr-schedule linear, not {given}; give one of them.")
    if "num_minibatches" in flags:
        found["minibatch_size"] = 0
    if flags.get("critic_lr") is not None:
        found["share_torso"] = False
    if flags.get("normalize_observations") is False:
        found["normalize_random_steps"] = 0
    return found


READER = Reader(
    Config,
    sections=(Task, PPO, Network, Hardware, Ahead, Actors, Learners, Run),
    presets=PRESETS,
    preset_summaries=SUMMARIES,
    default_preset=default_preset,
    defaults={"env": "CartPole-v1"},
    complete=complete,
    implied=implied,
    kept=actors.kept,
    check=validate,
    prog="python -m tfrl.ppo",
    summary="Train PPO on a Gymnasium env, a procgen game or a toy.",
    aliases={"update_freq": "num_steps", "actor_lr": "lr"},
)
PROCGEN_READER = dataclasses.replace(
    READER,
    defaults={"env": "coinrun"},
    prog="python -m tfrl.ppo_procgen",
    summary="Train PPO on a game. " + registry.in_words(),
)
parse, from_yaml = PROCGEN_READER.parse, PROCGEN_READER.from_yaml
