"""Policies that act, in the learner's process and in actors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfrl.config.run import RLSettings
from tfrl.envs import registry
from tfrl.experience import exploration
from tfrl.experience.collector import BehaviorPolicy
from tfrl.experience.replay import BufferSettings
from tfrl.experience.rollout import Rollout
from tfrl.ops.graph import compiled, tf
from tfrl.run import rng
from tfrl.workers.data_parallel import Weights

if TYPE_CHECKING:
    from tfrl.networks.actor_critic import ActorCritic
    from tfrl.networks.network import Network


_MOST_ENVS = 16
"""The largest number of training envs, all workers together, for which NumPy is faster than TensorFlow
(`benchmarks.small_networks`).
"""
EXTRAS = ("log_prob", "value", "state")
"""The names of the extras of actions: log-probabilities and values, float32 [B], and states [B, S]."""


class ActingNetwork:
    """Chooses actions on one device, or in NumPy for a small network and few envs.

    Args:
      network: the network.
      read: returns the weight vectors to act with, as tensors.
      num_envs: training envs, all workers together.
      on_gpu: True if the device is a GPU.
      at_once: parts of a forward pass that CPUs compute at the same time.

    Attributes:
      in_arrays: True if NumPy can compute the network. It depends only on the settings.
    """

    def __init__(
        self, network: Network, read: Callable[[], Weights], num_envs: int, *, on_gpu: bool, at_once: int
    ) -> None:
        self.network = network
        self._read = read
        self._forward = network.forward_pass(on_gpu=on_gpu, at_once=at_once)
        self.in_arrays = network.fits_arrays
        self._few_envs = num_envs <= _MOST_ENVS
        self._array_pass: Callable[[np.ndarray], np.ndarray] | None = None

    @property
    def acts_in_arrays(self) -> bool:
        """True if NumPy also acts in the training envs."""
        return self.in_arrays and self._few_envs

    def forget(self) -> None:
        """Drops the cached NumPy weights, because the weights change."""
        self._array_pass = None

    def keep(self) -> Callable[[np.ndarray], np.ndarray]:
        """Acts in NumPy with the present weights until `use` or `forget`, also while they change.

        Returns the function that `array_pass` calls.
        """
        if self._array_pass is None:
            self._array_pass = self.network.array_pass(self.vectors())
        return self._array_pass

    def use(self, vectors: Mapping[str, np.ndarray]) -> None:
        """Acts in NumPy with these weight vectors, which must be the present ones."""
        self._array_pass = self.network.array_pass(vectors)

    def vectors(self) -> dict[str, np.ndarray]:
        """The present weights as NumPy vectors."""
        return {name: value.numpy() for name, value in self._read().items()}

    def array_pass(self, observations: np.ndarray) -> np.ndarray:
        """The first output of the network, float32 [B, P], computed in NumPy with the present weights."""
        return self.keep()(observations)

    def act(
        self, observations: np.ndarray, noise: np.ndarray, exploration: np.ndarray | Sequence[np.float32] = ()
    ) -> np.ndarray:
        """Actions [B, *shape] of training envs for observations [B, *shape], with noise and `exploration`."""
        if self.acts_in_arrays:
            return self.network.act(self.array_pass(observations), noise, *exploration)
        observations, noise, *further = map(tf.convert_to_tensor, (observations, noise, *exploration))
        return self._sample(observations, noise, further).numpy()

    def sample(self, observations: np.ndarray, noise: np.ndarray, memory: np.ndarray | None = None) -> Any:
        """Actions [B, *shape] for observations [B, *shape], drawn by noise float32 [B, K].

        A recurrent network also takes its memory [B, M], and returns (actions, states [B, S]).
        """
        if self.in_arrays:
            return self.network.act(self.array_pass(observations), noise)
        rows = [observations, noise] if memory is None else [observations, noise, memory]
        observations, noise, *remembered = map(tf.convert_to_tensor, rows)
        return tf.nest.map_structure(lambda x: x.numpy(), self._sample(observations, noise, [], *remembered))

    def outputs(self, observations: tf.Tensor, *memory: tf.Tensor) -> Sequence[tf.Tensor]:
        """The network's outputs, [B, ...] each, with the present weights; part of a compiled function."""
        return self._forward(self._read(), observations, *memory)

    @compiled(reduce_retracing=True)
    def _sample(
        self, observations: tf.Tensor, noise: tf.Tensor, exploration: list[tf.Tensor], *memory: tf.Tensor
    ) -> Any:
        outputs = self.outputs(observations, *memory)
        actions = self.network.sample(outputs, noise, *exploration)
        return (actions, outputs[-1]) if memory else actions

    def greedy(self, observations: np.ndarray, memory: np.ndarray | None = None) -> Any:
        """The best actions [B, *shape] for observations [B, *shape]; with memory, a pair like that of
        `sample`.
        """
        if self.in_arrays:
            return self.network.act_greedily(self.array_pass(observations))
        rows = [observations] if memory is None else [observations, memory]
        return tf.nest.map_structure(lambda x: x.numpy(), self._greedy(*map(tf.convert_to_tensor, rows)))

    @compiled(reduce_retracing=True)
    def _greedy(self, observations: tf.Tensor, *memory: tf.Tensor) -> Any:
        outputs = self.outputs(observations, *memory)
        actions = self.network.greedy(outputs)
        return (actions, outputs[-1]) if memory else actions


class ActingActorCritic(ActingNetwork):
    """An ActingNetwork that also returns log-probabilities and values, which PPO and IMPALA need.

    When NumPy acts, a rollout keeps the outputs of the policy. `complete` then adds log-probabilities and
    values of all steps at once, which is faster.

    Attributes:
      extras: the names of the extras of `act_with_extras`, with their shapes for one env and step.
    """

    network: ActorCritic

    def __init__(
        self, network: ActorCritic, read: Callable[[], Weights], num_envs: int, *, on_gpu: bool, at_once: int
    ) -> None:
        super().__init__(network, read, num_envs, on_gpu=on_gpu, at_once=at_once)
        later: dict[str, tuple[int, ...]] = {"parameters": (network.distribution.parameters_size,)}
        self.extras = later if self.acts_in_arrays else {"log_prob": (), "value": ()}

    def act_with_extras(
        self, observations: np.ndarray, noise: np.ndarray, memory: np.ndarray | None = None
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Draws actions [R, B, *shape] for observations [R, B, *shape]; also returns the extras, float32 [R,
        B, ...].

        A recurrent network also takes its memory [R, B, M], and its states [R, B, S] are among the extras.
        """
        size = observations.shape[:2]
        arguments = (observations, noise) if memory is None else (observations, noise, memory)
        observations, noise, *remembered = (x.reshape(-1, *x.shape[2:]) for x in arguments)
        if self.acts_in_arrays:
            parameters = self.array_pass(observations)
            actions, extras = self.network.act(parameters, noise), {"parameters": parameters}
        else:
            results = self._act_with_extras(*map(tf.convert_to_tensor, (observations, noise, *remembered)))
            actions, *further = (x.numpy() for x in results)
            extras = dict(zip(EXTRAS, further, strict=False))
        extras = {name: x.reshape(*size, *x.shape[1:]) for name, x in extras.items()}
        return actions.reshape(*size, *actions.shape[1:]), extras

    @compiled(reduce_retracing=True)
    def _act_with_extras(
        self, observations: tf.Tensor, noise: tf.Tensor, *memory: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        return self.actions_and_extras(self.outputs(observations, *memory), noise)

    def actions_and_extras(self, outputs: Sequence[tf.Tensor], noise: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """Actions [B, *shape] drawn from outputs, and the arrays that `EXTRAS` names; some networks have only
        two.
        """
        policy = self.network.distribution(outputs[0])
        actions = policy.sample(noise)
        return actions, policy.log_prob(actions), *outputs[1:]

    def complete(self, rollout: Rollout) -> None:
        """Adds log-probabilities and values to a rollout that NumPy collected with the present weights."""
        if not self.acts_in_arrays:
            return
        parameters, observations = rollout.extras["parameters"], rollout.observations[:, :-1]
        size, distribution = parameters.shape[:-1], self.network.distribution
        actions = rollout.actions.reshape(-1, *distribution.action_spec.shape)
        log_probs = distribution.log_probs_of(parameters.reshape(-1, parameters.shape[-1]), actions)
        values = self.network.array_values(self.vectors())(observations.reshape(-1, observations.shape[-1]))
        rollout.extras |= {"log_prob": log_probs.reshape(size), "value": values.reshape(size)}


class Behavior:
    """A network on one device with its own copy of the weights; a base class for a `BehaviorPolicy` of
    `tfrl.experience.collector`, and for the policies of finished runs.

    Args:
      config: the run's settings.
      precision: the precision of the torso, float32 or bfloat16.
      at_once: parts of a forward pass that CPUs compute at the same time.
    """

    extras: Mapping[str, tuple[int, ...]] = {}
    _acting_class: type[ActingNetwork] = ActingNetwork

    def __init__(self, config: RLSettings, precision: str, *, at_once: int) -> None:
        gpus = tf.config.list_logical_devices("GPU")
        self._config = config
        self._device = "/gpu:0" if gpus else "/cpu:0"
        with tf.device(self._device):
            self._network = config.make_network(precision)
            initial = self._network.initial()
            self._variables = {
                name: tf.Variable(initial[name], trainable=False) for name in self._network.acting
            }
        self._acting = self._acting_class(
            self._network, self._weights, config.num_envs, on_gpu=bool(gpus), at_once=at_once
        )

    def _weights(self) -> dict[str, tf.Tensor]:
        return {name: variable.read_value() for name, variable in self._variables.items()}

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Acts with these weights from now on."""
        vectors = self._network.join(weights)
        for name, variable in self._variables.items():
            variable.assign(vectors[name])
        self._acting.forget()


class ActorCriticBehavior(Behavior):
    """Acts on one device like `PPOAgent`; implements `tfrl.experience.collector.BehaviorPolicy`."""

    _acting: ActingActorCritic
    _acting_class = ActingActorCritic

    def __init__(self, config: RLSettings, precision: str, *, at_once: int) -> None:
        super().__init__(config, precision, at_once=at_once)
        self.extras = self._acting.extras

    def draw(self, number: int, indices: Sequence[int]) -> np.ndarray:
        """The random numbers of rollout `number` for envs with these global indices, float32 [T, B, K]."""
        config = self._config
        return rng.action_noise(config.seed, number, indices, config.steps_per_env, self._network.draw_noise)

    def act(
        self, observations: np.ndarray, noise: np.ndarray, memory: np.ndarray | None = None
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Actions [R, B, *shape] drawn for observations [R, B, *shape], and the extras."""
        with tf.device(self._device):
            return self._acting.act_with_extras(observations, noise, memory)

    def complete(self, rollout: Rollout) -> None:
        """Adds log-probabilities and values to a rollout that NumPy collected with the present weights."""
        self._acting.complete(rollout)


class ReplayBehavior(Behavior):
    """Explores like `ReplayAgent`; implements `tfrl.experience.collector.BehaviorPolicy`.

    A row of `draw` decides an action without further state. It holds the noise of the action, the values of
    `config.exploration`, and the action itself if it is random.
    """

    _config: BufferSettings

    def __init__(self, config: BufferSettings, precision: str, *, at_once: int) -> None:
        super().__init__(config, precision, at_once=at_once)
        self._spec = registry.specs(config)[1]

    def draw(self, number: int, indices: Sequence[int]) -> np.ndarray:
        """The rows of round `number` for envs with these global indices, float32 [T, B, ...]."""
        config = self._config
        draw = self._network.draw_noise
        noise = rng.action_noise(config.seed, number, indices, config.steps_per_env, draw)
        steps, envs = noise.shape[:2]
        shares = [config.exploration(exploration.env_steps(config, number, t)) for t in range(steps)]
        explored = np.broadcast_to(np.array(shares, np.float32)[:, None], (steps, envs, len(shares[0])))
        actions = exploration.first_actions(config, number, indices)
        actions = np.zeros((steps, envs, *self._spec.shape)) if actions is None else actions
        random = np.array([exploration.is_random(config, number, t) for t in range(steps)])
        at_random = np.broadcast_to(random[:, None, None], (steps, envs, 1))
        parts = (noise, explored, actions.reshape(steps, envs, -1), at_random)
        return np.concatenate(parts, axis=2, dtype=np.float32)

    def act(
        self, observations: np.ndarray, noise: np.ndarray, memory: np.ndarray | None = None
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Actions [R, B, *shape] for observations [R, B, *shape], by rows [R, B, ...] of `draw`."""
        size, rows = observations.shape[:2], noise.reshape(-1, noise.shape[-1])
        observations = observations.reshape(-1, *observations.shape[2:])
        if rows[0, -1]:  # exact, because actions are float32 or small integers
            action_size = int(np.prod(self._spec.shape))
            drawn = rows[:, -1 - action_size : -1]
            actions = exploration.allowed_actions(self._config, drawn, observations).astype(self._spec.dtype)
            return actions.reshape(*size, *self._spec.shape), {}
        width = self._network.noise_size
        further = len(self._config.exploration(0))
        with tf.device(self._device):
            actions = self._acting.act(observations, rows[:, :width], rows[0, width : width + further])
        return actions.reshape(*size, *actions.shape[1:]), {}

    def complete(self, rollout: Rollout) -> None:
        """Does nothing, because there are no extras."""


def of_settings(config: RLSettings, precision: str, *, at_once: int) -> BehaviorPolicy:
    """Makes the policy of a run's actors; the arguments are those of `ActorCriticBehavior`."""
    if isinstance(config, BufferSettings):
        return ReplayBehavior(config, precision, at_once=at_once)
    return ActorCriticBehavior(config, precision, at_once=at_once)
