"""Behaviour cloning: the policy that makes the recorded actions most likely (Pomerleau 1991).

The network is PPO's, so `tfrl.ppo --start-from` goes on with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np

from tfrl.algorithms.actor_critic import RolloutSettings
from tfrl.algorithms.offline import Offline, OfflineAgent, OfflineSettings, OfflineTask
from tfrl.algorithms.replay import Rows
from tfrl.cli.errors import UserError
from tfrl.cli.flags import NATURAL, NOT_NEGATIVE, Range
from tfrl.config.run import Hardware, NetworkSettings, RunSettings
from tfrl.envs import registry
from tfrl.envs.spec import Box
from tfrl.ops.graph import compiled, tf
from tfrl.workers.data_parallel import GradientStep, Losses, Weights

if TYPE_CHECKING:
    from tfrl.networks.actor_critic import ActorCritic


@dataclass(frozen=True)
class BC:
    """The hyperparameters of behaviour cloning."""

    validation: Annotated[float, Range(0, 0.5)] = 0.1
    """Share of the episodes for validation; no gradient step has them. 0: none."""
    patience: Annotated[int, NATURAL] = 0
    """End the run after this many iterations without a lower loss of the validation episodes; 0: never."""
    entropy_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of an entropy bonus, which keeps the policy from being too certain."""
    free_deviation: bool = False
    """The standard deviation of continuous actions does not depend on the observation."""
    normalize_observations: bool = False
    """Normalise vectors by their mean and standard deviation in the set, which the policy contains."""


@dataclass(frozen=True)
class Config(BC, NetworkSettings, OfflineSettings):
    """All settings of behaviour cloning. One field a flag."""

    algorithm: str = "bc"
    sections: ClassVar[tuple[type, ...]] = (OfflineTask, Offline, BC, NetworkSettings, Hardware, RunSettings)
    make_network = RolloutSettings.make_network  # it takes these settings, too

    def default_preset(self) -> str:
        """The default preset of the command, by the observations."""
        return "images" if self.shows_images else "default"

    @property
    def ineffective(self) -> dict[str, str]:
        """The settings that have no effect in this combination, each with the reason.

        `critic_torso` has one: `tfrl.ppo --start-from` needs the same networks.
        """
        of_rewards = ("gamma", "reward_scale", "reward_shift")
        return super().ineffective | dict.fromkeys(of_rewards, "in behaviour cloning, which uses no rewards")

    def check(self) -> None:
        """Raises UserError for the first setting that cannot work on any machine."""
        super().check()
        if self.memory != "none":
            raise UserError(
                f"bc learns from single steps, so it has no --memory {self.memory}; leave it out."
            )
        if self.patience and not self.validation:
            raise UserError(f"--patience {self.patience} needs --validation above 0.")
        if self.normalize_observations and self.shows_images and not registry.specs(self)[0].num_numbers:
            raise UserError(
                f"--normalize-observations is for vectors, and {self.env} has images, which the network "
                "scales itself; leave it out."
            )


class BCAgent(OfflineAgent):
    """Train a policy by behaviour cloning, from recorded episodes."""

    settings = Config
    compiles_parts = True  # its loss takes less time than the start of the operations
    _config: Config
    network: ActorCritic

    def make_steps(self) -> dict[str, GradientStep]:
        """One gradient step, of the actor and its torso."""
        learned = [name for name in self.network.learned if name not in ("critic", "critic_torso")]
        rates = (self._config.lr,) * len(learned)
        metrics = ("policy_loss", "entropy", self._likeness)
        return {"policy": self.make_step(learned, self._loss, metrics, rates=rates)}

    @property
    def _is_continuous(self) -> bool:
        return isinstance(self.network.distribution.action_spec, Box)

    @property
    def _likeness(self) -> str:
        """The metric that says how near the most likely actions are to the recorded ones."""
        return "action_error" if self._is_continuous else "accuracy"

    def _loss(self, weights: Weights, rows: Rows) -> Losses:
        """-log pi(a | o), and the entropy bonus."""
        policy = self.network.distribution(self.network.outputs(weights, rows["observation"])[0])
        actions = rows["action"]
        loss, entropy, best = -log_likelihood(policy, actions), policy.entropy(), policy.mode()
        if self._is_continuous:
            likeness = tf.reduce_mean(tf.abs(best - actions), axis=1)
        else:
            same = tf.cast(tf.equal(best, actions), tf.float32)
            likeness = tf.reduce_min(tf.reshape(same, (tf.shape(same)[0], -1)), axis=1)
        metrics = {"policy_loss": loss, "entropy": entropy, self._likeness: likeness}
        return Losses(loss - self._config.entropy_coef * entropy, metrics, loss)

    @property
    def validation_names(self) -> tuple[str, ...]:
        """The loss, and the share of equal actions or the mean error of actions."""
        return "validation/loss", f"validation/{self._likeness}"

    def validate(self, observations: np.ndarray, actions: np.ndarray) -> dict[str, float]:
        """The metrics of `validation_names` of transitions [n, ...]; NaN for none."""
        if not len(actions):
            return dict.fromkeys(self.validation_names, float("nan"))
        size, sums = self._config.part_rows, dict.fromkeys(self.validation_names, 0.0)
        for begin in range(0, len(actions), size):
            shown, taken = observations[begin : begin + size], actions[begin : begin + size]
            count, missing = len(taken), size - len(taken)
            pad = [np.concatenate([x, x[:1].repeat(missing, axis=0)]) for x in (shown, taken)]
            for name, values in self._validate(*map(tf.convert_to_tensor, pad)).items():
                sums[name] += float(values.numpy()[:count].sum(dtype=np.float64))
        return {name: total / len(actions) for name, total in sums.items()}

    @compiled(reduce_retracing=True)
    def _validate(self, observations: tf.Tensor, actions: tf.Tensor) -> Any:
        found = self._loss(self.learning.weights(), {"observation": observations, "action": actions}).metrics
        return {
            "validation/loss": found["policy_loss"],
            f"validation/{self._likeness}": found[self._likeness],
        }


_LARGEST = 0.999


def log_likelihood(policy: Any, actions: tf.Tensor) -> tf.Tensor:
    """log pi(a), float32 [b], of recorded actions [b, *shape].

    Actions at a bound, to which tanh of a normal number never comes, count as +-0.999: nearer to 1 they would
    be outliers that decide the whole gradient.
    """
    if actions.dtype.is_floating:
        actions = tf.clip_by_value(actions, -_LARGEST, _LARGEST)
    return policy.log_prob(actions)
