"""REINFORCE (Williams 1992): the policy gradient of whole episodes, with their returns normalised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tfrl import networks
from tfrl.agents.acting import ActingNetwork
from tfrl.agents.actor_critic_agent import num_parameters_of, set_state_of, state_of
from tfrl.cli.errors import TrainingError
from tfrl.experience.episodes import Episodes, normalized
from tfrl.ops import losses, optimizers
from tfrl.ops.graph import graph
from tfrl.ops.lazy import tf
from tfrl.workers.data_parallel import DataParallel, GradientStep, Losses, Weights
from tfrl.workers.strategy import Runtime

_SUMS = ("policy_loss", "entropy")
# Steps whose gradients are taken at once, with a small network and with one for images.
_ROWS, _ROWS_OF_IMAGES = 1024, 64


class ReinforceAgent:
    """An actor that chooses the actions of all observers' envs in one batch, and learns from their episodes.

    Args:
      config: the settings.
      runtime: the strategy, of one device.
    """

    metric_names = tuple(
        f"train/{name}" for name in (*_SUMS, "grad_norm", "learning_rate", "first_ratio_error")
    )
    charts = {"losses": {"policy": ("train/policy_loss",), "entropy": ("train/entropy",)}}
    allreduce_floats = 0
    steps_per_update = 1

    def __init__(self, config: Any, runtime: Runtime) -> None:
        self._config = config
        with runtime.strategy.scope():
            self.network = networks.of_settings(config, runtime.precision)
        compiled = runtime.uses_gpu or config.small_network
        self._rows = config.micro_batch or (_ROWS if config.small_network else _ROWS_OF_IMAGES)
        step = GradientStep(
            learned=("actor",),
            rates=(config.lr,),
            loss=self._loss,
            metrics=_SUMS,
            optimizer=optimizers.of_settings(config),
            batch_rows=1,  # the loss has each row's share of the mean: the number of rows varies
            part_rows=self._rows,
            max_norm=config.max_grad_norm,
            errors="largest",
        )
        self.learning = DataParallel(runtime, self.network.initial(), {"update": step}, compiled=compiled)
        self._acting = ActingNetwork(
            self.network,
            self.learning.weights,
            config.num_envs,
            on_gpu=runtime.uses_gpu,
            at_once=runtime.parts_at_once,
        )
        self._act = graph(self._drawn, jit_compile=compiled)
        self._gradient = graph(lambda *rows: self.learning.part_gradients("update", rows, ()))
        self._apply = graph(
            lambda gradient: runtime.strategy.run(
                self.learning.apply, args=("update", [gradient], tf.constant(1.0))
            )
        )
        self.draw_noise = self.network.draw_noise

    @property
    def num_parameters(self) -> int:
        """The number of trained parameters."""
        return num_parameters_of(self.network, self.learning)

    @property
    def summary(self) -> dict[str, str]:
        """The kind of its updates, by title."""
        config = self._config
        by = f"{config.observers} observers on Ray" if config.observers else "this process"
        return {"envs": f"{config.num_envs}, an episode of each an update", "observers": by}

    @property
    def results(self) -> dict[str, object]:
        """Nothing that is not in every run's results.json."""
        return {}

    def begin(self) -> None:
        """Does nothing: there is nothing else that a run could start from."""

    def begin_with(self, state: Mapping[str, np.ndarray]) -> None:
        """Takes the weights of another run, and its optimizer where it is there. Raises ValueError."""
        self.set_state({**self.get_state(), **state})

    # Acting

    def draw_training_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """The numbers that one env's actions in training are drawn by, float32 [steps, K]."""
        return self.network.draw_training_noise(generator, steps)

    def act(self, observations: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Drawn actions [N, *shape] of all envs' observations [N, *shape]; their log-probabilities [N]."""
        actions, log_probs = self._act(
            self.learning.weights()["actor"], tf.constant(observations), tf.constant(noise)
        )
        return actions.numpy(), log_probs.numpy()

    def _drawn(
        self, weights: tf.Tensor, observations: tf.Tensor, noise: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        policy = self.network.distribution(self.network.parameters(weights, observations, noise))
        return policy.sample_with_log_prob(noise[:, : self.network.noise_size])

    def sample(self, observations: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Drawn actions [B, *shape] of observations [B, *shape], by noise [B, K], without dropout."""
        return self._acting.sample(observations, noise)

    def greedy(self, observations: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
        """The most likely actions [B, *shape]; ignores `noise`."""
        return self._acting.greedy(observations)

    # Learning

    def update(
        self, episodes: Episodes, on_part: Callable[[float], None] = lambda share: None
    ) -> dict[str, float]:
        """One gradient step of all envs' episodes; `on_part` gets the share that is done.

        Raises:
          TrainingError: the loss or the gradient is not finite.
        """
        config, taken = self._config, episodes.taken
        returns = episodes.returns(config.gamma, config.learned_rewards)
        advantages = normalized(taken(returns)).astype(np.float32)
        fields = (episodes.observations, episodes.actions, episodes.noise, episodes.log_probs)
        rows = (*map(taken, fields), advantages)
        size, sums, error = len(advantages), np.zeros(len(_SUMS)), 0.0
        gradient = tf.zeros_like(self.learning.weights()["actor"])
        for begin in range(0, size, self._rows):  # each added to those before, in the order of envs and time
            part = [_filled(x[begin : begin + self._rows], self._rows) for x in rows]
            share = np.full(self._rows, 1.0 / size, np.float32)
            share[size - begin :] = 0.0
            ((of_part,), sums_of_part), (error_of_part, _) = self._gradient(*part, share)
            gradient, sums = gradient + of_part, sums + sums_of_part.numpy()
            error = max(error, float(error_of_part))
            on_part(min(1.0, (begin + self._rows) / size))
        norm = float(tf.norm(gradient))
        found = dict(zip(_SUMS, sums.tolist(), strict=True)) | {"grad_norm": norm}
        for name, value in found.items():
            if not np.isfinite(value):
                raise TrainingError(f"{name} is not a finite number")
        self._apply(gradient)
        self._acting.forget()
        found |= {"learning_rate": config.lr, "first_ratio_error": error}
        return {f"train/{name}": value for name, value in found.items()}

    def _loss(self, weights: Weights, rows: tuple[tf.Tensor, ...], _shared: Any) -> Losses:
        """The share that each row has of the loss, and its |ratio - 1| to the log_probs that acted.

        `rows` are observations, actions, noise, log_probs, advantages, and each row's share of the mean over
        all steps: 0 for rows that only fill a part.
        """
        observations, actions, noise, log_probs, advantages, share = rows
        policy = self.network.distribution(self.network.parameters(weights["actor"], observations, noise))
        now, entropy = policy.log_prob(actions), policy.entropy()
        policy_loss = losses.policy_gradient(now, advantages)
        loss = share * (policy_loss - self._config.entropy_coef * entropy)
        errors = tf.where(share > 0, tf.abs(tf.exp(now - log_probs) - 1.0), 0.0)
        return Losses(loss, {"policy_loss": share * policy_loss, "entropy": share * entropy}, errors)

    # State

    def get_weights(self) -> dict[str, np.ndarray]:
        """The network's weights by name."""
        return self.network.split(self.learning.vectors())

    def get_state(self) -> dict[str, np.ndarray]:
        """Weights and optimizer as arrays."""
        return state_of(self.network, self.learning)

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from arrays of `get_state`. Raises ValueError or KeyError where they do not fit."""
        set_state_of(self.network, self.learning, state)
        self._acting.forget()


def _filled(rows: np.ndarray, count: int) -> np.ndarray:
    """Rows [n, ...], and zeros up to [count, ...]."""
    if len(rows) == count:
        return rows
    return np.concatenate([rows, np.zeros((count - len(rows), *rows.shape[1:]), rows.dtype)])
