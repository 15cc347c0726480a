"""REINFORCE (Williams 1992): the policy gradient of whole episodes with normalised returns."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np

from tfrl.algorithms.acting import ActingNetwork
from tfrl.algorithms.algorithm import Agent, check_finite
from tfrl.cli.errors import UserError
from tfrl.cli.flags import ANY, COUNT, MOST, NOT_NEGATIVE, POSITIVE, TIMEOUT, Range
from tfrl.cli.settings import NoResult
from tfrl.config.run import ENVS, Hardware, Learning, RLSettings, RunSettings, Task, Torso
from tfrl.envs import registry
from tfrl.experience.rollout import EpisodeBatch, normalized
from tfrl.ops import losses
from tfrl.ops.graph import graph, tf
from tfrl.workers.data_parallel import DataParallel, GradientStep, Losses, Weights
from tfrl.workers.strategy import Runtime

if TYPE_CHECKING:
    from typing_extensions import Self

    from tfrl.networks.actors import ActorAlone


@dataclass(frozen=True)
class REINFORCE(Learning):
    """The hyperparameters of REINFORCE."""

    num_envs: Annotated[int, ENVS] = 16
    """Envs, all observers together. An update learns from one episode of each env."""
    max_steps: Annotated[int, COUNT] = 1000
    """An update waits at most this many env steps for the end of an episode. The rest of the episode belongs
    to the next update."""
    lr: Annotated[float, POSITIVE] = 1e-2
    max_grad_norm: Annotated[float | None, POSITIVE] = 0.5
    """Clip the gradient of the mean loss of a step to this norm; None: no clipping."""
    entropy_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the entropy bonus."""
    dropout: Annotated[float, Range(0, 0.99)] = 0.0
    """Share of features that are set to 0. The choice is new at every step, and the same in acting and in
    learning."""


@dataclass(frozen=True)
class Observers(NoResult):
    """The processes that step the envs. The result does not depend on their number."""

    observers: Annotated[int, Range(0, 1024)] = 0
    """Processes on Ray that step the envs; each has its share. 0: this process steps them."""
    observer_timeout: Annotated[float, TIMEOUT] = 60.0
    """Replace an observer that takes more seconds than this for an answer."""


@dataclass(frozen=True)
class Config(Observers, REINFORCE, RLSettings):
    """All settings of a REINFORCE run. One field a flag."""

    algorithm: str = "reinforce"
    sections: ClassVar[tuple[type, ...]] = (Task, REINFORCE, Torso, Hardware, Observers, RunSettings)
    updates_vary: ClassVar[bool] = True

    preset: str = "default"
    """A whole set of defaults, listed above. Flags and files win over it."""
    solved_at: Annotated[float | None, ANY] = None
    """End early, as done, once the mean return of the last 100 episodes is this or more; None: the threshold
    that the env is registered with, if it has one."""

    @property
    def steps_per_update(self) -> int:
        """The largest number of env steps of one update."""
        return self.num_envs * self.max_steps

    @property
    def rows_per_step(self) -> int:
        """The largest number of samples of one gradient step."""
        return self.steps_per_update

    def check_topology(self, workers: int, replicas_per_worker: int) -> None:
        """Raise UserError for more than one learner."""
        if workers * replicas_per_worker > 1:
            raise UserError(
                "REINFORCE learns in one process, on one device: leave --replicas and TF_CONFIG out, and "
                "use --observers to step the envs in several processes."
            )

    def complete(self) -> Self:
        """The settings with all derived values, such as the env's own threshold."""
        config = super().complete()
        if config.solved_at is not None:
            return config
        return dataclasses.replace(config, solved_at=registry.reward_threshold(config.env))

    @property
    def ineffective(self) -> dict[str, str]:
        """The settings that have no effect in this combination, each with the reason."""
        return super().ineffective | {"critic_torso": "here: there is one network"}

    def make_network(self, precision: str) -> Any:
        """Makes an actor."""
        from tfrl.networks import actors

        return actors.ActorAlone(self, precision, dropout=self.dropout)

    def check(self) -> None:
        """Raises UserError for the first setting that cannot work on any machine."""
        super().check()
        if self.steps_per_update > MOST:
            raise UserError(
                f"--num-envs {self.num_envs} x --max-steps {self.max_steps} = {self.steps_per_update} is "
                f"more than {MOST}, the most env steps of one update."
            )
        if self.steps_per_update == 1:
            raise UserError(
                "an update of one env step normalises its return to 0, so nothing is learned: give more "
                "--max-steps or --num-envs."
            )
        if self.observers and self.num_envs % self.observers:
            raise UserError(
                f"--num-envs must be divisible by --observers {self.observers}; got {self.num_envs}."
            )
        if self.ray_address is not None and not self.observers:
            raise UserError("--ray-address needs --observers: without observers nothing runs on Ray.")


_METRICS = ("policy_loss", "entropy")  # of the loss
# The number of steps of a part, for a small network and for an image network.
_ROWS, _ROWS_OF_IMAGES = 1024, 64


class ReinforceAgent(Agent):
    """Train REINFORCE, an actor that chooses the actions for all observers and learns from whole episodes."""

    settings = Config
    _config: Config
    network: ActorAlone
    metric_names = tuple(
        f"train/{name}" for name in (*_METRICS, "grad_norm", "learning_rate", "first_ratio_error")
    )

    def __init__(self, config: Config, runtime: Runtime) -> None:
        super().__init__(config, runtime)
        compiled = runtime.uses_gpu or config.small_network
        self._rows = config.micro_batch or (_ROWS if config.small_network else _ROWS_OF_IMAGES)
        step = GradientStep(
            learned=("actor",),
            rates=(config.lr,),
            loss=self._loss,
            metrics=_METRICS,
            optimizer=config.make_optimizer(),
            batch_size=1,  # the loss gives each row its share of the mean, because the number of rows varies
            part_rows=self._rows,
            max_norm=config.max_grad_norm,
            errors="largest",
        )
        self.learning = DataParallel(runtime, self.network.initial(), {"update": step}, compiled=compiled)
        self.acting = ActingNetwork(
            self.network,
            config,
            self.learning.weights,
            on_gpu=runtime.uses_gpu,
            at_once=runtime.parts_at_once,
        )
        self._sample = graph(self._drawn, jit_compile=compiled)
        update = self.learning.steps["update"]
        self._gradient = graph(lambda *rows: update.part_gradients(self.learning.weights(), rows, ()))
        self._apply = graph(
            lambda gradient: runtime.strategy.run(update.apply, args=([gradient], tf.constant(1.0)))
        )

    @property
    def summary(self) -> dict[str, str]:
        """Descriptions of an update by title."""
        config = self._config
        by = f"{config.observers} observers on Ray" if config.observers else "this process"
        return {"envs": f"{config.num_envs}, an episode of each an update", "observers": by}

    # Acting

    def draw_training_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """The random numbers for the training actions of one env, float32 [steps, K]."""
        return self.network.draw_training_noise(generator, steps)

    def sample(self, observations: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Actions [N, *shape] drawn for the observations [N, *shape] of all envs, and their log-probabilities
        [N].
        """
        actions, log_probs = self._sample(
            self.learning.weights()["actor"], tf.constant(observations), tf.constant(noise)
        )
        return actions.numpy(), log_probs.numpy()

    def _drawn(
        self, weights: tf.Tensor, observations: tf.Tensor, noise: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        policy = self.network.distribution(self.network.parameters(weights, observations, noise))
        actions = policy.sample(noise[:, : self.network.noise_size])
        return actions, policy.log_prob(actions)

    # Learning

    def update(self, episodes: EpisodeBatch) -> dict[str, float]:
        """Takes one gradient step from the episodes of all envs.

        Raises:
          TrainingError: the loss or the gradient is not finite.
        """
        config, taken = self._config, episodes.taken
        returns = episodes.returns(config.gamma, config.learned_rewards)
        advantages = normalized(taken(returns)).astype(np.float32)
        fields = (episodes.observations, episodes.actions, episodes.noise, episodes.log_probs)
        size, sums, error = len(advantages), np.zeros(len(_METRICS)), 0.0
        share = np.full(size, 1.0 / size, np.float32)
        rows = [
            np.pad(x, [(0, -size % self._rows), *[(0, 0)] * (x.ndim - 1)])
            for x in (*map(taken, fields), advantages, share)
        ]
        gradient = tf.zeros_like(self.learning.weights()["actor"])
        for begin in range(0, size, self._rows):  # the sum goes in the order of envs and time
            part = [x[begin : begin + self._rows] for x in rows]
            ((of_part,), sums_of_part), (error_of_part, _) = self._gradient(*part)
            gradient, sums = gradient + of_part, sums + sums_of_part.numpy()
            error = max(error, float(error_of_part))
        norm = float(tf.norm(gradient))
        found = dict(zip(_METRICS, sums.tolist(), strict=True)) | {"grad_norm": norm}
        check_finite(found.items())
        self._apply(gradient)
        self.acting.forget_weights()
        found |= {"learning_rate": config.lr, "first_ratio_error": error}
        return {f"train/{name}": value for name, value in found.items()}

    def _loss(self, weights: Weights, rows: tuple[tf.Tensor, ...], _shared: Any) -> Losses:
        """The share of each row in the loss, and its |ratio - 1| to the log-probability of the policy that
        acted.

        `rows` are observations, actions, noise, log-probabilities, advantages, and the share of each row in
        the mean over all steps, which is 0 for rows that only fill a part.
        """
        observations, actions, noise, log_probs, advantages, share = rows
        policy = self.network.distribution(self.network.parameters(weights["actor"], observations, noise))
        now, entropy = policy.log_prob(actions), policy.entropy()
        policy_loss = losses.policy_gradient(now, advantages)
        loss = share * (policy_loss - self._config.entropy_coef * entropy)
        errors = tf.where(share > 0, tf.abs(tf.exp(now - log_probs) - 1.0), 0.0)
        return Losses(loss, {"policy_loss": share * policy_loss, "entropy": share * entropy}, errors)
