"""Phasic policy gradient (Cobbe et al. 2021, arXiv:2009.04416): PPO with auxiliary phases between its
updates.

A policy phase is N updates of PPO. The auxiliary phase then passes over all of their rollouts with

    L = 1/2 (V_aux - R)^2 + beta_clone KL(pi_old, pi) + 1/2 (V - R)^2

So the actor's torso learns features for values, the policy stays unchanged, and the critic gets more
training. R are the value targets of the policy phase. `tfrl.training.phasic` decides which rollouts come in
which order; this file has the gradient steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from rich import filesize

from tfrl.algorithms import ppo
from tfrl.algorithms.actor_critic import units_of_part
from tfrl.algorithms.ppo import PPO, Estimates, PPOAgent
from tfrl.cli.errors import UserError
from tfrl.cli.flags import COUNT, NOT_NEGATIVE, POSITIVE, Range
from tfrl.config.distributed import Actors, Learners
from tfrl.config.run import Hardware, NetworkSettings, RunSettings, Task
from tfrl.envs import registry
from tfrl.envs.spec import ActionSpec, Discrete
from tfrl.experience.levels import LevelReplay
from tfrl.experience.rollout import Rollout
from tfrl.ops import losses
from tfrl.ops.graph import compiled, tf
from tfrl.workers import machine
from tfrl.workers.data_parallel import GradientStep, Losses, Weights
from tfrl.workers.strategy import Runtime

if TYPE_CHECKING:
    from tfrl.networks.actor_critic import PhasicActorCritic
    from tfrl.networks.recurrent import Sequences

# Of a part of the old policy's forward pass; fixed, because a matrix product rounds by its number of rows.
_SEQUENCES_A_PART = 2


@dataclass(frozen=True)
class PPG:
    """The hyperparameters of the auxiliary phase."""

    policy_updates: Annotated[int, Range(1, 10_000)] = 32
    """Updates of a policy phase. After them, the auxiliary phase learns from all of their rollouts. RUN/phase
    has the rollouts of up to two phases: 13 GB with the defaults. When the run ends, rollouts without an
    auxiliary phase stay there."""
    aux_epochs: Annotated[int, Range(1, 1000)] = 6
    """Passes of the auxiliary phase over the rollouts of its policy phase."""
    aux_minibatches: Annotated[int, COUNT] = 16
    """Gradient steps of the auxiliary phase for each rollout in a pass; must divide --num-steps."""
    aux_lr: Annotated[float, POSITIVE] = 5e-4
    """Learning rate of the auxiliary phase, which has its own optimizer; --lr-schedule does not change it."""
    beta_clone: Annotated[float, NOT_NEGATIVE] = 1.0
    """Weight of the loss that keeps the policy unchanged in the auxiliary phase."""


@dataclass(frozen=True)
class Config(PPG, ppo.Config):
    """All settings of a run of phasic policy gradient. One field a flag.

    --share-torso gives the single-network variant of the authors' code: the gradient of the value never
    reaches the torso, which learns values only from the auxiliary head. (In the paper, the gradient of the
    value reaches the torso in the auxiliary phase.)
    """

    algorithm: str = "ppg"
    sections: ClassVar[tuple[type, ...]] = (
        Task,
        PPO,
        PPG,
        LevelReplay,
        NetworkSettings,
        Hardware,
        Learners,
        RunSettings,
    )
    action_spaces: ClassVar[tuple[type[ActionSpec], ...]] = (Discrete,)
    takes_own_heads: ClassVar[bool] = False  # the auxiliary head needs features

    @property
    def ineffective(self) -> dict[str, str]:
        """Settings without an effect by name, each with the reason."""
        return super().ineffective | {"dropout": "in the auxiliary phase"}

    @property
    def auxiliary_sequence(self) -> int:
        """The length of the sequences of a recurrent network in the auxiliary phase; 1 without memory."""
        return math.gcd(self.sequence_steps, self.num_steps // self.aux_minibatches)

    @property
    def auxiliary_rows(self) -> int:
        """Samples of a gradient step of the auxiliary phase, all workers together."""
        return self.steps_per_update // self.aux_minibatches

    @property
    def phase_bytes(self) -> int:
        """The most bytes of rollouts on disk: those of this phase, and of phases that checkpoints need."""
        observation, action = registry.specs(self)
        # Observations, targets, logits and memory of each env step.
        each = math.prod(observation.shape) * np.dtype(observation.dtype).itemsize
        each += 4 + 4 * action.encoded_size
        each += 4 * (self.remembered_size + 1) if self.memory != "none" else 0
        older = -(-self.keep_checkpoints * self.checkpoint_every // self.policy_updates)
        rollouts = (1 + min(self.keep_checkpoints, older)) * self.policy_updates
        return min(rollouts, self.num_updates) * self.steps_per_update * each

    def make_network(self, precision: str) -> Any:
        """Makes an actor and a critic, and the auxiliary value head."""
        from tfrl.networks.actor_critic import PhasicActorCritic

        return PhasicActorCritic(self, *registry.specs(self), precision)  # type: ignore[arg-type]  # it has these settings

    def check(self) -> None:
        """Raises UserError for the first setting that cannot work on any machine."""
        super().check()
        if self.is_ahead or self.actor_timeout != Actors.actor_timeout:
            raise UserError(
                "ppg collects and learns in turns, without actors or lag; leave --actors, --actor-timeout "
                "and --lag out."
            )
        if self.num_steps % self.aux_minibatches:
            raise UserError(
                f"--num-steps must be divisible by --aux-minibatches {self.aux_minibatches}; got "
                f"{self.num_steps}."
            )


AUXILIARY = ("aux_value_loss", "aux_policy_kl", "aux_critic_loss", "aux_grad_norm")
"""The metrics of an auxiliary step."""


class PPGAgent(PPOAgent):
    """Train phasic policy gradient (PPG), which is PPO and an auxiliary phase.

    With --share-torso, the gradient of values reaches the shared torso only through the auxiliary head.

    Attributes:
      targets: the value targets of the last rollout, float32 [R, T, B].
    """

    settings = Config
    env = "coinrun"
    _config: Config
    network: PhasicActorCritic

    def __init__(self, config: Config, runtime: Runtime) -> None:
        super().__init__(config, runtime)
        self.metric_names += tuple(f"train/{name}" for name in AUXILIARY)
        self._policy_pass = self.network.output_pass(
            0, on_gpu=runtime.uses_gpu, at_once=runtime.parts_at_once
        )
        self.targets = np.empty(0, np.float32)

    def make_steps(self) -> dict[str, GradientStep]:
        """PPO's gradient step, and that of the auxiliary phase, which has its own optimizer."""
        config, learned = self._config, (*self.network.learned, "auxiliary")
        auxiliary = GradientStep(
            learned=learned,
            rates=(config.aux_lr,) * len(learned),
            loss=self._auxiliary_loss,
            metrics=AUXILIARY[:3],
            optimizer=config.make_optimizer(uncorrected_epsilon=True),
            batch_size=config.auxiliary_rows,
            part_rows=self._auxiliary_part_rows(),
            norm="aux_grad_norm",
            max_norm=config.max_grad_norm,
            prefix="auxiliary_phase/",
        )
        return super().make_steps() | {"auxiliary": auxiliary}

    def _auxiliary_part_rows(self) -> int:
        """The number of samples of a part: whole sequences for a recurrent network."""
        config, rows = self._config, self._config.auxiliary_rows
        most, length = self._runtime.micro_batch(config, rows), config.auxiliary_sequence
        return length * units_of_part(rows // self._runtime.replicas // length, length, most)

    @property
    def summary(self) -> dict[str, str]:
        """Descriptions of a phase, by title."""
        config, each = self._config, self._config.policy_updates
        phases = f"one every {each} updates"
        if not config.is_endless:
            phases = f"{config.num_updates // each} in all, {phases}"
        passes = f"{config.aux_epochs} epochs of minibatches of {config.auxiliary_rows:,}"
        disk = f"up to {filesize.decimal(config.phase_bytes)} of rollouts in {config.run_dir / 'phase'}"
        return super().summary | {"auxiliary phase": f"{phases}: {passes}", "disk and its cache": disk}

    def _estimates(self, rollout: Rollout, values: np.ndarray, starts: Any) -> Estimates:
        estimated = super()._estimates(rollout, values, starts)
        self.targets = np.stack([x.numpy() for x in self._runtime.local_results(estimated.targets)])
        return estimated

    # The auxiliary phase

    def logits(self, observations: np.ndarray, *memory: np.ndarray) -> np.ndarray:
        """The policy's logits with the present weights, float32 [R, b, A], for observations [R, b, *shape].

        A recurrent network takes sequences, and its memory [R, b, M + 1], like `auxiliary_step`.
        """
        results = self._logits(*map(self._runtime.per_replica, (observations, *memory)))
        return np.stack([x.numpy() for x in self._runtime.local_results(results)])

    @compiled(reduce_retracing=True)
    def _logits(self, *rows: Any) -> Any:
        return self._runtime.strategy.run(self._logits_on_replica, args=rows)

    def _logits_on_replica(self, observations: tf.Tensor, *memory: tf.Tensor) -> tf.Tensor:
        weights = self.learning.weights(self.network.acting)
        if not memory:
            return self._policy_pass(weights, observations)
        length, size = self._config.auxiliary_sequence, self.network.distribution.parameters_size

        def of_sequences(part: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            rows, remembered = (_by_time(x) for x in part)
            logits, *_ = self.network.outputs(weights, rows, self._sequences_of(remembered))
            return [tf.transpose(tf.reshape(logits, (length, -1, size)), (1, 0, 2))]

        rows = [tf.reshape(x, (-1, length, *x.shape[1:])) for x in (observations, *memory)]
        at_once, signature = self._runtime.parts_at_once, [tf.TensorSpec([length, size])]
        (logits,) = machine.map_rows(of_sequences, rows, signature, at_once, size=_SEQUENCES_A_PART)
        return tf.reshape(logits, (-1, size))

    def _sequences_of(self, remembered: tf.Tensor) -> Sequences:
        """`Sequences` from memory and `keeps`, float32 [S * n, M + 1]; the first steps of all sequences are
        first.
        """
        count = remembered.shape[0] // self._config.auxiliary_sequence
        return self.network.sequences(remembered[:, :-1], remembered[:, -1], count)

    def auxiliary_step(
        self, observations: np.ndarray, targets: np.ndarray, old_logits: np.ndarray, *memory: np.ndarray
    ) -> dict[str, float]:
        """One gradient step of the auxiliary phase, a collective.

        Args:
          observations: [R, b, *shape] in the order of the global envs.
          targets: R of the equation, float32 [R, b].
          old_logits: the policy's logits at the start of the phase, float32 [R, b, A].
          memory: only for a recurrent network: its memory before each step, then `Rollout.keeps`, float32 [R,
            b, M + 1]. The samples are sequences of `auxiliary_sequence` steps, one after another.

        Returns:
          The metrics of `AUXILIARY`, equal on every worker; they may be NaN.
        """
        self.acting.forget_weights()
        batch = (self._runtime.per_replica(x) for x in (observations, targets, old_logits, *memory))
        metrics = self._auxiliary_steps(*batch)
        return {name: float(self._runtime.first(metrics[name])) for name in AUXILIARY}

    @compiled(reduce_retracing=True)
    def _auxiliary_steps(self, *batch: Any) -> Any:
        return self._runtime.strategy.run(self._auxiliary_step_on_replica, args=batch)

    def _auxiliary_step_on_replica(self, *batch: tf.Tensor) -> dict[str, tf.Tensor]:
        return self.learning.steps["auxiliary"].step(batch, (), tf.constant(1.0)).metrics

    def _auxiliary_loss(self, weights: Weights, rows: tuple[tf.Tensor, ...], _shared: Any) -> Losses:
        """L of the module's docstring for some rows."""
        memory = []
        if self.network.state_size:
            length = self._config.auxiliary_sequence
            *samples, remembered = (_by_time(tf.reshape(x, (-1, length, *x.shape[1:]))) for x in rows)
            memory, rows = [self._sequences_of(remembered)], tuple(samples)
        observations, targets, old_logits = rows
        logits, values, auxiliary, *_ = self.network.with_auxiliary(weights, observations, *memory)
        of_auxiliary, of_critic = (losses.value_error(v, targets) for v in (auxiliary, values))
        kl = losses.categorical_kl(old_logits, logits)
        loss = of_auxiliary + self._config.beta_clone * kl + of_critic
        metrics = {"aux_value_loss": of_auxiliary, "aux_policy_kl": kl, "aux_critic_loss": of_critic}
        return Losses(loss, metrics)


def _by_time(x: tf.Tensor) -> tf.Tensor:
    """Reshapes [n, S, ...] to [S * n, ...]; the first steps of all sequences are first."""
    x = tf.transpose(x, (1, 0, *range(2, x.shape.rank)))
    return tf.reshape(x, (-1, *x.shape[2:]))
