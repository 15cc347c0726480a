"""The settings that all algorithms with replay share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from tfrl.cli.errors import UserError
from tfrl.cli.settings import COUNT, FRACTION, POSITIVE, Range
from tfrl.config import actors, run
from tfrl.config.actors import Actors, Ahead, Learners
from tfrl.config.network import Torso
from tfrl.config.optimizer import Optimizer
from tfrl.config.run import Hardware, RLSettings, Run, Task
from tfrl.envs import registry
from tfrl.envs.spec import Box, Discrete

_PART_ROWS = 128
_ENVS_OF_ACTORS = 8
_FOR_SPACES = {Discrete: "dqn or sac", Box: "sac, td3 or ddpg"}  # other algorithms, for the advice
_MOST_AT_ONCE = 256  # gradient steps; more in a call would not be faster


@dataclass(frozen=True)
class Replay(Optimizer):
    """Experience replay: how many transitions are kept, and how much is learned from them."""

    num_envs: int | None = None
    """Envs, all workers together; must be divisible by the number of replicas. None: 8 with --actors, or as
    many as they where that does not divide by them, otherwise 1; a run that goes on keeps its own."""
    iteration_steps: int = 1000
    """Env steps, all workers together, of one row of progress.csv: what --eval-every and --checkpoint-every
    count as an update."""
    replay_size: int = 1_000_000
    """Transitions that are kept, all workers together; each env has an equal share."""
    learning_starts: int = 5000
    """Env steps by random actions before the first gradient step."""
    batch_size: int = 256
    """Transitions of a gradient step, all workers together: as many of each env."""
    updates_per_step: float = 1.0
    """Gradient steps for each env step; may be a fraction."""
    train_every: int = 1
    """Env steps between learning; what is due by then is done in one go, which is faster."""
    n_step: int = 1
    """Steps of the returns."""
    gamma: float = 0.99
    """Discount of one env step."""
    lr: float = 3e-4
    """Learning rate."""
    critic_lr: float | None = None
    """The critics' own learning rate, of algorithms with an actor; None: --lr."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate: constant, or falling to 0 over --total-steps, which a resumed run must
    then keep."""
    huber_delta: float | None = None
    """Size of a critic's error beyond which its loss grows linearly (Huber); None: half the squared error."""
    max_grad_norm: float | None = None
    """The gradient of each network is clipped to this norm; None: not at all."""
    tau: float = 0.005
    """Step of the target networks towards the learned ones, as a share of the way; 1: a copy."""
    target_every: int | None = None
    """Gradient steps between two such steps. None: every one; with DDPG and TD3, those that the actor learns
    in."""


class ReplaySettings(RLSettings):
    """The properties that the settings of every algorithm with replay have; a base without fields."""

    action_spaces: tuple[type, ...] = (Box,)
    """The action spaces that the algorithm is for."""

    @property
    def steps_per_update(self) -> int:
        """Env steps of one iteration, all workers together."""
        return self.iteration_steps

    @property
    def rows_per_step(self) -> int:
        """Samples of one gradient step, all workers together."""
        return self.batch_size

    @property
    def in_parts(self) -> bool:
        """True if gradients and forward passes are computed in parts, which the cores of a CPU share."""
        return True

    @property
    def part_rows(self) -> int:
        """Rows of a batch whose gradients are taken at once, the same on any topology.

        As many parts as there may be replicas, four at most, and more where they would be large. Sums of a
        power of two of parts are added in the same pairs on 1, 2 and 4 replicas.
        """
        if self.micro_batch:
            return self.micro_batch
        parts = math.gcd(self.num_envs, 4)
        while self.batch_size % (2 * parts) == 0 and self.batch_size // parts > _PART_ROWS:
            parts *= 2
        return self.batch_size // parts

    @property
    def most_updates(self) -> int:
        """Gradient steps that are taken in one go, at most; their batches are in memory together."""
        due = math.ceil(max(self.train_every, self.num_envs) * self.updates_per_step)
        return min(max(1, due), _MOST_AT_ONCE)

    @property
    def may_change(self) -> frozenset[str]:
        """The settings that a run may change as it goes on; not its length if its steps depend on that."""
        fixed = {"total_steps"} if self.depends_on_length else set()
        return super().may_change - fixed | actors.MAY_CHANGE

    @property
    def depends_on_length(self) -> bool:
        """True if something follows --total-steps, as a falling learning rate does."""
        return self.lr_schedule != "constant"

    def exploration(self, env_steps: int) -> tuple[np.float32, ...]:
        """Further arguments of the network's `sample` in training, after `env_steps` env steps."""
        return ()

    def updates_due(self, env_steps: int) -> int:
        """Gradient steps that are due after so many env steps, exactly: 90 x 0.7 are 63."""
        return math.floor((env_steps - self.learning_starts) * Fraction(str(self.updates_per_step)))

    @property
    def prioritized_replay(self) -> bool:
        """True if transitions are drawn by their errors."""
        return getattr(self, "prioritized", False)

    def check_topology(self, workers: int, replicas_per_worker: int) -> None:
        """Raise UserError if the envs, or a replica's share of a batch, do not divide by what there is."""
        replicas = workers * replicas_per_worker
        if self.num_envs % replicas:
            made_of = f" ({workers} workers x {replicas_per_worker})" if workers > 1 else ""
            raise UserError(
                f"--num-envs must be divisible by the number of replicas, {replicas}{made_of}; "
                f"got {self.num_envs}."
            )
        actors.check_topology(self, workers)
        share = self.batch_size // replicas
        if share % self.part_rows:
            raise UserError(
                f"--micro-batch must divide a replica's share of a batch, {share} transitions; got "
                f"{self.part_rows}."
            )


RANGES: dict[str, Range] = {
    **actors.RANGES,
    "iteration_steps": COUNT,
    "replay_size": Range(2, 1e12),
    "learning_starts": COUNT,
    "batch_size": COUNT,
    "updates_per_step": Range(0, 1000, above=True),
    "train_every": COUNT,
    "n_step": Range(1, 1000),
    "gamma": FRACTION,
    "lr": POSITIVE,
    "critic_lr": POSITIVE,
    "huber_delta": POSITIVE,
    "max_grad_norm": POSITIVE,
    "tau": Range(0, 1, above=True),
    "target_every": COUNT,
}

DEFAULTS: Mapping[str, Any] = {
    "total_steps": 100_000,
    "torso": "auto",
    "hidden": "256,256",
    "activation": "relu",
    "precision": "float32",
    "eval_episodes": 64,
    "eval_greedy": True,
}
"""The settings that all presets of these algorithms begin with."""


def complete(config: Any) -> Any:
    """The settings with what follows from others filled in, the number of envs too."""
    if config.num_envs is None:
        shared = config.actors and _ENVS_OF_ACTORS % config.actors == 0
        config = dataclasses.replace(config, num_envs=_ENVS_OF_ACTORS if shared else config.actors or 1)
    return actors.complete(config)


def check(config: Any, ranges: Mapping[str, Range]) -> None:
    """Raise UserError for the first setting that cannot work on any machine, of those that all have."""
    run.check(config, {**RANGES, **ranges})
    _check_actions(config)
    for name in ("batch_size", "iteration_steps", "replay_size"):
        value = getattr(config, name)
        if value % config.num_envs:
            near = value // config.num_envs * config.num_envs or config.num_envs
            raise UserError(
                f"--{name.replace('_', '-')} must be divisible by --num-envs {config.num_envs}; got {value}; "
                f"{near} would do."
            )
    rows = config.replay_size // config.num_envs
    if config.n_step > min(rows, config.learning_starts // config.num_envs):
        raise UserError(
            f"--n-step {config.n_step} needs as many steps of each of --num-envs {config.num_envs} in "
            f"--replay-size {config.replay_size} and in --learning-starts {config.learning_starts}."
        )
    actors.check(config)
    if config.actors and not config.lag:
        raise UserError(
            f"--actors {config.actors} need a --lag of 1 or more with {config.algorithm}, whose envs are "
            "stepped between gradient steps otherwise."
        )
    if config.batch_size > config.replay_size:
        raise UserError(
            f"--batch-size {config.batch_size} is more than there will ever be: --replay-size is "
            f"{config.replay_size}."
        )
    steps = config.num_updates * config.iteration_steps // config.train_every * config.train_every
    if config.updates_due(steps) < 1:
        raise UserError(
            f"--learning-starts {config.learning_starts}, --train-every {config.train_every} and "
            f"--updates-per-step {config.updates_per_step:g} leave no gradient step in --total-steps "
            f"{config.total_steps}."
        )
    # What fails for one worker fails for more: their shares are fractions of its own.
    config.check_topology(workers=config.learners, replicas_per_worker=max(1, config.replicas))


def _check_actions(config: Any) -> None:
    action = registry.specs(config)[1]
    if isinstance(action, config.action_spaces):
        return
    needed = " or ".join(space.kind for space in config.action_spaces)
    others = _FOR_SPACES.get(type(action), "ppo")
    raise UserError(
        f"{config.algorithm} needs {needed} actions, and {config.env} has {action.kind} ones; take {others}."
    )


__all__ = [
    "DEFAULTS",
    "Actors",
    "Ahead",
    "Hardware",
    "Learners",
    "Replay",
    "ReplaySettings",
    "Run",
    "Task",
    "Torso",
]
