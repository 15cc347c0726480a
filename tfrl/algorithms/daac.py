"""DAAC and IDAAC (Raileanu and Fergus 2021, arXiv:2102.10330): PPO with a network each for policy and value.

The policy's network never learns values, because a value depends on the level, and features that tell levels
apart do not generalise to unseen levels. It learns to predict advantages instead:

    L_policy = L_PPO + alpha_a (A_theta(o, a) - A)^2 - alpha_s H(pi)            eq. 2 to 4
    L_value  = max((V - R)^2, (V_clipped - R)^2) / 2                            eq. 5, clipped as in PPO

A are the advantages, normalised over the whole rollout; A_theta is a head of the policy's network that also
takes the action. The value's network makes more passes, and may skip updates.

IDAAC (`--order-coef`) also hides the time of an observation from the policy. A classifier D takes the
policy's features f of two observations of one episode, and learns which one came first. The policy learns
features that leave it uncertain:

    L_D     = -y log D(f(o_t), f(o_u)) - (1 - y) log(1 - D(f(o_t), f(o_u)))     y = 1 if u < t
    L_order = -1/2 log D(f(o_t), f(o_u)) - 1/2 log(1 - D(f(o_t), f(o_u)))       added to L_policy, x alpha_i

Each of the three has its own optimizer. For each minibatch the classifier learns first, then the policy; the
passes of the value follow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np

from tfrl.algorithms import ppo
from tfrl.algorithms.algorithm import check_finite
from tfrl.algorithms.ppo import PPO, UPDATE, Inputs, PPOAgent, Samples, Shared
from tfrl.cli.errors import UserError
from tfrl.cli.flags import NATURAL, NOT_NEGATIVE, Range
from tfrl.config.distributed import DISTRIBUTED_SECTIONS
from tfrl.config.run import NetworkSettings, Task
from tfrl.envs import registry
from tfrl.experience.levels import LevelReplay
from tfrl.experience.rollout import Rollout
from tfrl.ops import losses
from tfrl.ops.graph import tf
from tfrl.ops.optimizers import learning_rate
from tfrl.run import rng
from tfrl.workers.data_parallel import GradientStep, Losses, Weights

if TYPE_CHECKING:
    from tfrl.networks.actor_critic import DecoupledActorCritic


@dataclass(frozen=True)
class DAAC:
    """The hyperparameters that DAAC and IDAAC add to PPO's."""

    value_epochs: Annotated[int, Range(1, 1000)] = 9
    """Passes of the value's network over a rollout; --epochs are those of the policy's network."""
    value_every: Annotated[int, Range(1, 10_000)] = 1
    """Updates between two updates of the value's network."""
    advantage_coef: Annotated[float, NOT_NEGATIVE] = 0.25
    """Weight of the squared error of the predicted advantages in the policy's loss."""
    order_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """IDAAC: weight of the loss that hides the order of observations from the policy's features. 0: DAAC,
    without a classifier; 0.001: the authors' IDAAC."""
    order_hidden: Annotated[int, NATURAL] = 4
    """Hidden units of IDAAC's classifier; 0: it is linear."""


@dataclass(frozen=True)
class Config(DAAC, ppo.Config):
    """All settings of a run of DAAC or IDAAC. One field a flag."""

    algorithm: str = "daac"
    sections: ClassVar[tuple[type, ...]] = (
        Task,
        PPO,
        DAAC,
        LevelReplay,
        NetworkSettings,
        *DISTRIBUTED_SECTIONS,
    )

    takes_own_heads: ClassVar[bool] = False  # the advantage head needs features

    @property
    def minibatch_epochs(self) -> int:
        """The passes of an update: those of the policy, then those of the value."""
        return self.epochs + self.value_epochs

    @property
    def ineffective(self) -> dict[str, str]:
        """Settings without an effect by name, each with the reason."""
        found = super().ineffective | {
            "value_coef": "here: the value's network has its own optimizer",
            "renew_advantages": "here: the values change only after the policy's passes",
        }
        return found if self.order_coef else found | {"order_hidden": "without --order-coef"}

    def make_network(self, precision: str) -> Any:
        """Makes an actor with an advantage head, a critic and, for IDAAC, the classifier."""
        from tfrl.networks.actor_critic import DecoupledActorCritic

        return DecoupledActorCritic(self, *registry.specs(self), precision)  # type: ignore[arg-type]  # it has these settings

    def check(self) -> None:
        """Raises UserError for the first setting that cannot work on any machine."""
        super().check()
        if self.share_torso:
            raise UserError(
                "daac has a network each for policy and value: leave --share-torso out, or use ppo."
            )
        if self.dropout:
            raise UserError(f"--dropout {self.dropout} is not for daac; leave it out.")
        if self.order_coef and self.memory != "none":
            raise UserError(
                f"--order-coef compares single observations, and --memory {self.memory} makes features of "
                "whole sequences; leave one of the two out."
            )


_POLICY, _VALUE, _ORDER = "policy", "value", "order"  # the gradient steps
_ORDER_METRICS = ("classifier_loss", "classifier_accuracy")


class DAACAgent(PPOAgent):
    """Train DAAC, or IDAAC (--order-coef): PPO with separate networks, for unseen levels of procgen."""

    settings = Config
    env = "coinrun"
    _config: Config
    network: DecoupledActorCritic
    means: tuple[str, ...] = ("policy_loss", "advantage_loss", "entropy", "approx_kl", "clip_fraction")

    def __init__(self, config: Config, runtime: Any) -> None:
        self._hides_order = bool(config.order_coef)
        if self._hides_order:
            self.means = (*self.means, "order_loss")
        super().__init__(config, runtime)
        if self._hides_order:
            self.metric_names += tuple(f"train/{name}" for name in _ORDER_METRICS)
        self.metric_names += ("train/value_loss", "train/value_grad_norm")

    def make_steps(self) -> dict[str, GradientStep]:
        """The gradient steps of policy, value and classifier, each with its own optimizer.

        Adam's epsilon is the paper's (and the authors'), not that of train-procgen's PPO.
        """
        config, own = self._config, self.network.value_networks
        of_policy = tuple(name for name in (*self.network.learned, "advantage") if name not in own)
        of_value = tuple(name for name in self.network.learned if name in own)
        value_rate = config.lr if config.critic_lr is None else config.critic_lr
        of_ppo = dataclasses.replace(super().make_steps()[UPDATE], optimizer=config.make_optimizer())
        policy = dataclasses.replace(of_ppo, learned=of_policy, rates=(config.lr,) * len(of_policy))
        value = dataclasses.replace(
            of_ppo,
            learned=of_value,
            rates=(value_rate,) * len(of_value),
            loss=self._value_step_loss,
            metrics=("value_loss",),
            norm="value_grad_norm",
            errors="",
        )
        order = dataclasses.replace(
            of_ppo,
            learned=("order",),
            rates=(config.lr,),
            loss=self._order_step_loss,
            metrics=_ORDER_METRICS,
            norm="",
            errors="",
        )
        return {_POLICY: policy, _VALUE: value} | ({_ORDER: order} if self._hides_order else {})

    @property
    def summary(self) -> dict[str, str]:
        """Descriptions of an update, by title."""
        config = self._config
        often = "" if config.value_every == 1 else f", every {config.value_every} updates"
        found = super().summary | {"value": f"{config.value_epochs} epochs of the same minibatches{often}"}
        if self._hides_order:
            found["order"] = f"IDAAC's classifier, x {config.order_coef}"
        return found

    # Learning

    def update(
        self, rollout: Rollout, number: int, on_step: Callable[[int], None] = lambda done: None
    ) -> dict[str, float]:
        """Takes the passes of the policy, then those of the value if they are due.

        The arguments are those of `ActorCriticAgent.update`. --target-kl ends the passes of the
        policy alone. `value_loss` is absent in updates without passes of the value.
        """
        config = self._config
        scale = learning_rate(config.lr_schedule, 1.0, number, config.num_updates)
        self.acting.forget_weights()
        samples, starts = self._samples(rollout, number), self._runtime.per_replica(self._minibatches(number))
        estimated, explained = self._first_estimates(rollout, starts)
        samples = samples._replace(advantages=estimated.advantages, targets=estimated.targets)
        inputs = Inputs(samples, estimated.moments, starts, tf.constant(scale))
        ends = config.epochs * config.steps_per_epoch, config.minibatch_epochs * config.steps_per_epoch
        # For each minibatch, IDAAC's classifier takes its step before the policy.
        kinds = (_ORDER, _POLICY) if self._hides_order else (_POLICY,)
        policy = self._take(kinds, inputs, self._nothing_taken(*kinds), ends[0], on_step)
        metrics = policy.means() | {"explained_variance": explained, "first_ratio_error": policy.first_error}
        check_finite(metrics.items(), f" (minibatch {policy.end} of the update)")
        metrics["learning_rate"] = config.lr * scale
        if number % config.value_every == 0:
            value = self._take(
                (_VALUE,), inputs, self._nothing_taken(_VALUE, begin=ends[0]), ends[1], on_step
            )
            of_value = value.means()
            check_finite(of_value.items(), f" (minibatch {value.end} of the update)")
            metrics |= of_value
        return {f"train/{name}": value for name, value in metrics.items()}

    def _extra_inputs(self, rollout: Rollout, number: int) -> tuple[np.ndarray, ...]:
        """For IDAAC, the place of each sample's pair in its replica's [T * B] samples, and y; [R, T, B]."""
        if not self._hides_order:
            return ()
        envs = self._runtime.local_envs(self._config.num_envs)
        numbers = rng.order_numbers(self._config.seed, number, envs, self._config.num_steps)
        steps, is_earlier = pairs(rollout.first, rollout.by_replica(numbers))
        each = rollout.rewards.shape[2]
        return (steps * each + np.arange(each)).astype(np.int32), is_earlier

    def _minibatch_loss(self, weights: Weights, starts: tf.Tensor, shared: Shared) -> Losses:
        """L_policy of the module's docstring, with L_order for IDAAC."""
        config, samples, functions = self._config, self._minibatch(starts, shared), self.network.functions
        features, *_ = self.network.actor_features(weights, samples.observations, samples.memory)
        parameters = self.network.policy_parameters(weights, samples.observations, features)
        policy = self.network.distribution(parameters)
        log_ratio = policy.log_prob(samples.actions) - samples.log_probs
        ratio = tf.exp(log_ratio)
        policy_loss = losses.clipped_surrogate(ratio, samples.advantages, config.clip_ratio)
        actions = self.network.distribution.encoded(samples.actions)
        predicted = functions["advantage"](weights["advantage"], tf.concat([features, actions], axis=-1))
        advantage_loss = tf.square(predicted[:, 0] - samples.advantages)
        entropy = policy.entropy()
        metrics = {
            "policy_loss": policy_loss,
            "advantage_loss": advantage_loss,
            "entropy": entropy,
            "approx_kl": losses.approx_kl(log_ratio),
            "clip_fraction": tf.cast(tf.abs(ratio - 1.0) > config.clip_ratio, tf.float32),
        }
        loss = policy_loss + config.advantage_coef * advantage_loss - config.entropy_coef * entropy
        if self._hides_order:
            log_d = self._log_order(weights, features, self._other_features(weights, samples, shared))
            metrics["order_loss"] = order_loss = -0.5 * tf.reduce_sum(log_d, axis=-1)
            loss += config.order_coef * order_loss
        return Losses(loss, metrics, tf.abs(ratio - 1.0))

    def _value_step_loss(self, weights: Weights, starts: tf.Tensor, shared: Shared) -> Losses:
        """L_value of the module's docstring."""
        samples = self._minibatch(starts, shared)
        values = self.network.critic_values(weights, samples.observations, samples.memory)
        loss = self._value_loss(values, samples.values, samples.targets)
        return Losses(loss, {"value_loss": loss})

    def _order_step_loss(self, weights: Weights, starts: tf.Tensor, shared: Shared) -> Losses:
        """L_D of the module's docstring; the features are constants here."""
        samples = self._minibatch(starts, shared)
        features, *_ = self.network.actor_features(weights, samples.observations, None)
        log_d = self._log_order(weights, features, self._other_features(weights, samples, shared))
        is_earlier = samples.extra[1]
        loss = -(is_earlier * log_d[:, 0] + (1.0 - is_earlier) * log_d[:, 1])
        right = tf.cast((log_d[:, 0] > log_d[:, 1]) == (is_earlier > 0.5), tf.float32)
        return Losses(loss, {"classifier_loss": loss, "classifier_accuracy": right})

    def _other_features(self, weights: Weights, samples: Samples, shared: Shared) -> tf.Tensor:
        """The policy's features of the observations that the samples are paired with, float32 [b, D]."""
        observations = self.gather(shared.rollout.observations, samples.extra[0])
        return self.network.actor_features(weights, observations, None)[0]

    def _log_order(self, weights: Weights, features: tf.Tensor, others: tf.Tensor) -> tf.Tensor:
        """log D and log(1 - D) of pairs of features [b, D], float32 [b, 2]."""
        logits = self.network.functions["order"](weights["order"], tf.concat([features, others], axis=-1))
        return tf.nn.log_softmax(logits)


def pairs(first: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs each step of a rollout with another step of the same episode, in the same env.

    Each of the other steps of its episode within the rollout has the same probability. The only step of an
    episode is paired with itself.

    Args:
      first: bool [R, T, B], as in `Rollout`: o_{t+1} begins a new episode.
      numbers: random numbers in [0, 1), float [R, T, B].

    Returns:
      The time step of the pair, int64 [R, T, B], and 1 where it is earlier, float32 [R, T, B].
    """
    steps = first.shape[1]
    at = np.arange(steps)[:, None]
    begins = np.concatenate([np.ones_like(first[:, :1]), first[:, :-1]], axis=1)
    begin = np.maximum.accumulate(np.where(begins, at, 0), axis=1)
    ends = first.copy()
    ends[:, -1] = True
    end = np.minimum.accumulate(np.where(ends, at, steps)[:, ::-1], axis=1)[:, ::-1]
    others = end - begin  # steps of the episode besides t
    place = begin + np.minimum(numbers * others, np.maximum(others - 1, 0)).astype(np.int64)
    found = place + ((place >= at) & (others > 0))
    return found, (found < at).astype(np.float32)
