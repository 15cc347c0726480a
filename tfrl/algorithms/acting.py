"""The actions of a network: `draw` makes random numbers, which turn its outputs into actions.

- `act`: the actions [B, *shape] of an evaluation or a user, the most likely ones or drawn ones;
- `sample`: the actions [R, B, *shape] of the training envs of R replicas and their extras, for a `Collector`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfrl.config.run import RLSettings
from tfrl.experience.rollout import Rollout
from tfrl.ops.graph import compiled, graph, tf
from tfrl.run import rng
from tfrl.workers import machine
from tfrl.workers.data_parallel import Weights
from tfrl.workers.strategy import Runtime

if TYPE_CHECKING:
    from tfrl.networks.actor_critic import ActorCritic
    from tfrl.networks.network import Network
    from tfrl.networks.numpy_policy import NumpyActorCritic, NumpyPolicy


_MAX_ENVS = 16
"""The largest number of training envs, all workers together, for which NumPy is faster than TensorFlow
(`benchmarks.small_networks`).
"""
EXTRAS = ("log_prob", "value", "state")
"""The names of the extras of actions: log-probabilities and values, float32 [B], and states [B, S]."""


class ActingNetwork:
    """Chooses actions on one device, or in NumPy for a small network and few envs.

    Args:
      network: the network.
      config: the run's settings.
      read: returns the weight vectors to act with, as tensors.
      on_gpu: True if the device is a GPU.
      at_once: parts of a forward pass that CPUs compute at the same time.

    Attributes:
      numpy_policy: the policy in NumPy; None if NumPy cannot compute it. It depends only on the settings.
      training_policy: `numpy_policy` if it also acts in the training envs, otherwise None.
    """

    def __init__(
        self, network: Network, config: RLSettings, read: Callable[[], Weights], *, on_gpu: bool, at_once: int
    ) -> None:
        self.network = network
        self._config = config
        self._read = read
        self._on_gpu = on_gpu
        self._forward = network.forward_pass(on_gpu=on_gpu, at_once=at_once)
        self.numpy_policy: NumpyPolicy | None = None
        if not network.entrance.spec.image_shapes:
            from tfrl.networks.numpy_policy import policy_in_numpy  # which imports Keras

            self.numpy_policy = policy_in_numpy(network)
        self.training_policy = self.numpy_policy if config.num_envs <= _MAX_ENVS else None
        self._array_pass: Callable[[np.ndarray], np.ndarray] | None = None

    def forget_weights(self) -> None:
        """Drops the cached NumPy weights, because the weights change."""
        self._array_pass = None

    def keep_weights(
        self, newest: Mapping[str, np.ndarray] | None = None
    ) -> Callable[[np.ndarray], np.ndarray]:
        """Acts in NumPy with the cached weights, also while they change, until `forget_weights`.

        Without cached weights it caches the present ones. `newest` are the present weight vectors, and
        replace the cached ones. Returns the function that `array_pass` calls.
        """
        assert self.numpy_policy is not None
        if newest is not None or self._array_pass is None:
            self._array_pass = self.numpy_policy.outputs(newest or self.vectors())
        return self._array_pass

    def vectors(self) -> dict[str, np.ndarray]:
        """The present weights as NumPy vectors."""
        return {name: value.numpy() for name, value in self._read().items()}

    def array_pass(self, observations: np.ndarray) -> np.ndarray:
        """The first output of the network, float32 [B, P], computed in NumPy with the present weights."""
        return self.keep_weights()(observations)

    def act(
        self, observations: np.ndarray, noise: np.ndarray | None = None, memory: np.ndarray | None = None
    ) -> Any:
        """Actions [B, *shape] for observations [B, *shape], for any B.

        They are drawn by noise float32 [B, K]; None gives the most likely actions. A recurrent network also
        takes its memory [B, M], and returns (actions, states [B, S]).
        """
        policy = self.numpy_policy
        if policy is not None:
            outputs = self.array_pass(observations)
            return policy.act_greedily(outputs) if noise is None else policy.act(outputs, noise)
        fill = machine.filled if self._on_gpu else np.asarray
        rows = (None if x is None else tf.convert_to_tensor(fill(x)) for x in (observations, noise, memory))
        return tf.nest.map_structure(lambda x: x.numpy()[: len(observations)], self._act(*rows))

    def deviations(self, observations: np.ndarray, *memory: np.ndarray) -> np.ndarray:
        """The policy's standard deviation, before the tanh, a mean over an action's numbers, float64 [B].

        The observations are [B, *shape]; a recurrent network also takes its memory [B, M]. Only for a network
        that `has_deviation`.
        """
        if self.numpy_policy is not None:
            parameters = self.array_pass(observations)
        else:
            parameters = self._parameters(*map(tf.convert_to_tensor, (observations, *memory))).numpy()
        return self.network.distribution.deviations(parameters)

    @compiled(reduce_retracing=True)
    def _parameters(self, *inputs: tf.Tensor) -> tf.Tensor:
        return self.outputs(*inputs)[0]

    def outputs(self, observations: tf.Tensor, *memory: tf.Tensor) -> Sequence[tf.Tensor]:
        """The network's outputs, [B, ...] each, with the present weights; part of a compiled function."""
        return self._forward(self._read(), observations, *memory)

    @compiled(reduce_retracing=True)
    def _act(
        self,
        observations: tf.Tensor,
        noise: tf.Tensor | None,
        memory: tf.Tensor | None,
        *exploration: tf.Tensor,
    ) -> Any:
        outputs = self.outputs(observations, *(() if memory is None else (memory,)))
        greedy = noise is None
        actions = (
            self.network.greedy(outputs) if greedy else self.network.sample(outputs, noise, *exploration)
        )
        return actions if memory is None else (actions, outputs[-1])

    def draw(self, number: int, indices: Sequence[int]) -> np.ndarray:
        """The random numbers of rollout `number` for envs with these global indices, float32 [T, B, K]."""
        config, draw = self._config, self.network.draw_training_noise
        return rng.action_noise(config.seed, number, indices, config.steps_per_env, draw)


class ActingActorCritic(ActingNetwork):
    """An ActingNetwork that also returns log-probabilities and values, which PPO and IMPALA need.

    When NumPy acts, a rollout keeps the outputs of the policy. `complete` then adds log-probabilities and
    values of all steps at once, which is faster.

    Args:
      network, config, read, on_gpu, at_once: those of `ActingNetwork`.
      runtime: the replicas that `sample` uses; None: one device, where an actor collects.
    """

    network: ActorCritic
    numpy_policy: NumpyActorCritic | None
    training_policy: NumpyActorCritic | None

    def __init__(
        self,
        network: ActorCritic,
        config: RLSettings,
        read: Callable[[], Weights],
        *,
        on_gpu: bool,
        at_once: int,
        runtime: Runtime | None = None,
    ) -> None:
        super().__init__(network, config, read, on_gpu=on_gpu, at_once=at_once)
        self._runtime, self._sampling_pass = runtime, self._forward
        if runtime is not None:
            self._sampling_pass = network.forward_pass(on_gpu=on_gpu, at_once=runtime.parts_at_once)
        # On a GPU, a hundred small kernels and the copies take most of the time (docs/notebook/gpu.md).
        self._drawn = graph(self._packed, jit_compile=True) if on_gpu else self._sampled

    def sample(
        self, observations: np.ndarray, noise: np.ndarray, memory: np.ndarray | None = None
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Actions [R, B, *shape] drawn for observations [R, B, *shape], and the extras, float32 [R, B, ...].

        A recurrent network also takes its memory [R, B, M], and its states [R, B, S] are among the extras.
        """
        size, rows = observations.shape[:2], (observations, noise, *([] if memory is None else [memory]))
        flat = [x.reshape(-1, *x.shape[2:]) for x in rows]
        names: Sequence[str] = EXTRAS
        if self.training_policy is not None:
            parameters = self.array_pass(flat[0])
            results, names = [self.training_policy.act(parameters, flat[1]), parameters], ["parameters"]
        elif self._runtime is None:
            found = self._sample(*map(tf.convert_to_tensor, flat))
            results = self._unpacked(found.numpy()) if self._on_gpu else [x.numpy() for x in found]
        else:
            found, local = self._sample(*map(self._runtime.per_replica, rows)), self._runtime.local_results
            if self._on_gpu:
                results = self._unpacked(np.concatenate(local(found)))
            else:
                results = [np.concatenate(local(x)) for x in found]
        actions, *extras = (x.reshape(*size, *x.shape[1:]) for x in results)
        return actions, dict(zip(names, extras, strict=False))

    @compiled(reduce_retracing=True)
    def _sample(self, *rows: Any) -> Any:
        if self._runtime is None:
            return self._sample_on_device(*rows)
        return self._runtime.strategy.run(self._sample_on_device, args=rows)

    def _sample_on_device(self, *rows: tf.Tensor) -> Any:
        return self._drawn(self._read(), *rows)

    def _sampled(
        self, weights: Weights, observations: tf.Tensor, noise: tf.Tensor, *memory: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        """Actions [B, *shape] and the arrays that `EXTRAS` names; some networks have only two of them."""
        factors: tuple[tf.Tensor, ...] = ()
        if self.network.dropped_size:
            noise, factors = self.network.split_noise(noise)
        outputs = self._sampling_pass(weights, observations, *memory, *factors)
        policy = self.network.distribution(outputs[0])
        actions = policy.sample(noise)
        return actions, policy.log_prob(actions), *outputs[1:]

    def _packed(self, weights: Weights, *rows: tf.Tensor) -> tf.Tensor:
        """The results of `_sampled` side by side, float32 [B, N]: one copy takes them to the host.

        float32 holds the number of an action exactly, because a network has far fewer outputs than 2^24.
        """
        columns = [tf.cast(x, tf.float32) for x in self._sampled(weights, *rows)]
        return tf.concat([tf.reshape(x, (tf.shape(x)[0], -1)) for x in columns], axis=1)

    def _unpacked(self, packed: np.ndarray) -> list[np.ndarray]:
        """The results of `_sampled` from those of `_packed`."""
        spec = self.network.distribution.action_spec
        width, end = math.prod(spec.shape), packed.shape[1] - self.network.state_size
        actions = packed[:, :width].reshape(-1, *spec.shape).astype(spec.dtype)
        states = [packed[:, end:]] if self.network.state_size else []
        return [actions, *packed[:, width:end].T, *states]

    def complete(self, rollout: Rollout) -> None:
        """Adds log-probabilities and values to a rollout that NumPy collected with the present weights."""
        policy = self.training_policy
        if policy is None:
            return
        parameters, observations = rollout.extras["parameters"], rollout.observations[:, :-1]
        size, action_spec = parameters.shape[:-1], self.network.distribution.action_spec
        actions = rollout.actions.reshape(-1, *action_spec.shape)
        log_probs = policy.actions.log_probs(parameters.reshape(-1, parameters.shape[-1]), actions)
        values = policy.values(self.vectors())(observations.reshape(-1, observations.shape[-1]))
        rollout.extras |= {"log_prob": log_probs.reshape(size), "value": values.reshape(size)}
