"""The common part of BC, IQL, TD3+BC and CQL: settings, and gradient steps on batches of a recorded set.

The gradient steps are those of the algorithms with replay. Only the batches come from elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np

from tfrl.algorithms.replay import ReplayAgent
from tfrl.cli.errors import UserError
from tfrl.cli.flags import COUNT, POSITIVE, Range
from tfrl.config.run import RLSettings, ScheduledLearning, Task
from tfrl.envs import facts as env_facts
from tfrl.envs import registry
from tfrl.experience import recorded

if TYPE_CHECKING:
    from typing_extensions import Self

AUTO = "auto"
_PART_ROWS = 128
_MAX_AT_ONCE = 50  # gradient steps of a call
_BYTES_AT_ONCE = 2**26  # of their batches
_LEVELS = ("distribution_mode", "num_levels", "start_level")
_OF_ENVS = ("env_kwargs", "frame_skip", "max_episode_steps", "action_masks")


@dataclass(frozen=True)
class OfflineTask(Task):
    """The recorded data, and the env of the evaluations."""

    dataset: str = ""
    """The set to learn from: the folder of an RLDS set (tfrl.collect makes them) or of a Minari set, the name
    of an installed set of tensorflow-datasets, or minari:ID of an installed Minari set. Commas separate
    several sets, which are one set then."""
    split: str = "train"
    """The split of an RLDS set."""
    env: str = AUTO
    """The env of the evaluations. auto: the env that the set names. none: train without an env, and without
    evaluations."""
    total_steps: Annotated[int, Range(1, 1e15)] = 100_000
    """Length of the run in gradient steps, rounded up to whole iterations. 1e6 and 1_000_000 are the same."""

    @property
    def level_sets(self) -> tuple[str, ...]:
        """The level sets that evaluations play; none without an env."""
        return () if self.env == env_facts.NO_ENV else super().level_sets


@dataclass(frozen=True)
class Offline(ScheduledLearning):
    """The gradient steps from recorded data."""

    iteration_steps: Annotated[int, COUNT] = 1000
    """Gradient steps of an iteration: one row of progress.csv, and the unit of --eval-every and
    --checkpoint-every. A stop waits for the end of the iteration."""
    batch_size: Annotated[int, COUNT] = 256
    """Transitions of a gradient step, all workers together."""
    held_shards: Annotated[int | None, COUNT] = None
    """Hold this many shards of the set in memory at a time, and replace one after the other in random order.
    None: the whole set if it fits, otherwise as many as fit. A resumed run keeps its number."""
    max_grad_norm: Annotated[float | None, POSITIVE] = None
    """Clip the gradient of each network to this norm; None: no clipping."""


@dataclass(frozen=True)
class OfflineValues(Offline):
    """The gradient steps from recorded data."""

    critic_lr: Annotated[float | None, POSITIVE] = None
    """Learning rate of the critics and values; None: --lr."""
    huber_delta: Annotated[float | None, POSITIVE] = None
    """A critic's loss grows linearly beyond this error (Huber); None: half the squared error."""
    tau: Annotated[float, Range(0, 1, above=True)] = 0.005
    """Update of a target network: target += tau (learned - target). 1: a copy."""
    target_every: Annotated[int | None, COUNT] = None
    """Gradient steps between updates of the target networks. None: 1; with TD3+BC, --policy-delay."""


@dataclass(frozen=True)
class OfflineSettings(Offline, OfflineTask, RLSettings):
    """The settings of every algorithm that learns from recorded data.

    Attributes:
      validation: the share of the episodes that no gradient step has.
      patience: iterations without a lower loss of validation before the run ends; 0: it does not end.
    """

    for_any_actions: ClassVar[str] = "bc"
    counts: ClassVar[str] = "gradient steps"
    validation: ClassVar[float] = 0.0  # BC has a setting
    patience: ClassVar[int] = 0  # as well
    tau: ClassVar[float] = 1.0  # algorithms with target networks have settings
    target_every: ClassVar[int | None] = None  # as well

    @property
    def steps_per_update(self) -> int:
        """Gradient steps of one iteration."""
        return self.iteration_steps

    @property
    def rows_per_step(self) -> int:
        """Samples of one gradient step, all workers together."""
        return self.batch_size

    @property
    def depends_on_length(self) -> bool:
        """True if --total-steps changes the training: if the learning rate falls."""
        return self.lr_schedule != "constant"

    @property
    def part_rows(self) -> int:
        """The number of rows of a part of a batch, the same on any topology.

        The number of parts is a power of two, and at least 4 if 4 divides the batch.
        """
        if self.micro_batch:
            return self.micro_batch
        parts = math.gcd(self.batch_size, 4)
        while self.batch_size % (2 * parts) == 0 and self.batch_size // parts > _PART_ROWS:
            parts *= 2
        return self.batch_size // parts

    @property
    def has_one_topology(self) -> bool:
        """False: any number of replicas may share a batch."""
        return False

    @property
    def max_gradient_steps_per_call(self) -> int:
        """The number of gradient steps of one call, whose batches are in memory together."""
        observation = registry.specs(self)[0]
        row = 2 * math.prod(observation.shape) * np.dtype(observation.dtype).itemsize
        most = max(1, min(_MAX_AT_ONCE, _BYTES_AT_ONCE // (row * self.batch_size)))
        return max(n for n in range(1, most + 1) if self.iteration_steps % n == 0)

    def check_topology(self, workers: int, replicas_per_worker: int) -> None:
        """Raises UserError if a batch does not divide over workers, replicas and parts."""
        replicas = workers * replicas_per_worker
        if self.batch_size % replicas:
            raise UserError(
                f"--batch-size must be divisible by the number of replicas, {replicas}; got "
                f"{self.batch_size}."
            )
        if self.micro_batch and (self.batch_size // replicas) % self.micro_batch:
            raise UserError(
                f"--micro-batch must divide a replica's share of a batch, {self.batch_size // replicas} "
                f"transitions; got {self.micro_batch}."
            )

    @classmethod
    def derive(cls, given: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
        """The env that the set names, if no env is given, and the settings of this env in the set.

        An env of another name keeps its own settings. Raises UserError, also if sets differ in a setting.
        """
        found = super().derive(given, over)
        dataset, env = given.get("dataset"), registry.own_name(over.get("env", given.get("env", AUTO)))
        if not dataset or "dataset" in over:
            return found
        if env == env_facts.NO_ENV:
            recorded.remember_spaces(dataset, given.get("split", "train"))
            return found
        try:
            of_sets = recorded.env_settings(dataset)
        except UserError:
            if env == AUTO:
                raise
            return found  # an evaluator needs no set; the others find the same error later
        known = next(iter(of_sets.values())).get("env")
        if known is None or env not in (AUTO, registry.own_name(known)):
            return found
        # Of other envs, only --level-replay chooses levels.
        names = (*_OF_ENVS, *_LEVELS) if registry.distribution_modes(known) else _OF_ENVS
        settings = recorded.in_common(of_sets, [n for n in names if n not in given and n not in over])
        mode = {**settings, **given, **over}.get("distribution_mode")
        if mode == "exploration":  # a single level
            settings = {n: value for n, value in settings.items() if n not in ("num_levels", "start_level")}
        return found | settings | ({"env": known} if env == AUTO else {})

    def complete(self) -> Self:
        """These settings with derived values filled in."""
        if self.env == env_facts.NO_ENV and self.dataset and not env_facts.is_known(env_facts.NO_ENV):
            recorded.remember_spaces(self.dataset, self.split)
        return super().complete()

    def check(self) -> None:
        """Raises UserError for the first setting that cannot work on any machine."""
        if self.env == AUTO and not self.dataset:
            raise UserError(needs_dataset(self))
        if self.env == AUTO:
            known = Path(recorded.names_in(self.dataset)[0]).exists()
            what = "names no env" if known else "is no folder here; the name of a set elsewhere names no env"
            raise UserError(
                f"--dataset {self.dataset} {what}: give --env ID for evaluations, or --env none to train "
                "without them."
            )
        if self.env == env_facts.NO_ENV and self.env_kwargs:
            raise UserError("--env-kwargs has no effect with --env none; leave it out.")
        super().check()

    @property
    def default_run_name(self) -> str:
        """The name of a run without --run-name; without an env it has the name of the set."""
        if self.env != env_facts.NO_ENV:
            return super().default_run_name
        name = registry.file_name(self.dataset.rstrip("/").rpartition("/")[2])
        return f"{self.algorithm}-{name}-seed{self.seed}"

    @property
    def ineffective(self) -> dict[str, str]:
        """The settings that have no effect in this combination, each with the reason."""
        names = ("num_envs", "max_episodes", "solved_at", "env_processes", "env_threads", "log_info")
        found = super().ineffective | dict.fromkeys((*names, "ray_address"), "on recorded data")
        if self.env == env_facts.NO_ENV:
            of_evaluations = ("eval_every", "eval_every_steps", "eval_at_start", "keep_policies")
            found |= dict.fromkeys((*of_evaluations, "record_every"), "with --env none")
        return found

    @property
    def may_change(self) -> frozenset[str]:
        """The settings that a resumed run may change; not its length if the learning rate follows it."""
        fixed = {"total_steps"} if self.depends_on_length else set()
        return (super().may_change | {"dataset"}) - fixed


def needs_dataset(config: OfflineSettings) -> str:
    """The sentence for settings without a set."""
    needs = f"{config.algorithm} needs --dataset, the folder or the name of a set"
    return f"{needs}; python -m tfrl.collect makes one."


class OfflineAgent(ReplayAgent):
    """A ReplayAgent whose batches come from a recorded set; `tfrl.training.offline` calls it."""

    env = AUTO
    compiles_parts = False
    _config: OfflineSettings  # type: ignore[assignment]  # the settings that ReplayAgent uses, by the same names

    @property
    def summary(self) -> dict[str, str]:
        """Descriptions of the learning, by title."""
        return {"learning": f"{self._config.batch_size:,} transitions a gradient step"}

    def set_observation_scaling(self, mean: np.ndarray, scale: np.ndarray) -> None:
        """Sets the constants of clip((o - mean) * scale, -10, 10), float32 [K], if the network has them."""
        if "observations" in self.network.functions:
            vector = self.network.functions["observations"].join({"mean": mean, "scale": scale})
            self.learning.assign("observations", vector)
            self.acting.forget_weights()

    def validate(self, observations: np.ndarray, actions: np.ndarray) -> dict[str, float]:
        """Metrics of transitions [n, ...] that are not learned; a low `validation/loss` is good."""
        return {}

    @property
    def validation_names(self) -> tuple[str, ...]:
        """The names of the metrics of `validate`."""
        return ()
