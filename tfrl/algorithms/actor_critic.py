"""The common part of all agents with an actor and a critic: network, weights, acting and state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from tfrl.algorithms.acting import ActingActorCritic
from tfrl.algorithms.algorithm import Agent
from tfrl.cli.errors import UserError
from tfrl.cli.flags import COUNT, FRACTION, MOST, NATURAL, NOT_NEGATIVE, POSITIVE
from tfrl.config.distributed import DistributedSettings
from tfrl.config.run import ENVS, GAMMA_OF_ROLLOUTS, NetworkSettings, ScheduledLearning
from tfrl.envs import registry
from tfrl.experience.rollout import Rollout
from tfrl.networks.weights import torso_vectors
from tfrl.ops.graph import compiled, graph, tf
from tfrl.workers import machine
from tfrl.workers.data_parallel import DataParallel, GradientStep
from tfrl.workers.strategy import Runtime

if TYPE_CHECKING:
    from tfrl.networks.actor_critic import ActorCritic

_VALUE_ROWS = 256  # of each part of a pass of values in runs of one topology: it halves their time


@dataclass(frozen=True)
class Rollouts(ScheduledLearning):
    """The hyperparameters of algorithms that learn from each rollout in one update."""

    num_envs: Annotated[int, ENVS] = 64
    num_steps: Annotated[int, COUNT] = 256
    """Length of a rollout: steps of each env (alias --update-freq). It must be divisible by
    --num-minibatches."""
    num_minibatches: Annotated[int, COUNT] = 8
    """Gradient steps in each pass over the rollout."""
    adam_epsilon: Annotated[float, POSITIVE] = 1e-5
    gamma: Annotated[float, FRACTION] = GAMMA_OF_ROLLOUTS
    entropy_coef: Annotated[float, NOT_NEGATIVE] = 0.01
    """Weight of the entropy bonus."""
    value_coef: Annotated[float, NOT_NEGATIVE] = 0.5
    """Weight of the value loss, which is half the squared error."""
    max_grad_norm: Annotated[float, POSITIVE] = 0.5
    """Clip the gradient of the mean loss of a minibatch to this global norm."""
    free_deviation: bool = False
    """The standard deviation of continuous actions does not depend on the observation. Otherwise the network
    computes it from the observation."""
    normalize_rewards: bool = True
    """Divide rewards by the running standard deviation of the discounted return."""
    reward_norm_gamma: Annotated[float, FRACTION] = 0.99
    """Discount of that return. As in OpenAI Baselines, it does not follow --gamma."""
    normalize_observations: bool = False
    """Normalise vectors by their running mean and standard deviation. All workers have the same statistics,
    and the policy contains them."""
    normalize_random_steps: Annotated[int, NATURAL] = 0
    """Take the mean and deviation of --normalize-observations only from this many env steps of random actions
    before training. 0: from all rollouts so far."""


@dataclass(frozen=True)
class RolloutSettings(NetworkSettings, Rollouts, DistributedSettings):
    """The settings of algorithms that learn from each rollout in one update."""

    @property
    def steps_per_update(self) -> int:
        """Env steps of one update, all workers together."""
        return self.num_envs * self.num_steps

    @property
    def ineffective(self) -> dict[str, str]:
        """Settings without an effect by name, each with the reason."""
        found = super().ineffective
        return (
            found if self.normalize_rewards else found | {"reward_norm_gamma": "without --normalize-rewards"}
        )

    def make_network(self, precision: str) -> Any:
        """Makes an actor and a critic."""
        from tfrl.networks.actor_critic import ActorCritic

        return ActorCritic(self, *registry.specs(self), precision)  # type: ignore[arg-type]  # it has these settings

    def check(self) -> None:
        """Raises UserError for the first setting that cannot work on any machine."""
        super().check()
        if self.normalize_random_steps and not self.normalize_observations:
            raise UserError("--normalize-random-steps needs --normalize-observations.")
        if self.normalize_observations and self.shows_images and not registry.specs(self)[0].num_numbers:
            raise UserError(
                f"--normalize-observations is for vectors, and {self.env} has images, which the network "
                "scales itself; leave it out."
            )
        product = f"--num-envs {self.num_envs} x --num-steps {self.num_steps} = {self.steps_per_update}"
        if self.steps_per_update > MOST:
            raise UserError(f"{product} is more than {MOST}, the most env steps of one update.")
        if self.memory != "none" and self.sequence_length and self.num_steps % self.sequence_length:
            raise UserError(
                f"--sequence-length must divide --num-steps {self.num_steps}; got {self.sequence_length}."
            )


class ActorCriticAgent(Agent):
    """Actor, critic and their gradient steps under a strategy: an agent that learns from each rollout.

    A subclass has `make_steps`, `uses_xla`, `gradient_steps_per_update` and `update`.

    Attributes:
      advantages: with level replay, those of the last rollout, float32 [R, T, B], not normalised.
      gather: takes the entries with some indices along an axis (0) of each array of a nest.
    """

    _config: RolloutSettings
    network: ActorCritic
    acting: ActingActorCritic
    advantages: np.ndarray

    def __init__(self, config: RolloutSettings, runtime: Runtime) -> None:
        super().__init__(config, runtime)
        # TensorFlow gathers uint8 only on CPUs. Without XLA, each gradient step would copy a whole rollout of
        # images from the GPU to the host.
        self.gather = graph(_gather, jit_compile=True) if runtime.uses_gpu else _gather
        self.learning = DataParallel(
            runtime, self.network.initial(), self.make_steps(), compiled=self.uses_xla
        )
        on_gpu, at_once = runtime.uses_gpu, runtime.parts_at_once * runtime.local_replicas
        part_rows = _VALUE_ROWS if config.has_one_topology else None
        self._value_pass = self.network.value_pass(on_gpu=on_gpu, at_once=at_once, part_rows=part_rows)
        self._acting_weights = functools.partial(self.learning.weights, self.network.acting)
        self.acting = ActingActorCritic(
            self.network, config, self._acting_weights, on_gpu=on_gpu, at_once=at_once, runtime=runtime
        )

    def make_steps(self) -> dict[str, GradientStep]:
        """The gradient steps of the algorithm, by name."""
        raise NotImplementedError

    @property
    def uses_xla(self) -> bool:
        """True if XLA compiles the gradient steps."""
        return False

    @property
    def gradient_steps_per_update(self) -> int:
        """The number of gradient steps of an update; each has one all-reduce."""
        raise NotImplementedError

    def update(
        self, rollout: Rollout, number: int, on_step: Callable[[int], None] = lambda done: None
    ) -> dict[str, float]:
        """Learns from a rollout; a collective.

        Args:
          rollout: the steps of the envs, with normalised rewards. Its buffers are reused after the call.
          number: the number of earlier updates, which keys random numbers and decides schedules.
          on_step: called at intervals with the number of finished gradient steps.

        Returns:
          The metrics of `metric_names`, equal on every worker.

        Raises:
          TrainingError: a loss or gradient is not finite; raised on all workers at the same gradient step.
        """
        raise NotImplementedError

    def begin(self) -> None:
        """Loads the torso of --torso-weights."""
        if self._config.torso_weights is not None:
            for name, vector in torso_vectors(self.network, self._config.torso_weights).items():
                self.learning.assign(name, vector)

    # Values

    def values(
        self, observations: np.ndarray, shape: tuple[int, ...], memory: np.ndarray | None = None
    ) -> np.ndarray:
        """V of observations [..., *shape] with the present weights, float32 [...], on one device.

        A recurrent network also takes its memory [..., M].
        """
        leading = observations.shape[: observations.ndim - len(shape)]
        rows = [observations.reshape(-1, *shape)]
        rows += [] if memory is None else [memory.reshape(-1, memory.shape[-1])]
        fill = machine.filled if self._runtime.uses_gpu else np.asarray
        values = self._value(*(tf.convert_to_tensor(fill(x)) for x in rows)).numpy()
        return values[: len(rows[0])].reshape(leading)

    @compiled(reduce_retracing=True)
    def _value(self, *rows: tf.Tensor) -> tf.Tensor:
        return self._value_pass(self._acting_weights(), *rows)

    def final_values(self, rollout: Rollout) -> np.ndarray:
        """V of the last observations of truncated episodes with the present weights, float32 [R, T, B]; 0 at
        all other steps.
        """
        values = np.zeros_like(rollout.rewards)
        if rollout.final_observations:
            r, t, b = at = tuple(np.array(list(rollout.final_observations)).T)
            observations = np.stack(list(rollout.final_observations.values()))
            memory = None if rollout.memory is None else rollout.memory[r, t + 1, b]
            values[at] = self.values(observations, rollout.observations.shape[3:], memory)
        return values

    def last_values(self, rollout: Rollout) -> np.ndarray:
        """V(o_T) with the present weights, float32 [R, B]."""
        memory = rollout.started_memory[:, -1] if rollout.memory is not None else None
        return self.values(rollout.observations[:, -1], rollout.observations.shape[3:], memory)

    def set_observation_scaling(self, mean: np.ndarray, scale: np.ndarray) -> None:
        """Sets the constants of clip((o - mean) * scale, -10, 10), float32 [K] each, for the K numbers of an
        observation; `scale` is 1 / standard deviation.
        """
        vector = self.network.functions["observations"].join({"mean": mean, "scale": scale})
        self.learning.assign("observations", vector)
        self.acting.forget_weights()


def _gather(arrays: Any, indices: tf.Tensor, axis: int = 0) -> Any:
    return tf.nest.map_structure(lambda x: tf.gather(x, indices, axis=axis), arrays)


def flat(x: tf.Tensor) -> tf.Tensor:
    """Reshapes [T, B, ...] to [T * B, ...]."""
    return tf.reshape(x, (-1, *x.shape[2:]))


def units_of_part(units: int, rows_each: int, max_rows: int) -> int:
    """The number of units, such as whole sequences, of a part.

    It divides `units`. A part has at most `max_rows` rows, but at least one unit.
    """
    most = max(1, max_rows // rows_each)
    return max(d for d in range(1, min(most, units) + 1) if units % d == 0)
