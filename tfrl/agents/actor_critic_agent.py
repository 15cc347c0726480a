"""The part that all agents with an actor and a critic share: network, optimizer, acting and state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfrl import networks
from tfrl.experience.rollout import Rollout
from tfrl.networks import array_policy, torso_weights
from tfrl.networks.weights import PREFIX, weights_of
from tfrl.ops import optimizers
from tfrl.ops.graph import graph
from tfrl.workers.optimizers import VariablesOptimizer
from tfrl.workers.strategy import Runtime


class ActorCriticAgent:
    """Actor, critic and optimizer under a strategy; a base of what follows `tfrl.agents.agent.Agent`.

    A subclass gives all that concerns updates.

    Args:
      config: the settings.
      runtime: the strategy and this worker's place in it.
    """

    def __init__(self, config: Any, runtime: Runtime) -> None:
        self._config = config
        self._runtime = runtime
        with runtime.strategy.scope():
            self.network = networks.of_settings(config, runtime.precision)
            if config.freeze_torso:
                torso_weights.freeze(self.network)
            self._variables = self.network.trained_variables
            self._optimizer = self._make_optimizer(self._variables, config.lr, self._rate_scales())
        self.draw_noise = self.network.distribution.draw_noise
        on_gpu, at_once = runtime.uses_gpu, runtime.parts_at_once
        self._forward = self.network.forward_pass(on_gpu=on_gpu, at_once=at_once)
        at_once *= runtime.local_replicas
        self._forward_alone = self.network.forward_pass(on_gpu=on_gpu, at_once=at_once)
        self._values_alone = self.network.value_pass(on_gpu=on_gpu, at_once=at_once)
        self._gradient_specs = [tf.TensorSpec(v.shape) for v in self._variables]
        self._arrays = array_policy.Cache(self.network, config.num_envs)
        self.extras = self._arrays.extras

    def _make_optimizer(
        self, variables: Sequence[keras.Variable], rate: float, scales: Sequence[float] | None = None
    ) -> VariablesOptimizer:
        return VariablesOptimizer(
            optimizers.of_settings(self._config, uncorrected_epsilon=True), variables, rate, scales
        )

    def _rate_scales(self) -> Sequence[float] | None:
        """Scales of the learning rate, one for each trained variable; None: all 1."""
        return None

    @property
    def num_parameters(self) -> int:
        """The number of trained parameters."""
        return sum(int(np.prod(v.shape)) for v in self._variables)

    @property
    def results(self) -> dict[str, object]:
        """Nothing that is not in every run's results.json."""
        return {}

    def begin(self) -> None:
        """Takes the torso of --torso-weights."""
        if self._config.torso_weights is not None:
            torso_weights.start(self.network, self._config.torso_weights)

    def begin_with(self, state: Mapping[str, np.ndarray]) -> None:
        """Takes the weights of another run, and its optimizer where it is there. Raises ValueError."""
        self.set_state({**self.get_state(), **state})

    # Acting

    def act(self, observations: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Drawn actions [R, B, *shape] of observations [R, B, *shape], and the extras.

        TensorFlow gives log-probabilities and values in the same call; in NumPy `complete` adds them.
        """
        if self._arrays.acts:
            return self._arrays.act(observations, noise)
        results = self._act(self._runtime.per_replica(observations), self._runtime.per_replica(noise))
        actions, log_probs, values = (np.stack(self._runtime.local_results(r)) for r in results)
        return actions, {"log_prob": log_probs, "value": values}

    def complete(self, rollout: Rollout) -> None:
        """Adds log-probabilities and values to a rollout that the weights of now have acted in NumPy."""
        if self._arrays.acts:
            parameters = rollout.extras["parameters"]
            rollout.extras |= self._arrays.said_of(rollout.observations[:, :-1], rollout.actions, parameters)

    @graph(reduce_retracing=True)
    def _act(self, observations: Any, noise: Any) -> Any:
        return self._runtime.strategy.run(self._act_on_replica, args=(observations, noise))

    def _act_on_replica(self, observations: tf.Tensor, noise: tf.Tensor) -> tuple[tf.Tensor, ...]:
        parameters, values = self._forward(observations)
        policy = self.network.distribution(parameters)
        actions = policy.sample(noise)
        return actions, policy.log_prob(actions), values

    def sample(self, observations: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Drawn actions [B, *shape] of observations [B, *shape], by noise [B, K], on one device."""
        if self._arrays.fits:
            return self.network.distribution.act(self._arrays.policy.parameters(observations), noise)
        return self._sample(tf.convert_to_tensor(observations), tf.convert_to_tensor(noise)).numpy()

    @graph(reduce_retracing=True)
    def _sample(self, observations: tf.Tensor, noise: tf.Tensor) -> tf.Tensor:
        return self.network.distribution(self._forward_alone(observations)[0]).sample(noise)

    def greedy(self, observations: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
        """The most likely actions [B, *shape]; ignores `noise`."""
        if self._arrays.fits:
            return self.network.distribution.act_greedily(self._arrays.policy.parameters(observations))
        return self._greedy(tf.convert_to_tensor(observations)).numpy()

    @graph(reduce_retracing=True)
    def _greedy(self, observations: tf.Tensor) -> tf.Tensor:
        return self.network.distribution(self._forward_alone(observations)[0]).mode()

    def _values(self, observations: np.ndarray) -> np.ndarray:
        """V of observations [..., *shape] by the weights of now, float32 [...], on one device."""
        shape = self._observation_shape
        leading = observations.shape[: observations.ndim - len(shape)]
        flat = tf.convert_to_tensor(observations.reshape(-1, *shape))
        return self._value(flat).numpy().reshape(leading)

    @graph(reduce_retracing=True)
    def _value(self, observations: tf.Tensor) -> tf.Tensor:
        return self._values_alone(observations)

    @property
    def _observation_shape(self) -> tuple[int, ...]:
        return tuple(self.network.actor.torso.input_shape[1:])

    # State

    def get_weights(self) -> dict[str, np.ndarray]:
        """The network's weights by name."""
        return self.network.get_weights()

    def set_observation_scaling(self, mean: np.ndarray, scale: np.ndarray) -> None:
        """Standardises observations by float32 [D] each from now on."""
        self.network.scaling.mean.assign(mean)
        self.network.scaling.scale.assign(scale)
        self._arrays.forget()

    def get_state(self) -> dict[str, np.ndarray]:
        """Weights and optimizer as arrays, the same on every worker."""
        weights = {f"{PREFIX}{k}": v for k, v in self.network.get_weights().items()}
        return weights | self._optimizer.get_state()

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from arrays of `get_state`.

        Raises:
          ValueError: they belong to another network.
        """
        self.network.set_weights(weights_of(state))
        self._arrays.forget()
        self._optimizer.set_state(state)
