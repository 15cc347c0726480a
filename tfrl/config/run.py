"""The sections that all algorithms share: the hardware, and the run's folder with what goes into it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np

from tfrl.cli import settings
from tfrl.cli.errors import UserError
from tfrl.cli.settings import NATURAL, Range, check_folder_names, check_ranges, expand_home
from tfrl.config import network, optimizer, task
from tfrl.config.network import Network
from tfrl.config.task import Task
from tfrl.envs import registry
from tfrl.envs.spec import Box

ENVS = Range(1, 1_000_000)
EPISODES = Range(1, 1_000_000)
"""Episodes that an evaluation may have."""


@dataclass(frozen=True)
class Hardware(settings.Hardware):
    """The hardware. The result is the same on all, up to rounding."""

    env_threads: Annotated[int, Range(0, 1024)] = 0
    """Threads that step this process's envs; 0: chosen by the number of cores."""


@dataclass(frozen=True)
class Run(settings.Run):
    """The run's folder."""

    run_name: str | None = None
    """Name of the run's folder; None: ENV-seedSEED, coinrun-seed1 say, or ALGORITHM-ENV-seedSEED, so that the
    same command goes on with the same run."""
    eval_every: Annotated[int, NATURAL] = 0
    """Updates (with replay: iterations) between evaluations; 0: at the end only."""
    eval_every_steps: Annotated[int, Range(0, 1e15)] = 0
    """Env steps between evaluations, each at the end of its update; 0: --eval-every alone decides."""
    record_every: Annotated[int, NATURAL] = 0
    """Updates (with replay: iterations) between short videos; 0: none."""
    event_megabytes: Annotated[int, NATURAL] = 100
    """Size of the run's event files beyond which TensorBoard gets no more videos of evaluations and
    --record-every; spent evenly over the run; 0: no videos there."""
    eval_episodes: Annotated[int, EPISODES] = 128
    """Episodes of an evaluation, on training levels and as many on unseen ones; beyond 64
    rounded up to a multiple of 64."""
    eval_greedy: bool = False
    """Evaluate the most likely action instead of a drawn one."""


_MAY_CHANGE = settings.MAY_CHANGE | {
    *(
        "preset",
        "eval_every",
        "eval_every_steps",
        "eval_episodes",
        "eval_greedy",
        "event_megabytes",
        "record_every",
    ),
    *("env_threads", "max_episodes", "solved_at"),
}


class RLSettings:
    """The properties that the settings of every algorithm have; a base without fields.

    Attributes:
      algorithm: the name of `python -m tfrl.NAME`, which config.yaml begins with.
      decisive: the sections that a result depends on.
      updates_vary: an update has as many env steps as its episodes; `steps_per_update` is the most of them.
    """

    algorithm: ClassVar[str]
    decisive: ClassVar[tuple[type, ...]]
    updates_vary: ClassVar[bool] = False

    def learned_rewards(self, rewards: np.ndarray) -> np.ndarray:
        """The rewards that are learned from, before any normalisation: float32, of the env's, float32."""
        return rewards * np.float32(self.reward_scale) + np.float32(self.reward_shift)

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return Path(self.logdir) / (self.run_name or self.default_run_name)

    @property
    def default_run_name(self) -> str:
        """The name of a run that was given none: the same for the same command, so that it resumes."""
        name = f"{registry.file_name(self.env)}-seed{self.seed}"
        return name if self.algorithm == "ppo" else f"{self.algorithm}-{name}"

    @property
    def level_sets(self) -> tuple[str, ...]:
        """The level sets that evaluations play."""
        return task.level_sets(self)

    @property
    def has_unseen_levels(self) -> bool:
        """True if there are levels that training does not play."""
        return task.has_unseen_levels(self)

    @property
    def torso_options(self) -> dict[str, Any]:
        """The options of the torso that are not its defaults."""
        return network.torso_options(self)

    @property
    def small_network(self) -> bool:
        """True if the network is one that XLA and NumPy compute fastest: an mlp (docs/design.md)."""
        return self.torso == "mlp"

    @property
    def least_parts(self) -> int:
        """Equal parts of a minibatch, at the least, on CPUs."""
        return 4

    @property
    def metric_titles(self) -> dict[str, str]:
        """The metrics of updates that reports draw, with their titles; without any, all under their names."""
        return {}

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about what these settings come to that nobody may have meant."""
        return task.notes(self)

    @property
    def idle(self) -> dict[str, str]:
        """The names of settings that have no effect beside the others, each with why."""
        found = {} if self.torso == "mlp" else dict.fromkeys(network.DECIDE_MLP, f"with --torso {self.torso}")
        if hasattr(self, "free_deviation") and not isinstance(registry.specs(self)[1], Box):
            found["free_deviation"] = "where actions are discrete"
        return found | optimizer.idle(self)

    @property
    def published_as(self) -> str:
        """The algorithm under whose name others published what these settings train."""
        return self.algorithm

    @property
    def rollouts_held(self) -> int:
        """Rollouts that are in memory at once."""
        return 1

    @property
    def steps_per_env(self) -> int:
        """Steps of each env in one update."""
        return self.steps_per_update // self.num_envs

    @property
    def num_updates(self) -> int:
        """Updates until `total_steps` env steps are reached or passed."""
        return -(-self.total_steps // self.steps_per_update)

    @property
    def updates_alike(self) -> int:
        """Updates that together take as long as any others so many: of single ones, some may take longer."""
        return 1

    @property
    def run_steps(self) -> int:
        """Env steps after which a run is complete."""
        return self.total_steps if self.updates_vary else self.num_updates * self.steps_per_update

    def evaluates_at(self, update: int, env_steps: int, *, since: tuple[int, int]) -> bool:
        """True if an evaluation on the way is due after an update.

        Args:
          update, env_steps: updates and env steps so far.
          since: those of the update, or evaluation, before.
        """
        pairs = ((self.eval_every, since[0], update), (self.eval_every_steps, since[1], env_steps))
        return any(every and before // every < now // every for every, before, now in pairs)

    def check_resources(self) -> None:
        """Raise UserError if this machine lacks what a run keeps beside its rollouts in memory."""

    @property
    def may_change(self) -> frozenset[str]:
        """Names of the settings that a resumed run may change: its length, and those without effect, too."""
        return frozenset(_MAY_CHANGE | {"total_steps"} | self.idle.keys())


def complete(config: Any) -> Any:
    """The settings with the env's own name, the torso's, and the run's folder filled in."""
    env = task.own_name(config.env)
    config = dataclasses.replace(config, env=env, torso=network.resolved_torso(config))
    name = config.default_run_name if config.run_name is None else config.run_name
    paths = {"logdir": config.logdir, "start_from": config.start_from}
    paths |= {"torso_weights": config.torso_weights} if hasattr(config, "torso_weights") else {}
    paths = {where: None if path is None else expand_home(path) for where, path in paths.items()}
    return dataclasses.replace(config, run_name=name, **paths)


def check(config: Any) -> None:
    """Raise UserError for the first setting that cannot work, of those that all algorithms have."""
    check_ranges(config)
    check_folder_names(config)
    task.check(config)
    network.check(config)
    if config.strategy == "one-device" and config.replicas > 1:
        raise UserError(f"--strategy one-device has one replica; got --replicas {config.replicas}.")


__all__ = ["ENVS", "EPISODES", "Hardware", "Network", "RLSettings", "Run", "Task", "check", "complete"]
