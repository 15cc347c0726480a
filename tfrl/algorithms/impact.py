"""IMPACT (Luo et al. 2020, arXiv:1912.00167): PPO's passes on the rollouts of an older policy.

Envs run ahead of the learner, as for IMPALA. Before the gradient steps of an update, the present policy pi'
(the target policy) and its values are computed for the whole rollout. V-trace corrects advantages and targets
for the policy mu that acted. PPO's clipped loss then takes several passes over minibatches of samples of all
envs, with the ratio

    pi / max(pi', mu / bound)                                                   section 3.1

So a gradient step clips the change since the beginning of the update, however old mu is. Where pi' is far
below mu, the bound keeps the ratio small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from tfrl.algorithms import ppo
from tfrl.algorithms.ppo import PPO, PPOAgent, Samples
from tfrl.cli.errors import UserError
from tfrl.cli.flags import POSITIVE, Range
from tfrl.config.distributed import DISTRIBUTED_SECTIONS
from tfrl.config.run import NetworkSettings, Task
from tfrl.experience.levels import LevelReplay
from tfrl.experience.rollout import Rollout
from tfrl.ops import returns
from tfrl.ops.graph import compiled, graph, tf
from tfrl.workers import machine
from tfrl.workers.data_parallel import Losses, Weights
from tfrl.workers.strategy import Runtime


@dataclass(frozen=True)
class IMPACT:
    """The hyperparameters that IMPACT adds to PPO's; --gae-lambda is that of V-trace."""

    rho_bar: Annotated[float, POSITIVE] = 1.0
    """V-trace's bound on the ratio of new to old action probability."""
    c_bar: Annotated[float, POSITIVE] = 1.0
    """V-trace's bound on the ratios of its traces: it limits how far back an error has an effect."""
    target_bound: Annotated[float, Range(1, 1e6)] = 2.0
    """Bound on the ratio of old to target action probability in the policy's loss."""


@dataclass(frozen=True)
class Config(IMPACT, ppo.Config):
    """All settings of an IMPACT run. One field a flag."""

    algorithm: str = "impact"
    sections: ClassVar[tuple[type, ...]] = (
        Task,
        PPO,
        IMPACT,
        LevelReplay,
        NetworkSettings,
        *DISTRIBUTED_SECTIONS,
    )
    aliases: ClassVar[Mapping[str, str]] = {**ppo.Config.aliases, "vtrace_lambda": "gae_lambda"}
    default_lag: ClassVar[int] = 1

    def check(self) -> None:
        """Raises UserError for the first setting that cannot work on any machine."""
        super().check()
        if self.dropout:
            raise UserError(f"--dropout {self.dropout} is not for impact; leave it out.")


class IMPACTAgent(PPOAgent):
    """Train IMPACT: PPO from envs that run ahead, corrected by V-trace and a clipped target policy."""

    settings = Config
    env = "coinrun"
    _config: Config
    means = (*PPOAgent.means, "vtrace_rho")

    def __init__(self, config: Config, runtime: Runtime) -> None:
        super().__init__(config, runtime)
        on_gpu, at_once = runtime.uses_gpu, runtime.parts_at_once * runtime.local_replicas
        self._output_pass = self.network.forward_pass(on_gpu=on_gpu, at_once=at_once)
        compiles = self.uses_xla or on_gpu
        self._vtrace = graph(returns.vtrace, jit_compile=True) if compiles else returns.vtrace
        self._log_ratios = np.zeros(0, np.float32)  # log pi' - log mu of the rollout, [R, T, B]

    def update(
        self, rollout: Rollout, number: int, on_step: Callable[[int], None] = lambda done: None
    ) -> dict[str, float]:
        """Does PPO's update, relative to the target policy; as `ActorCriticAgent.update`."""
        acted = rollout.extras["log_prob"]
        log_probs, values = self._target(rollout)
        self._log_ratios = log_probs - acted
        least = acted - np.float32(math.log(self._config.target_bound))
        rollout.extras |= {"log_prob": np.maximum(log_probs, least), "value": values}
        return super().update(rollout, number, on_step)

    def _target(self, rollout: Rollout) -> tuple[np.ndarray, np.ndarray]:
        """log pi'(a | o) and the values of a rollout with the present weights, float32 [R, T, B] each."""
        shape = rollout.rewards.shape
        arrays = [rollout.actions, rollout.observations[:, :-1]]
        if rollout.memory is not None:
            arrays.append(rollout.started_memory[:, :-1])
        fill = machine.filled if self._runtime.uses_gpu else np.asarray
        rows = (tf.convert_to_tensor(fill(x.reshape(-1, *x.shape[3:]))) for x in arrays)
        found = (x.numpy()[: math.prod(shape)] for x in self._target_of_rows(*rows))
        log_probs, values = (x.reshape(shape) for x in found)
        return log_probs, values

    @compiled(reduce_retracing=True)
    def _target_of_rows(self, actions: tf.Tensor, *rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        parameters, values, *_ = self._output_pass(self._acting_weights(), *rows)
        return self.network.distribution(parameters).log_prob(actions), values

    def _correction(self) -> tuple[np.ndarray, ...]:
        return (self._log_ratios,)

    def _advantages(
        self,
        rewards: tf.Tensor,
        discounts: tf.Tensor,
        values: tf.Tensor,
        last_values: tf.Tensor,
        *correction: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """V-trace by log pi' - log mu, float32 [T, B]."""
        config = self._config
        return self._vtrace(
            *(*correction, rewards, discounts, values, last_values),
            rho_bar=config.rho_bar,
            c_bar=config.c_bar,
            lam=config.gae_lambda,
        )

    def _extra_inputs(self, rollout: Rollout, number: int) -> tuple[np.ndarray, ...]:
        """V-trace's rho of each sample."""
        return (np.minimum(np.exp(self._log_ratios), np.float32(self._config.rho_bar)),)

    def _losses(
        self, weights: Weights, samples: Samples, index: tf.Tensor, outputs: Sequence[tf.Tensor] | None = None
    ) -> Losses:
        """PPO's losses; the mean of V-trace's rho is a metric."""
        found = super()._losses(weights, samples, index, outputs)
        metrics: dict[str, Any] = {**found.metrics, "vtrace_rho": samples.extra[0]}
        return found._replace(metrics=metrics)
