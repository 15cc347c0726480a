"""IMPALA (Espeholt et al. 2018, arXiv:1802.01561): actors run ahead of the learner; V-trace corrects for it.

The weights that collect a rollout are some updates older than the weights that learn from it. A gradient step
takes the whole rollouts of some envs. It computes V-trace with the present weights, in the same pass as the
gradient. If it took a few time steps of all envs instead, V-trace could not look beyond these steps, and only
the value could tell whether an action was good.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

from tfrl.algorithms.actor_critic import ActorCriticAgent, Rollouts, RolloutSettings, flat, units_of_part
from tfrl.algorithms.algorithm import check_finite
from tfrl.cli.errors import UserError
from tfrl.cli.flags import COUNT, FRACTION, NOT_NEGATIVE, POSITIVE
from tfrl.config.distributed import DISTRIBUTED_SECTIONS
from tfrl.config.run import ENVS, NetworkSettings, Task
from tfrl.envs import registry
from tfrl.experience.rollout import Rollout
from tfrl.ops import losses, returns
from tfrl.ops.graph import compiled, graph, tf
from tfrl.ops.optimizers import learning_rate
from tfrl.workers.data_parallel import GradientStep, Losses, Weights
from tfrl.workers.strategy import Runtime


@dataclass(frozen=True)
class IMPALA(Rollouts):
    """The hyperparameters of IMPALA."""

    num_envs: Annotated[int, ENVS] = 64
    """Envs, all workers together; must be divisible by the number of replicas times --num-minibatches."""
    num_steps: Annotated[int, COUNT] = 128
    """Env steps of a rollout, in each env (alias --update-freq)."""
    num_minibatches: Annotated[int, COUNT] = 8
    """Gradient steps for each rollout. Each takes all steps of an equal share of the envs, because V-trace
    needs whole rollouts."""
    lr: Annotated[float, POSITIVE] = 2.5e-4
    vtrace_lambda: Annotated[float, FRACTION] = 0.95
    """Lambda of V-trace: 0 uses the critic's values, 1 uses the returns, as in the paper."""
    rho_bar: Annotated[float, POSITIVE] = 1.0
    """V-trace's bound on the ratio of new to old action probability."""
    c_bar: Annotated[float, POSITIVE] = 1.0
    """V-trace's bound on the ratios of its traces: it limits how far back an error has an effect."""
    entropy_coef: Annotated[float, NOT_NEGATIVE] = 0.002
    value_coef: Annotated[float, NOT_NEGATIVE] = 0.25


@dataclass(frozen=True)
class Config(IMPALA, RolloutSettings):
    """All settings of an IMPALA run. One field a flag."""

    algorithm: str = "impala"
    sections: ClassVar[tuple[type, ...]] = (Task, IMPALA, NetworkSettings, *DISTRIBUTED_SECTIONS)
    aliases: ClassVar[Mapping[str, str]] = {
        **RolloutSettings.aliases,
        "update_freq": "num_steps",
        "epsilon": "adam_epsilon",
    }
    default_lag: ClassVar[int] = 1

    preset: str = "procgen"

    @property
    def rows_per_step(self) -> int:
        """Samples of one gradient step, all workers together."""
        return self.steps_per_update // self.num_minibatches

    def check_topology(self, workers: int, replicas_per_worker: int) -> None:
        """Raises UserError if replicas, minibatches or actors do not divide the envs, or if a micro-batch is
        not a number of whole rollouts.
        """
        replicas = workers * replicas_per_worker
        slices = replicas * self.num_minibatches
        if self.num_envs % slices:
            by = f"--num-minibatches {self.num_minibatches}"
            made_of = f" ({workers} workers x {replicas_per_worker})" if workers > 1 else ""
            by = f"the number of replicas, {replicas}{made_of}, times {by}" if replicas > 1 else by
            raise UserError(f"--num-envs must be divisible by {by}; got {self.num_envs}.")
        envs, part = self.num_envs // slices, self.micro_batch
        if part % self.num_steps or (part and envs * self.num_steps % part):
            raise UserError(
                f"--micro-batch must be --num-steps {self.num_steps} times a divisor of the {envs} envs of a "
                f"replica's minibatch; got {part}."
            )
        super().check_topology(workers, replicas_per_worker)

    def default_preset(self) -> str:
        """The default preset of the command: procgen's for all envs with images."""
        of_vectors = registry.family(self.env).preset == "gymnasium" and not self.shows_images
        return "gymnasium" if of_vectors else "procgen"


_METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "vtrace_rho")
# Moments of the targets and of the values' errors, from which the explained variance follows.
_MOMENTS = ("target", "target_square", "error", "error_square")


class Trajectories(NamedTuple):
    """The rollouts of all envs of a replica, or of some.

    Attributes:
      log_probs: of the policy that acted, [T, B].
      memory: of a recurrent network, `started_memory` and `keeps` of the rollout; otherwise ().
    """

    observations: Any  # [T + 1, B, *shape]
    actions: Any  # [T, B, *shape]
    log_probs: Any
    rewards: Any  # [T, B], like the next three
    first: Any
    truncated: Any
    final_values: Any
    memory: tuple[Any, ...]


class ImpalaAgent(ActorCriticAgent):
    """Train IMPALA, an actor-critic that learns by V-trace from envs that run ahead."""

    settings = Config
    env = "coinrun"
    _config: Config
    metric_names = tuple(
        f"train/{name}" for name in (*_METRICS, "explained_variance", "grad_norm", "learning_rate")
    )

    def __init__(self, config: Config, runtime: Runtime) -> None:
        super().__init__(config, runtime)
        # On a GPU each step of the scan would launch kernels.
        self._vtrace = graph(returns.vtrace, jit_compile=True) if runtime.uses_gpu else returns.vtrace

    @property
    def uses_xla(self) -> bool:
        """True for small networks on GPUs."""
        return self._config.small_network and self._runtime.uses_gpu

    def make_steps(self) -> dict[str, GradientStep]:
        """One gradient step, from the whole rollouts of some envs."""
        config, runtime = self._config, self._runtime
        envs = config.num_envs // runtime.replicas // config.num_minibatches
        step = GradientStep(
            learned=self.network.learned,
            rates=(config.lr,) * len(self.network.learned),
            loss=self._loss,
            metrics=(*_METRICS, *_MOMENTS),
            optimizer=config.make_optimizer(uncorrected_epsilon=True),
            batch_size=config.rows_per_step,
            # A part has some envs of the minibatch, with all their steps.
            part_rows=units_of_part(envs, config.num_steps, runtime.micro_batch(config)),
            norm="grad_norm",
            max_norm=config.max_grad_norm,
        )
        return {"update": step}

    @property
    def gradient_steps_per_update(self) -> int:
        """One gradient step for each minibatch of envs."""
        return self._config.num_minibatches

    @property
    def summary(self) -> dict[str, str]:
        """Descriptions of an update, by title."""
        config = self._config
        envs = f"{config.num_envs} x {config.num_steps} steps an update, {config.num_minibatches} gradient "
        return {"envs": envs + f"steps of {config.rows_per_step:,}"}

    # Learning

    def update(
        self, rollout: Rollout, number: int, on_step: Callable[[int], None] = lambda done: None
    ) -> dict[str, float]:
        """Takes the gradient steps of one rollout, each from other envs; as `ActorCriticAgent.update`."""
        config = self._config
        scale = learning_rate(config.lr_schedule, 1.0, number, config.num_updates)
        self.acting.forget_weights()
        arrays = Trajectories(
            rollout.observations,
            rollout.actions,
            log_probs=rollout.extras["log_prob"],
            rewards=rollout.rewards,
            first=rollout.first,
            truncated=rollout.truncated,
            final_values=self.final_values(rollout),
            memory=() if rollout.memory is None else (rollout.started_memory, rollout.keeps),
        )
        batch = tf.nest.map_structure(self._runtime.per_replica, arrays)
        sums = dict.fromkeys((*_METRICS, *_MOMENTS, "grad_norm"), 0.0)
        for index in range(config.num_minibatches):
            of_step = self._learn(batch, tf.constant(index), tf.constant(scale))
            found = dict(zip(sums, of_step.numpy().tolist(), strict=True))
            named = (("value_loss" if name in _MOMENTS else name, x) for name, x in found.items())
            check_finite(named, f" (gradient step {index + 1} of the update)")
            sums = {name: total + found[name] for name, total in sums.items()}
            on_step(index + 1)
        metrics = {name: total / config.num_minibatches for name, total in sums.items()}
        metrics["explained_variance"] = _explained_variance(*(metrics.pop(name) for name in _MOMENTS))
        metrics["learning_rate"] = config.lr * scale
        return {f"train/{name}": value for name, value in metrics.items()}

    @compiled()
    def _learn(self, batch: Trajectories, index: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
        """One gradient step from the minibatch `index`; its metrics in order, float32 [N]."""
        metrics = self._runtime.strategy.run(self._learn_on_replica, args=(batch, index, scale))
        return self._runtime.first(metrics)

    def _learn_on_replica(self, batch: Trajectories, index: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
        """The gradient step of this replica's envs; `scale` multiplies the learning rate."""
        config = self._config
        # Every n-th env, so that a minibatch has the same global envs on any number of replicas.
        rows = config.num_envs // self._runtime.replicas // config.num_minibatches
        envs = index + config.num_minibatches * tf.range(rows)
        metrics = self.learning.steps["update"].step(envs, batch, scale).metrics
        return tf.stack([metrics[name] for name in (*_METRICS, *_MOMENTS, "grad_norm")])

    def _loss(self, weights: Weights, envs: tf.Tensor, batch: Trajectories) -> Losses:
        """The losses of all samples of the envs with indices int32 [b]."""
        config = self._config
        batch = self.gather(batch, envs, axis=1)
        rewards, discounts = returns.rewards_and_discounts(
            batch.rewards, batch.first, batch.truncated, batch.final_values, gamma=config.gamma
        )
        shape = batch.actions.shape[:2]
        memory = None
        if batch.memory:
            remembered, keeps = map(flat, batch.memory)
            memory = self.network.sequences(remembered, keeps, shape[1])
        parameters, values, *_ = self.network.outputs(weights, flat(batch.observations), memory)
        values = tf.reshape(values, (shape[0] + 1, shape[1]))
        policy = self.network.distribution(parameters[: shape[0] * shape[1]])
        log_probs = policy.log_prob(flat(batch.actions))
        log_ratios = tf.reshape(log_probs, shape) - batch.log_probs
        advantages, targets = self._vtrace(
            *(log_ratios, rewards, discounts, values[:-1], values[-1]),
            rho_bar=config.rho_bar,
            c_bar=config.c_bar,
            lam=config.vtrace_lambda,
        )
        policy_loss = losses.policy_gradient(log_probs, flat(advantages))
        value_loss = losses.value_error(flat(values[:-1]), flat(targets))
        entropy = policy.entropy()
        loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
        log_ratio, target, error = (flat(x) for x in (log_ratios, targets, targets - values[:-1]))
        metrics = {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "approx_kl": losses.approx_kl(log_ratio),
            "vtrace_rho": tf.minimum(tf.exp(log_ratio), config.rho_bar),
            "target": target,
            "target_square": tf.square(target),
            "error": error,
            "error_square": tf.square(error),
        }
        return Losses(loss, metrics)


def _explained_variance(target: float, target_square: float, error: float, error_square: float) -> float:
    """The explained variance of the targets from the means `_MOMENTS` of an update."""
    varies, unexplained = max(0.0, target_square - target**2), max(0.0, error_square - error**2)
    # For constant targets, varying values score 0 (scikit-learn's convention).
    return 1.0 - (unexplained / varies if varies > 0 else float(unexplained > 0))
