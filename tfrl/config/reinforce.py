"""The settings of REINFORCE: its sections, presets and checks. Nothing here imports TensorFlow or an env."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tfrl.cli.errors import UserError
from tfrl.cli.settings import COUNT, FRACTION, MOST, NOT_NEGATIVE, POSITIVE, Range, Reader
from tfrl.config import run
from tfrl.config.network import Torso
from tfrl.config.optimizer import Optimizer
from tfrl.config.ppo import multiples_near
from tfrl.config.run import Hardware, RLSettings, Run, Task
from tfrl.envs import registry


@dataclass(frozen=True)
class REINFORCE(Optimizer):
    """The way it is learned."""

    num_envs: int = 16
    """Envs, all observers together; an update learns from an episode of each."""
    max_steps: int = 1000
    """Env steps of an episode after which an update waits no longer; the rest of it is of the next update."""
    gamma: float = 0.99
    """Discount of one env step."""
    lr: float = 1e-2
    """Learning rate."""
    max_grad_norm: float | None = 0.5
    """The gradient, of the mean loss of a step, is clipped to this norm; None: not at all."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    dropout: float = 0.0
    """The share of features that are left out, others at every step, in acting and in learning from it."""


@dataclass(frozen=True)
class Observers:
    """The processes that step the envs. The result is the same."""

    observers: int = 2
    """Processes on Ray that step the envs, each its share of them; 0: this process steps them."""
    ray_address: str | None = None
    """The address of a Ray that runs, or auto; None: one is started for the run, and ended with it."""
    observer_timeout: float = 60.0
    """Seconds that an observer may take for an answer before it is replaced."""


@dataclass(frozen=True)
class Config(Run, Observers, Hardware, Torso, REINFORCE, Task, RLSettings):
    """All settings of a REINFORCE run. One field a flag."""

    algorithm: ClassVar[str] = "reinforce"
    decisive: ClassVar[tuple[type, ...]] = (Task, REINFORCE, Torso)
    updates_vary: ClassVar[bool] = True

    preset: str = "default"
    """A whole set of defaults, listed above; flags and files win over it."""
    solved_at: float | None = None
    """End early, as done, once the mean return of the last 100 episodes is this or more; None: the threshold
    that the env is registered with, if it has one."""

    @property
    def steps_per_update(self) -> int:
        """Env steps of one update at the most."""
        return self.num_envs * self.max_steps

    @property
    def rows_per_step(self) -> int:
        """Samples of one gradient step at the most."""
        return self.steps_per_update

    @property
    def in_parts(self) -> bool:
        """True: gradients are computed in parts, of so many rows that no topology changes them."""
        return True

    @property
    def may_change(self) -> frozenset[str]:
        """The settings that a run may change as it goes on."""
        return super().may_change | {"observers", "ray_address", "observer_timeout"}

    def check_topology(self, workers: int, replicas_per_worker: int) -> None:
        """Raise UserError for more than one learner."""
        if workers * replicas_per_worker > 1:
            raise UserError(
                "REINFORCE learns in one process, on one device: leave --replicas and TF_CONFIG out; "
                "--observers share the envs out."
            )


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": {"total_steps": 1_000_000, "torso": "auto", "hidden": "64", "eval_greedy": True},
    "tutorial": {
        "total_steps": 1_000_000,
        "num_envs": 4,
        "max_steps": 5000,
        "torso": "mlp",
        "hidden": "128",
        "activation": "relu",
        "dropout": 0.6,
        "lr": 1e-2,
        "max_grad_norm": None,
        "eval_greedy": True,
    },
}
"""The settings that each preset changes in Config's defaults."""

_SUMMARIES = {
    "default": "solves CartPole-v1",
    "tutorial": "PyTorch's RPC tutorial: one hidden layer of 128 with dropout. Three things differ: gamma is "
    "0.99 where the tutorial has 0.1; the loss is a mean where the tutorial has a sum, which Adam does not "
    "tell apart; the tutorial's returns run on from one episode into the next",
}

RANGES: dict[str, Range] = {
    "max_steps": COUNT,
    "gamma": FRACTION,
    "lr": POSITIVE,
    "max_grad_norm": POSITIVE,
    "entropy_coef": NOT_NEGATIVE,
    "dropout": Range(0, 0.99),
    "observers": Range(0, 1024),
    "observer_timeout": Range(0, 1e7, above=True),
}


def complete(config: Config) -> Config:
    """The settings with what follows from others, as for all algorithms, and the env's own threshold."""
    config = run.complete(config)
    if config.solved_at is None:
        config = dataclasses.replace(config, solved_at=registry.reward_threshold(config.env))
    return config


def validate(config: Config) -> None:
    """Raise UserError for the first setting that cannot work on any machine."""
    run.check(config, RANGES)
    if config.steps_per_update > MOST:
        raise UserError(
            f"--num-envs {config.num_envs} x --max-steps {config.max_steps} = {config.steps_per_update} is "
            f"too many env steps for one update, which has at most {MOST}."
        )
    if config.observers and config.num_envs % config.observers:
        raise UserError(
            f"--num-envs must be divisible by --observers {config.observers}; got {config.num_envs}; "
            f"{multiples_near(config.num_envs, config.observers)} would do."
        )
    if config.ray_address is not None and not config.observers:
        raise UserError("--ray-address needs --observers: without them nothing runs on Ray.")
    config.check_topology(workers=1, replicas_per_worker=max(1, config.replicas))


READER = Reader(
    Config,
    sections=(Task, REINFORCE, Torso, Hardware, Observers, Run),
    presets=PRESETS,
    preset_summaries=_SUMMARIES,
    defaults={"env": "CartPole-v1"},
    complete=complete,
    check=validate,
    prog="python -m tfrl.reinforce",
    summary="Train REINFORCE on an env, whose observers ask one agent for their actions. "
    + registry.in_words(),
)
