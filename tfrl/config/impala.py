"""The settings of IMPALA: its section, presets and checks. Nothing here imports TensorFlow or an env."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from tfrl.cli.errors import UserError
from tfrl.cli.settings import COUNT, FRACTION, MOST, NOT_NEGATIVE, POSITIVE, Range, Reader
from tfrl.config import actors, network, run
from tfrl.config.actors import Actors, Ahead, Learners
from tfrl.config.optimizer import Optimizer
from tfrl.config.ppo import check_length, check_normalization, multiples_near
from tfrl.config.run import Hardware, Network, RLSettings, Run, Task
from tfrl.envs import registry


@dataclass(frozen=True)
class IMPALA(Optimizer):
    """The hyperparameters of IMPALA."""

    num_envs: int = 64
    """Envs, all workers together; must be divisible by the number of replicas times --num-minibatches."""
    num_steps: int = 128
    """Env steps of a rollout, in each env (alias --update-freq)."""
    num_minibatches: int = 8
    """Gradient steps of a rollout: each learns from all steps of every num-minibatches-th env, so that
    V-trace looks ahead as far as the rollout goes."""
    lr: float = 2.5e-4
    """Learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate: constant, or falling to 0 over --total-steps, which a resumed run must
    then keep."""
    adam_epsilon: float = 1e-5
    gamma: float = 0.999
    """Discount of one env step."""
    vtrace_lambda: float = 0.95
    """Shortens V-trace's traces, as --gae-lambda does PPO's; the paper has 1."""
    rho_bar: float = 1.0
    """V-trace's bound on the ratio of new to old action probability."""
    c_bar: float = 1.0
    """V-trace's bound on how far a later error reaches back."""
    entropy_coef: float = 0.002
    """Weight of the entropy bonus."""
    value_coef: float = 0.25
    """Weight of the value loss, which is half the squared error."""
    max_grad_norm: float = 0.5
    """The gradient, of the mean loss of a sample, is clipped to this global norm."""
    free_deviation: bool = False
    """The deviation of continuous actions is a variable of its own, not an output of the network."""
    normalize_rewards: bool = True
    """Divide rewards by the standard deviation of the running discounted return."""
    normalize_observations: bool = False
    """Normalise vectors by their running mean and deviation, the same on all workers and saved with the
    policy."""
    normalize_random_steps: int = 0
    """Env steps by random actions before training, from which --normalize-observations takes its mean and
    deviation for good; 0: from all rollouts so far."""


@dataclass(frozen=True)
class Config(Run, Actors, Learners, Ahead, Hardware, Network, IMPALA, Task, RLSettings):
    """All settings of an IMPALA run. One field a flag."""

    algorithm: ClassVar[str] = "impala"
    decisive: ClassVar[tuple[type, ...]] = (Task, IMPALA, Ahead, Network)

    preset: str = "procgen"
    """A whole set of defaults, which --help lists; flags and files win over it. Without it, the env's own."""

    @property
    def steps_per_update(self) -> int:
        """Env steps of one update, all workers together."""
        return self.num_envs * self.num_steps

    @property
    def rows_per_step(self) -> int:
        """Samples of one gradient step, all workers together."""
        return self.steps_per_update // self.num_minibatches

    @property
    def in_parts(self) -> bool:
        """True if gradients and forward passes are computed in parts, which the cores of a CPU share."""
        return True

    @property
    def metric_titles(self) -> dict[str, str]:
        """The metrics of updates that reports draw, with their titles."""
        return {
            "train/policy_loss": "policy loss",
            "train/value_loss": "value loss (half the squared error)",
            "train/entropy": "entropy (nats)",
            "train/approx_kl": "KL from the policy that acted (nats)",
            "train/vtrace_rho": "clipped importance weights",
            "train/explained_variance": "explained variance of returns",
            "train/grad_norm": "gradient norm before clipping",
            "train/lag": "updates behind the policy that acted",
        }

    @property
    def may_change(self) -> frozenset[str]:
        """The settings that a run may change as it goes on; not its length if the rates depend on it."""
        fixed = set() if self.lr_schedule == "constant" else {"total_steps"}
        return super().may_change - fixed | actors.MAY_CHANGE

    def check_topology(self, workers: int, replicas_per_worker: int) -> None:
        """Raise UserError if the envs do not divide by replicas and minibatches, or by actors, or actors meet
        workers."""
        replicas = workers * replicas_per_worker
        slices = replicas * self.num_minibatches
        if self.num_envs % slices:
            by = f"--num-minibatches {self.num_minibatches}"
            by = f"the number of replicas, {replicas}, times {by}" if replicas > 1 else by
            near = multiples_near(self.num_envs, slices)
            raise UserError(f"--num-envs must be divisible by {by}; got {self.num_envs}; {near} would do.")
        self._check_micro_batch(self.num_envs // slices)
        actors.check_topology(self, workers)

    def _check_micro_batch(self, num_envs: int) -> None:
        """Raise UserError if a part is no whole rollouts of envs, or does not divide a minibatch's envs."""
        parts = [self.num_steps * n for n in range(1, num_envs + 1) if num_envs % n == 0]
        if self.micro_batch and self.micro_batch not in parts:
            nearest = min(parts, key=lambda rows: abs(rows - self.micro_batch))
            raise UserError(
                f"--micro-batch must be rollouts of --num-steps {self.num_steps}, of as many envs as divide "
                f"the {num_envs} of a replica's minibatch; got {self.micro_batch}; {nearest} would do."
            )


_GYMNASIUM = {
    "total_steps": 1_000_000,
    "num_envs": 16,
    "num_steps": 32,
    "num_minibatches": 1,
    "lr": 1e-3,
    "lr_schedule": "linear",
    "gamma": 0.99,
    "entropy_coef": 0.01,
    "value_coef": 0.5,
    "normalize_observations": True,
    "free_deviation": True,
    "torso": "auto",
    "share_torso": False,
    "eval_greedy": True,
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "procgen": {},
    "procgen-hard": {
        "distribution_mode": "hard",
        "num_levels": 500,
        "total_steps": 200_000_000,
        "num_envs": 256,
        "num_minibatches": 16,
    },
    "paper": {
        "num_envs": 32,
        "num_steps": 20,
        "num_minibatches": 1,
        "optimizer": "rmsprop",
        "lr": 6e-4,
        "lr_schedule": "linear",
        "adam_epsilon": 0.1 / 640**2,
        "gamma": 0.99,
        "vtrace_lambda": 1.0,
        "entropy_coef": 0.01,
        "value_coef": 0.5,
        "max_grad_norm": 40 / 640,
    },
    "gymnasium": _GYMNASIUM,
}
"""The settings that each preset changes in Config's defaults."""

_SUMMARIES = {
    "procgen": "easy levels; the defaults below",
    "procgen-hard": "hard levels",
    "paper": "Espeholt et al. 2018, table G.1: its loss is a sum over 20 x 32 samples, and ours their mean, "
    "so its epsilon and gradient norm are divided",
    "gymnasium": "for Gymnasium envs that show vectors, which take it by themselves",
}

RANGES: dict[str, Range] = {
    **actors.RANGES,
    "num_steps": COUNT,
    "num_minibatches": COUNT,
    "lr": POSITIVE,
    "gamma": FRACTION,
    "vtrace_lambda": FRACTION,
    "rho_bar": POSITIVE,
    "c_bar": POSITIVE,
    "entropy_coef": NOT_NEGATIVE,
    "value_coef": NOT_NEGATIVE,
    "max_grad_norm": POSITIVE,
    "normalize_random_steps": Range(0, MOST),
}


def default_preset(task: Task) -> str:
    """The preset of a command that names none: the Gymnasium envs', or that of games for all with images."""
    of_vectors = registry.family(task.env).preset == "gymnasium" and not network.shows_images(task)
    return "gymnasium" if of_vectors else "procgen"


def validate(config: Config) -> None:
    """Raise UserError for the first setting that cannot work on any machine."""
    run.check(config, RANGES)
    check_normalization(config)
    check_length(config)
    actors.check(config)
    config.check_topology(workers=config.learners, replicas_per_worker=max(1, config.replicas))


READER = Reader(
    Config,
    sections=(Task, IMPALA, Network, Hardware, Ahead, Actors, Learners, Run),
    presets=PRESETS,
    preset_summaries=_SUMMARIES,
    default_preset=default_preset,
    defaults={"env": "coinrun"},
    complete=lambda config: actors.complete(config, alone=1),
    kept=actors.kept,
    check=validate,
    prog="python -m tfrl.impala",
    summary="Train IMPALA on a game or a Gymnasium env. " + registry.in_words(),
    aliases={"update_freq": "num_steps", "epsilon": "adam_epsilon"},
)
