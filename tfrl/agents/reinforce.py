"""REINFORCE (Williams 1992): the policy gradient of whole episodes, with their returns normalised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfrl import networks
from tfrl.cli.errors import TrainingError
from tfrl.experience.episodes import Episodes, normalized
from tfrl.networks.weights import PREFIX, weights_of
from tfrl.ops import losses, optimizers
from tfrl.ops.graph import graph
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
    floats_per_sum = 0
    steps_per_update = 1

    def __init__(self, config: Any, runtime: Runtime) -> None:
        self._config = config
        with runtime.strategy.scope():
            self.network = networks.of_settings(config, runtime.precision)
            weights = self.network.functions["actor"].initial()
            self._optimizer = optimizers.of_settings(config)
            vectors = {"weights": weights, **self._optimizer.initial(weights)}
            self._vectors = {name: tf.Variable(v, trainable=False) for name, v in vectors.items()}
        compiles = runtime.uses_gpu or config.small_network
        self._rows = config.micro_batch or (_ROWS if config.small_network else _ROWS_OF_IMAGES)
        self._forward = self.network.player_pass(on_gpu=runtime.uses_gpu, at_once=runtime.parts_at_once)
        self._act = graph(self._drawn, jit_compile=compiles)
        self._gradient = graph(self._part_gradient, jit_compile=compiles)
        self._step = graph(self._optimizer_step, jit_compile=compiles)
        self.draw_noise = self.network.draw_noise

    @property
    def num_parameters(self) -> int:
        """The number of trained parameters."""
        return int(self._vectors["weights"].shape[0])

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
            self._vectors["weights"].read_value(), tf.constant(observations), tf.constant(noise)
        )
        return actions.numpy(), log_probs.numpy()

    def _drawn(
        self, weights: tf.Tensor, observations: tf.Tensor, noise: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        policy = self.network.distribution(self.network.parameters(weights, observations, noise))
        return policy.sample_with_log_prob(noise[:, : self.network.noise_size])

    def sample(self, observations: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Drawn actions [B, *shape] of observations [B, *shape], by noise [B, K], without dropout."""
        return self._sample(tf.convert_to_tensor(observations), tf.convert_to_tensor(noise)).numpy()

    @graph(reduce_retracing=True)
    def _sample(self, observations: tf.Tensor, noise: tf.Tensor) -> tf.Tensor:
        return self.network.sample(self._forward(self._vectors["weights"].read_value(), observations), noise)

    def greedy(self, observations: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
        """The most likely actions [B, *shape]; ignores `noise`."""
        return self._greedy(tf.convert_to_tensor(observations)).numpy()

    @graph(reduce_retracing=True)
    def _greedy(self, observations: tf.Tensor) -> tf.Tensor:
        return self.network.greedy(self._forward(self._vectors["weights"].read_value(), observations))

    # Learning

    def update(
        self, episodes: Episodes, on_part: Callable[[float], None] = lambda share: None
    ) -> dict[str, float]:
        """One gradient step of all envs' episodes; `on_part` gets the share that is done.

        Raises:
          TrainingError: the loss or the gradient is not finite.
        """
        config, taken = self._config, episodes.taken
        advantages = normalized(taken(episodes.returns(config.gamma, config.learned_rewards))).astype(
            np.float32
        )
        fields = (episodes.observations, episodes.actions, episodes.noise, episodes.log_probs)
        rows = (*map(taken, fields), advantages)
        size, weights = len(advantages), self._vectors["weights"].read_value()
        gradient, sums, error = tf.zeros_like(weights), np.zeros(len(_SUMS)), 0.0
        for begin in range(0, size, self._rows):  # each added to those before, in the order of envs and time
            part = [_filled(x[begin : begin + self._rows], self._rows) for x in rows]
            share = np.full(self._rows, 1.0 / size, np.float32)
            share[size - begin :] = 0.0
            of_part, sums_of_part, error_of_part = self._gradient(weights, *part, share)
            gradient, sums = gradient + of_part, sums + sums_of_part.numpy()
            error = max(error, float(error_of_part))
            on_part(min(1.0, (begin + self._rows) / size))
        norm = float(tf.norm(gradient))
        found = dict(zip(_SUMS, sums.tolist(), strict=True)) | {"grad_norm": norm}
        for name, value in found.items():
            if not np.isfinite(value):
                raise TrainingError(f"{name} is not a finite number")
        self._take_step(gradient)
        found |= {"learning_rate": config.lr, "first_ratio_error": error}
        return {f"train/{name}": value for name, value in found.items()}

    def _part_gradient(
        self,
        weights: tf.Tensor,
        observations: tf.Tensor,  # [n, *shape]
        actions: tf.Tensor,  # [n, *shape]
        noise: tf.Tensor,  # [n, K]
        log_probs: tf.Tensor,  # [n], like those that follow
        advantages: tf.Tensor,
        share: tf.Tensor,  # of the mean over all steps; 0 of rows that fill up
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """A part's share of gradient and metrics, and its largest |ratio - 1| to the log_probs that acted."""
        with tf.GradientTape() as tape:
            tape.watch(weights)
            policy = self.network.distribution(self.network.parameters(weights, observations, noise))
            now, entropy = policy.log_prob(actions), policy.entropy()
            policy_loss = losses.policy_gradient(now, advantages)
            loss = tf.reduce_sum(share * (policy_loss - self._config.entropy_coef * entropy))
        sums = tf.stack([tf.reduce_sum(share * x) for x in (policy_loss, entropy)])
        errors = tf.where(share > 0, tf.abs(tf.exp(now - log_probs) - 1.0), 0.0)
        return tape.gradient(loss, weights), sums, tf.reduce_max(errors)

    def _take_step(self, gradient: tf.Tensor) -> None:
        values = self._step({name: v.read_value() for name, v in self._vectors.items()}, gradient)
        for name, value in values.items():
            self._vectors[name].assign(value)

    def _optimizer_step(self, vectors: dict[str, tf.Tensor], gradient: tf.Tensor) -> dict[str, tf.Tensor]:
        config = self._config
        if config.max_grad_norm is not None:
            gradient = tf.clip_by_norm(gradient, config.max_grad_norm)
        rate = tf.constant(config.lr, tf.float32)
        weights, slots = self._optimizer.step(vectors["weights"], vectors, gradient, rate)
        return {"weights": weights, **slots}

    # State

    def get_weights(self) -> dict[str, np.ndarray]:
        """The network's weights by name."""
        return self.network.split({"actor": self._vectors["weights"].numpy()})

    def get_state(self) -> dict[str, np.ndarray]:
        """Weights and optimizer as arrays."""
        optimizer = {f"agent/{n}": v.numpy() for n, v in self._vectors.items() if n != "weights"}
        return {f"{PREFIX}{name}": array for name, array in self.get_weights().items()} | optimizer

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from arrays of `get_state`. Raises ValueError or KeyError where they do not fit."""
        vectors = {"weights": self.network.join(weights_of(state))["actor"]}
        vectors |= {name: state[f"agent/{name}"] for name in self._vectors if name != "weights"}
        for name, variable in self._vectors.items():
            variable.assign(vectors[name])


def _filled(rows: np.ndarray, count: int) -> np.ndarray:
    """Rows [n, ...], and zeros up to [count, ...]."""
    if len(rows) == count:
        return rows
    return np.concatenate([rows, np.zeros((count - len(rows), *rows.shape[1:]), rows.dtype)])
