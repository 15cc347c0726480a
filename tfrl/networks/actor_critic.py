"""Actor and Critic: heads on torsos of the zoo, for PPO and its kin and IMPALA."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfrl.config.run import NetworkSettings, RLSettings
from tfrl.envs.observations import ArraySpec
from tfrl.envs.spec import ActionSpec
from tfrl.networks import entrance
from tfrl.networks.distributions import distribution_for
from tfrl.networks.network import Head, Network, renamed, seeds_of
from tfrl.networks.recurrent import Core, Sequences
from tfrl.workers.data_parallel import Weights

OBSERVATION_LIMIT = np.float32(10.0)
"""Standardised observations are clipped to this size."""
_COMPILED_ROWS = 32  # of each part of a small forward pass: XLA compiles it for one number of rows


class ObservationScaling(keras.layers.Layer):
    """Standardises vectors by constants that a trainer sets: clip((o - mean) * scale, -10, 10).

    One-hot vectors and flags, which follow the `size` real numbers, stay unchanged. The constants are weights
    of a network that no algorithm learns, so checkpoints, exports and every policy of the run contain them.
    """

    def __init__(self, size: int) -> None:
        super().__init__(name="observations", dtype="float32")
        self._size = size
        self.mean = keras.Variable(np.zeros(size, np.float32), name="mean")
        self.scale = keras.Variable(np.ones(size, np.float32), name="scale")
        self.built = True

    def call(self, observations: tf.Tensor) -> tf.Tensor:
        """Standardises the first K numbers of vectors float32 [B, D]."""
        rest = observations[:, self._size :]
        if rest.shape[1]:
            observations = observations[:, : self._size]
        scaled = (observations - tf.convert_to_tensor(self.mean)) * tf.convert_to_tensor(self.scale)
        scaled = tf.clip_by_value(scaled, -OBSERVATION_LIMIT, OBSERVATION_LIMIT)
        return tf.concat([scaled, rest], axis=1) if rest.shape[1] else scaled


class Actor(keras.layers.Layer):
    """Parameters of the policy's distribution, float32 [B, P], from a torso's features.

    The head starts near zero (gain 0.01), so the first policy is close to uniform or has a mean close to 0.
    With `free_parameters` F, the last F of the P parameters are separate variables that start at 0 and do not
    depend on observations, such as the deviation of continuous actions.
    """

    def __init__(self, parameters: int, *, features: int, seed: int, free_parameters: int = 0) -> None:
        super().__init__(name="actor", dtype="float32")
        self.head = Head(parameters - free_parameters, features=features, gain=0.01, seed=seed)
        self.free = None
        if free_parameters:
            self.free = keras.Variable(np.zeros(free_parameters, np.float32), name="free")
        self.built = True

    def call(self, features: tf.Tensor) -> tf.Tensor:
        """Parameters float32 [B, P] from features float32 [B, D]."""
        outputs = self.head(features)
        if self.free is None:
            return outputs
        free = tf.convert_to_tensor(self.free)
        return tf.concat([outputs, tf.broadcast_to(free, (tf.shape(outputs)[0], *free.shape))], axis=-1)


class Columns(keras.layers.Layer):
    """The head of a network whose features are the policy's parameters and the value: some of their columns.

    Args:
      begin, end: of the columns.
    """

    def __init__(self, begin: int, end: int) -> None:
        super().__init__(name="columns", dtype="float32")
        self._columns = slice(begin, end)
        self.built = True

    def call(self, features: tf.Tensor) -> tf.Tensor:
        """The columns float32 [B, N] of features float32 [B, D]."""
        return features[:, self._columns]


class ActorCriticSettings(NetworkSettings, RLSettings):
    """The settings of the networks of PPO, PPG and IMPALA."""

    free_deviation: bool
    normalize_observations: bool


class ActorCritic(Network):
    """An Actor and a Critic. A torso that they share is computed once for both.

    A recurrent network has a core behind each torso. Its methods then also take the memory of B envs, float32
    [B, M]: their states and, with --memory-inputs, encoded actions and rewards. For sequences, it is a
    `Sequences`. A network with dropout takes, in place of the memory, the factors of `dropout`; without them
    it drops nothing.

    Args:
      config: the run's settings.
      observation_spec, action_spec: of the env.
      precision: "float32", or "bfloat16" for a bfloat16 torso under float32 heads.

    Attributes:
      shared: True if actor and critic share their torso.
      dropped_size: the number of features that dropout may drop; 0 without dropout.

    Raises:
      ValueError: the zoo cannot build that torso, or it has state besides its trained weights.
    """

    def __init__(
        self,
        config: ActorCriticSettings,
        observation_spec: ArraySpec,
        action_spec: ActionSpec,
        precision: str,
    ) -> None:
        seeds = seeds_of(config.seed, 7)
        self.shared = config.share_torso
        distribution = distribution_for(action_spec)
        size = distribution.parameters_size
        torso = entrance.torso(config, observation_spec, precision, seeds[0], own_parameters=size)
        torsos = {"torso" if self.shared else "actor_torso": torso}
        if not self.shared:
            torsos["critic_torso"] = entrance.torso(
                config, observation_spec, precision, seeds[1], critic=True
            )
        features = [each.output_shape[-1] for each in torsos.values()]
        self._cores: dict[str, Core] = {}
        if config.memory != "none":
            inputs = action_spec.encoded_size + 1 if config.memory_inputs else 0
            for name, seen, core_seed in zip(torsos, features, seeds[5:], strict=False):
                self._cores[name.replace("torso", "core")] = Core(
                    config.memory,
                    config.memory_size,
                    features=seen + inputs,
                    by_row=not config.small_network,
                    length=config.sequence_length or None,
                    seed=core_seed,
                )
            features = [config.memory_size]
            self.state_size = sum(core.state_size for core in self._cores.values())
            self.memory_size = self.state_size + inputs
        self._dropout = np.float32(getattr(config, "dropout", 0.0))  # IMPALA has no dropout
        self._feature_sizes = features
        self.dropped_size = sum(features) if self._dropout else 0
        free = distribution.deviation_size if config.free_deviation else 0
        heads: dict[str, keras.layers.Layer] = {
            "actor": Actor(size, features=features[0], seed=seeds[2], free_parameters=free),
            "critic": Head(1, features=features[-1], gain=1.0, seed=seeds[3]),
        }
        if getattr(config, "has_own_heads", False):
            heads = {"actor": Columns(0, size), "critic": Columns(size, size + 1)}
        numbers = observation_spec.num_numbers
        scaled = config.normalize_observations and numbers
        constants = {"observations": ObservationScaling(numbers)} if scaled else {}
        acting = {**torsos, **self._cores, **heads}
        state = [tf.TensorSpec([self.state_size])] if self._cores else []
        super().__init__(
            {**acting, **self.further_heads(features[0], seeds[4]), **constants},
            acting=[*acting, *constants],
            signature=[tf.TensorSpec([size]), tf.TensorSpec([]), *state],
            observation_spec=observation_spec,
            action_spec=action_spec,
        )
        self._frozen = config.freeze_torso
        self.torsos = tuple(torsos)
        self.constants = tuple(constants)
        self.compiled_rows = _COMPILED_ROWS if config.small_network else None

    def further_heads(self, features: int, seed: int) -> dict[str, keras.layers.Layer]:
        """The heads that a subclass adds, by name, for the actor's features."""
        return {}

    @property
    def models(self) -> dict[str, keras.Model]:
        """Actor and critic from the inputs of their torsos to their outputs, for tables and pictures.

        With a shared torso they are one model.
        """
        heads = [n for n in self.functions if n not in (*self.torsos, *self._cores, *self.constants)]
        found = {}
        for torso in self.torsos:
            mine = [n for n in heads if self.shared or (n == "critic") == (torso == "critic_torso")]
            inputs, features = self._symbolic_features(torso)
            outputs = []
            for n in mine:
                further, seen = self._head_inputs(n, features)
                inputs += further
                outputs.append(renamed(self.functions[n].layer, n)(seen))
            name = "actor_and_critic" if self.shared else torso.removesuffix("_torso")
            found[name] = keras.Model(inputs, outputs, name=name)
        return found

    def _head_inputs(
        self, head: str, features: keras.KerasTensor
    ) -> tuple[list[keras.KerasTensor], keras.KerasTensor]:
        """The inputs of a head besides the features, and what the head takes, for `models`."""
        return [], features

    def _symbolic_features(self, torso: str) -> tuple[list[keras.KerasTensor], keras.KerasTensor]:
        """The inputs of a torso and what its heads take, for `models`."""
        model = self.functions[torso].layer
        inputs, features = list(model.inputs), model.output
        if self.constants:
            inputs = [keras.Input(x.shape[1:], dtype=x.dtype, name=x.name) for x in inputs]
            scaled = [*inputs[:-1], self.functions["observations"].layer(inputs[-1])]
            features = model(scaled if len(scaled) > 1 else scaled[0])
        core = self._cores.get(torso.replace("torso", "core"))
        if core is not None:
            further = [keras.Input((core.state_size,), name="state"), keras.Input((), name="keep")]
            if size := self.memory_size - self.state_size:
                inputs.append(keras.Input((size,), name="last_action_and_reward"))
                features = keras.layers.Concatenate(name="core_inputs")([features, inputs[-1]])
            inputs += further
            features = core([features, *further])[0]
        return inputs, features

    @property
    def learned(self) -> tuple[str, ...]:
        """The names of the networks that PPO and IMPALA learn."""
        fixed = self.constants + (self.torsos if self._frozen else ())
        return tuple(
            name for name in self.acting if name not in fixed and self.functions[name].num_parameters
        )

    # Dropout (Srivastava et al. 2014), inverted: kept features are divided by their share. The random numbers
    # are part of the noise of an action, so acting and learning drop the same features on any topology.

    def draw_training_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """The numbers of `draw_noise` and, with dropout, of each feature in [0, 1), float32 [steps, K]."""
        noise = self.draw_noise(generator, steps)
        if not self.dropped_size:
            return noise
        return np.concatenate([noise, generator.random((steps, self.dropped_size), np.float32)], axis=1)

    def split_noise(self, noise: tf.Tensor) -> tuple[tf.Tensor, tuple[tf.Tensor, ...]]:
        """The noise of the actions, and what `outputs` takes in place of a memory: the factors of dropout."""
        return noise[:, : self.noise_size], (self.factors(noise[:, self.noise_size :] >= self._dropout),)

    def kept(self, noise: np.ndarray) -> np.ndarray:
        """True for the features that stay, bool [..., D], from noise of `draw_training_noise`, [..., K]."""
        return noise[..., self.noise_size :] >= self._dropout

    def factors(self, kept: tf.Tensor) -> tf.Tensor:
        """The factors of the features, float32 [B, D], from bool [B, D]: 0 for those that are dropped."""
        return tf.cast(kept, tf.float32) * (1.0 / (1.0 - self._dropout))

    def outputs(
        self, weights: Weights, observations: tf.Tensor, memory: tf.Tensor | Sequences | None = None
    ) -> Sequence[tf.Tensor]:
        """Distribution parameters float32 [B, P] and values float32 [B] of observations [B, *shape].

        A recurrent network's last output is the state after the last step, float32 [B, S], or [n, S] of n
        `Sequences`.
        """
        actor_features, critic_features, *state = self.both_features(weights, observations, memory)
        functions = self.functions
        parameters = self.entrance.mask(observations, functions["actor"](weights["actor"], actor_features))
        return parameters, functions["critic"](weights["critic"], critic_features)[:, 0], *state

    def both_features(
        self, weights: Weights, observations: tf.Tensor, memory: tf.Tensor | Sequences | None
    ) -> Sequence[tf.Tensor]:
        """The features of actor and critic, float32 [B, D] each, and a recurrent network's last state."""
        inputs = self.inputs(weights, observations)
        of_actor, *actor_state = self.features(weights, "actor", inputs, memory)
        if self.shared:
            return of_actor, of_actor, *actor_state
        of_critic, *critic_state = self.features(weights, "critic", inputs, memory)
        states = [*actor_state, *critic_state]
        return of_actor, of_critic, *([tf.concat(states, axis=-1)] if states else [])

    def inputs(self, weights: Weights, observations: tf.Tensor) -> list[tf.Tensor]:
        """The inputs of the torsos: unpacked and standardised observations."""
        inputs = self.entrance.inputs(observations)
        if self.constants:
            inputs[-1] = self.functions["observations"](weights["observations"], inputs[-1])
        return inputs

    def features(
        self,
        weights: Weights,
        of: str,
        inputs: Sequence[tf.Tensor],
        memory: tf.Tensor | Sequences | None = None,
    ) -> Sequence[tf.Tensor]:
        """Features [B, D] of `inputs` for `actor` or `critic`, and the last state of its core."""
        name = "torso" if self.shared else f"{of}_torso"
        features = self.functions[name](weights[name], *inputs)
        if self.dropped_size and memory is not None:
            part = tf.split(memory, self._feature_sizes, axis=1)[self.torsos.index(name)]
            return (features * part,)
        if not self._cores or memory is None:
            return (features,)
        core = name.replace("torso", "core")
        if not isinstance(memory, Sequences):
            keep = tf.ones_like(memory[:, 0])
            memory = Sequences(memory[:, : self.state_size], keep, memory[:, self.state_size :])
        states = tf.split(memory.state, len(self._cores), axis=-1)
        state = states[list(self._cores).index(core)]
        inputs = tf.concat([tf.cast(features, tf.float32), memory.inputs], axis=-1)
        return self.functions[core](weights[core], inputs, state, memory.keep)

    def sequences(self, memory: tf.Tensor, keep: tf.Tensor, count: int) -> Sequences:
        """`Sequences` from the memory before each step, float32 [U * n, M]; `count` is n."""
        return Sequences(memory[:count, : self.state_size], keep, memory[:, self.state_size :])

    def output_pass(
        self, place: int, *, on_gpu: bool, at_once: int, part_rows: int | None = None
    ) -> Callable[..., tf.Tensor]:
        """Returns the output at this place of `outputs`, in parts; `part_rows` is that of `in_parts`.

        TensorFlow does not compute what only the other outputs need, such as a critic's own torso.
        """
        of_rows = self.in_parts(
            lambda weights, *rows: [self.outputs(weights, *rows)[place]],
            [self._signature[place]],
            on_gpu=on_gpu,
            at_once=at_once,
            part_rows=part_rows,
        )
        return lambda weights, *rows: of_rows(weights, *rows)[0]

    def value_pass(
        self, *, on_gpu: bool, at_once: int, part_rows: int | None = None
    ) -> Callable[..., tf.Tensor]:
        """Returns the values, in parts; `part_rows` is that of `in_parts`, for small networks."""
        if self.compiled_rows is not None:
            return self.output_pass(1, on_gpu=on_gpu, at_once=at_once, part_rows=part_rows)
        # Without the policy's head, convolutions round differently.
        forward = self.forward_pass(on_gpu=on_gpu, at_once=at_once)
        return lambda weights, *rows: forward(weights, *rows)[1]

    def exported(self, outputs: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
        """The most likely `action`, the distribution's parameters and the `value`; for a recurrent network,
        its `state`.

        The state is float32 [B, M]. With --memory-inputs it contains the action, and 0 for its reward.
        """
        found = super().exported(outputs) | {"value": outputs[1]}
        if not self._cores:
            return found
        state = outputs[2]
        if self.memory_size > self.state_size:
            coded = self.distribution.encoded(found["action"])
            state = tf.concat([state, coded, tf.zeros_like(coded[:, :1])], axis=-1)
        return found | {"state": state}


class DecoupledSettings(ActorCriticSettings):
    """The settings of the networks of DAAC and IDAAC."""

    order_coef: float
    order_hidden: int


class DecoupledActorCritic(ActorCritic):
    """An Actor and a Critic with a torso each, and heads that only learn (Raileanu and Fergus 2021,
    arXiv:2102.10330): `advantage` predicts the advantage of an action from the policy's features, and `order`
    classifies which of two observations came first, if `order_coef` is not 0.
    """

    def __init__(
        self,
        config: DecoupledSettings,
        observation_spec: ArraySpec,
        action_spec: ActionSpec,
        precision: str,
    ) -> None:
        self._action_size = action_spec.encoded_size
        self._order_hidden = config.order_hidden if config.order_coef else None
        super().__init__(config, observation_spec, action_spec, precision)

    def further_heads(self, features: int, seed: int) -> dict[str, keras.layers.Layer]:
        """The advantage head, and the classifier."""
        first, *others = seeds_of(seed, 3)
        heads: dict[str, keras.layers.Layer] = {
            "advantage": Head(1, features=features + self._action_size, gain=1.0, seed=first)
        }
        if self._order_hidden is not None:
            heads["order"] = _order_classifier(2 * features, self._order_hidden, others)
        return heads

    def _head_inputs(
        self, head: str, features: keras.KerasTensor
    ) -> tuple[list[keras.KerasTensor], keras.KerasTensor]:
        """As in `ActorCritic`: `advantage` also takes an encoded action, `order` other features."""
        if head not in ("advantage", "order"):
            return [], features
        if head == "advantage":
            further = keras.Input((self._action_size,), name="action")
        else:
            further = keras.Input(features.shape[1:], name="other_features")
        return [further], keras.layers.Concatenate(name=f"{head}_inputs")([features, further])

    @property
    def value_networks(self) -> frozenset[str]:
        """The names of the networks that only the critic uses."""
        return frozenset(name for name in self.acting if name.startswith("critic"))

    def actor_features(
        self, weights: Weights, observations: tf.Tensor, memory: tf.Tensor | Sequences | None
    ) -> Sequence[tf.Tensor]:
        """The policy's features, float32 [B, D], of observations [B, *shape], and a last state."""
        features, *state = self.features(weights, "actor", self.inputs(weights, observations), memory)
        return tf.cast(features, tf.float32), *state

    def policy_parameters(self, weights: Weights, observations: tf.Tensor, features: tf.Tensor) -> tf.Tensor:
        """The distribution's parameters, float32 [B, P], from the policy's features of observations."""
        return self.entrance.mask(observations, self.functions["actor"](weights["actor"], features))

    def critic_values(
        self, weights: Weights, observations: tf.Tensor, memory: tf.Tensor | Sequences | None
    ) -> tf.Tensor:
        """The values of observations [B, *shape], float32 [B]."""
        features, *_ = self.features(weights, "critic", self.inputs(weights, observations), memory)
        return self.functions["critic"](weights["critic"], features)[:, 0]


def _order_classifier(features: int, hidden: int, seeds: Sequence[int]) -> keras.Model:
    """Two logits from the features of two observations, by a hidden layer (0 units: none)."""
    inputs = keras.Input((features,), dtype="float32")
    outputs = inputs
    if hidden:
        outputs = Head(hidden, features=features, gain=2.0**0.5, seed=seeds[0], name="hidden")(outputs)
        outputs = keras.ops.relu(outputs)
    outputs = Head(2, features=hidden or features, gain=1.0, seed=seeds[1])(outputs)
    return keras.Model(inputs, outputs, name="order")


class PhasicActorCritic(ActorCritic):
    """An ActorCritic whose actor has an auxiliary value head (Cobbe et al. 2021, arXiv:2009.04416, fig. 1).

    If actor and critic share their torso, the gradient of the critic's head stops at its features, so it does
    not change the policy. The gradient of the auxiliary head reaches the torso.
    """

    def further_heads(self, features: int, seed: int) -> dict[str, keras.layers.Layer]:
        """The auxiliary value head."""
        return {"auxiliary": Head(1, features=features, gain=1.0, seed=seed)}

    def outputs(
        self, weights: Weights, observations: tf.Tensor, memory: tf.Tensor | Sequences | None = None
    ) -> Sequence[tf.Tensor]:
        """Distribution parameters float32 [B, P], the critic's values float32 [B], and a last state."""
        parameters, values, _, *state = self.with_auxiliary(weights, observations, memory)
        return parameters, values, *state

    def with_auxiliary(
        self, weights: Weights, observations: tf.Tensor, memory: tf.Tensor | Sequences | None = None
    ) -> Sequence[tf.Tensor]:
        """Distribution parameters float32 [B, P], the critic's values and the auxiliary head's, float32 [B]
        each, and a last state. Without the weights of the auxiliary head, its values are 0.
        """
        features, seen, *state = self.both_features(weights, observations, memory)
        seen = tf.stop_gradient(seen) if self.shared else seen
        values = self.functions["critic"](weights["critic"], seen)[:, 0]
        auxiliary = tf.zeros_like(values)
        if "auxiliary" in weights:
            auxiliary = self.functions["auxiliary"](weights["auxiliary"], features)[:, 0]
        parameters = self.functions["actor"](weights["actor"], features)
        return self.entrance.mask(observations, parameters), values, auxiliary, *state
