"""IMPACT (Luo et al. 2020, arXiv:1912.00167): PPO's passes on the rollouts of an older policy.

Envs run ahead of the learner, as for IMPALA. Before the gradient steps of an update, the present policy pi'
(the target policy) and its values are computed for the whole rollout. V-trace corrects advantages and targets
for the policy mu that acted. PPO's clipped loss then takes one or several passes over minibatches of samples
of all envs, with the ratio

    pi / max(pi', mu / bound)                                                   section 3.1

So a gradient step clips the change since the beginning of the update, however old mu is. Where pi' is far
below mu, the bound keeps the ratio small. V-trace's ratios pi' / mu stay as they are during the update, also
with --renew-advantages.

The paper keeps a buffer of older rollouts and renews the target policy every few iterations. Here a rollout
is learned from in one update, at whose beginning the target policy is renewed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from tfrl.algorithms import ppo
from tfrl.algorithms.ppo import PPO, PPOAgent, Samples
from tfrl.cli.errors import UserError
from tfrl.cli.flags import COUNT, POSITIVE, Range
from tfrl.config.distributed import DISTRIBUTED_SECTIONS
from tfrl.config.run import NetworkSettings, Task
from tfrl.experience.levels import LevelReplay
from tfrl.experience.rollout import Rollout
from tfrl.ops import losses, returns
from tfrl.ops.graph import compiled, graph, tf
from tfrl.workers import machine
from tfrl.workers.data_parallel import Losses, Weights
from tfrl.workers.strategy import Runtime

_ROWS_A_CALL = 4096
"""Rows of one pass of the target policy: on GPUs, a pass has the activations of all its rows in memory."""
_LOG_RATIO, _RAISED = "log_ratio", "raised"
"""Extras of a rollout, float32 [R, T, B]: log pi' - log mu, and the log of max(pi', mu / bound) / pi'."""


@dataclass(frozen=True)
class IMPACT:
    """The hyperparameters that IMPACT adds to PPO's; --gae-lambda (alias --vtrace-lambda) is V-trace's."""

    rho_bar: Annotated[float, POSITIVE] = 1.0
    """V-trace's bound on the ratio of new to old action probability."""
    c_bar: Annotated[float, POSITIVE] = 1.0
    """V-trace's bound on the ratios of its traces: it limits how far back an error has an effect."""
    target_bound: Annotated[float, Range(1, 1e6)] = 2.0
    """Bound on the ratio of the action probability of the policy that acted to that of the target policy: the
    policy at the beginning of the update."""


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

    # Shorter rollouts than PPO's and one pass of small minibatches: see docs/notebook/impala.md.
    num_steps: Annotated[int, COUNT] = 64
    num_minibatches: Annotated[int, COUNT] = 16
    epochs: Annotated[int, Range(1, 1000)] = 1

    def check(self) -> None:
        """Raises UserError for the first setting that cannot work on any machine."""
        super().check()
        if self.dropout:
            raise UserError(
                f"--dropout {self.dropout} is not for impact: its target policy would need the features that "
                "were dropped when the rollout was collected. Leave it out."
            )
        if self.memory != "none":
            raise UserError(
                f"--memory {self.memory} is not for impact, whose target policy takes single steps; use "
                "impala, or ppo with --lag."
            )


class IMPACTAgent(PPOAgent):
    """Train IMPACT: PPO from envs that run ahead, with V-trace and a target policy for older rollouts."""

    settings = Config
    env = "coinrun"
    _config: Config
    means = (*PPOAgent.means, "vtrace_rho")

    def __init__(self, config: Config, runtime: Runtime) -> None:
        super().__init__(config, runtime)
        compiles = self.uses_xla or runtime.uses_gpu
        self._vtrace = graph(returns.vtrace, jit_compile=True) if compiles else returns.vtrace

    def update(
        self, rollout: Rollout, number: int, on_step: Callable[[int], None] = lambda done: None
    ) -> dict[str, float]:
        """Does PPO's update, relative to the target policy; as `ActorCriticAgent.update`."""
        acted = rollout.extras["log_prob"]
        log_probs, values = self._target(rollout)
        old = np.maximum(log_probs, acted - np.float32(math.log(self._config.target_bound)))
        extras = {**rollout.extras, "log_prob": old, "value": values}
        extras |= {_LOG_RATIO: log_probs - acted, _RAISED: old - log_probs}
        return super().update(dataclasses.replace(rollout, extras=extras), number, on_step)

    def _target(self, rollout: Rollout) -> tuple[np.ndarray, np.ndarray]:
        """log pi'(a | o) and the values of a rollout with the present weights, float32 [R, T, B] each."""
        shape = rollout.rewards.shape
        arrays = [x.reshape(-1, *x.shape[3:]) for x in (rollout.actions, rollout.observations[:, :-1])]
        fill, found = machine.filled if self._runtime.uses_gpu else np.asarray, []
        for begin in range(0, len(arrays[0]), _ROWS_A_CALL):
            rows = [x[begin : begin + _ROWS_A_CALL] for x in arrays]
            of_rows = self._target_of_rows(*(tf.convert_to_tensor(fill(x)) for x in rows))
            found.append([x.numpy()[: len(rows[0])] for x in of_rows])
        log_probs, values = (np.concatenate(parts).reshape(shape) for parts in zip(*found, strict=True))
        return log_probs, values

    @compiled(reduce_retracing=True)
    def _target_of_rows(self, actions: tf.Tensor, observations: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        parameters, values, *_ = self.acting.outputs(observations)
        return self.network.distribution(parameters).log_prob(actions), values

    def _correction(self, rollout: Rollout) -> tuple[np.ndarray, ...]:
        return (rollout.extras[_LOG_RATIO],)

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

    def _advantage_weights(self, advantages: tf.Tensor, *correction: tf.Tensor) -> tf.Tensor:
        """V-trace's rho, float32 [T, B]."""
        (log_ratios,) = correction
        return tf.exp(tf.minimum(log_ratios, math.log(self._config.rho_bar)))

    def _weighted(self, baseline: tf.Tensor, samples: Samples) -> tf.Tensor:
        """The baseline times V-trace's rho, float32 [b]."""
        return baseline * samples.extra[0]

    def _extra_inputs(self, rollout: Rollout, number: int) -> tuple[np.ndarray, ...]:
        """V-trace's rho of each sample, and the log of max(pi', mu / bound) / pi'."""
        most = np.float32(math.log(self._config.rho_bar))
        return np.exp(np.minimum(rollout.extras[_LOG_RATIO], most)), rollout.extras[_RAISED]

    def _losses(
        self, weights: Weights, samples: Samples, index: tf.Tensor, outputs: Sequence[tf.Tensor] | None = None
    ) -> Losses:
        """PPO's losses. The metric `approx_kl` is relative to the target policy, without the bound, and a
        mean over actions of the policy that acted.
        """
        outputs = outputs or self.network.outputs(weights, samples.observations, samples.memory)
        found = super()._losses(weights, samples, index, outputs)
        rho, raised = samples.extra
        log_prob = self.network.distribution(outputs[0]).log_prob(samples.actions)
        kl = losses.approx_kl(log_prob - samples.log_probs + raised)
        return found._replace(metrics={**found.metrics, "approx_kl": kl, "vtrace_rho": rho})
