"""Networks as pure functions of their weights, in one form for all algorithms.

The weights of a network are one float32 vector. A target network is another vector, an optimizer's step is
one operation, and a sum over replicas has few tensors. Keras builds the layers and their initial weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from resnet.operations import portable
from tfrl.envs.observations import ArraySpec
from tfrl.envs.spec import ActionSpec, Discrete
from tfrl.networks import entrance
from tfrl.networks.distributions import TanhNormalActions, distribution_for
from tfrl.ops.graph import graph, is_for_xla
from tfrl.workers import machine
from tfrl.workers.data_parallel import Weights

# Arrays begin at multiples of 64 bytes: TensorFlow then splits the vector without copying.
_ALIGNMENT = 16


def _rows_of_own_torsos() -> int:
    """The rows of every part of a forward pass of a user's torso on CPUs.

    Another number of rows may change the order of a layer's sums, and so the last bits. On a CPU with
    AVX2 alone, the bits of a row also depended on its place in a part of 8, 12, 16 or 32 rows, but not of 4.
    """
    return 8 if "avx512f" in machine.cpuinfo("flags").split() else 4


class Head(keras.layers.Dense):
    """A float32 linear layer that computes each row in the same way, whatever the batch size.

    A matrix product orders its sums by the batch size. So 32 envs on one replica would round differently than
    16 envs on each of two replicas, and the runs would differ after some dozens of updates. A separate sum
    for each output is cheap, because a head has few outputs. A matrix product (`by_row=False`) is faster.
    Critics that only learn use it, because their parts of a batch always have the same size.
    """

    def __init__(
        self, units: int, *, features: int, gain: float, seed: int, name: str = "head", by_row: bool = True
    ) -> None:
        self._by_row = by_row
        initializer = keras.initializers.Orthogonal(gain, seed=seed)
        super().__init__(units, kernel_initializer=initializer, dtype="float32", name=name)
        self.build((None, features))

    def call(self, features: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """Outputs float32 [B, units] from features float32 [B, D]."""
        if not self._by_row:
            return tf.matmul(features, self.kernel) + self.bias
        return _product_by_row(features, tf.convert_to_tensor(self.kernel)) + self.bias


@tf.custom_gradient
def _product_by_row(
    features: tf.Tensor, kernel: tf.Tensor
) -> tuple[tf.Tensor, Callable[[tf.Tensor], Sequence[tf.Tensor]]]:
    """The product of features [B, D] and a kernel [D, units] as separate sums.

    Its gradients are matrix products, which are faster: parts of a batch always have the same size.
    """

    def gradient(upstream: tf.Tensor) -> Sequence[tf.Tensor]:
        of_features = tf.matmul(upstream, kernel, transpose_b=True)
        return of_features, tf.matmul(features, upstream, transpose_a=True)

    products = features[:, None, :] * tf.transpose(kernel)  # [B, units, D]
    return tf.reduce_sum(products, axis=-1), gradient


class Packing:
    """The layout of arrays in one float32 vector.

    Args:
      variables: Keras variables, which give shapes, names and initial values.

    Attributes:
      names: the names of the arrays, in the order of the vector.
      num_parameters: the number of values of all arrays.
      size: the length of the vector, which has some zeros between the arrays.
    """

    def __init__(self, variables: Sequence[keras.Variable]) -> None:
        self._variables = list(variables)
        self.names = [entrance.variable_name(v) for v in self._variables]
        self._shapes = [tuple(v.shape) for v in self._variables]
        self._lengths = [int(np.prod(shape)) for shape in self._shapes]
        self._padding = [-length % _ALIGNMENT for length in self._lengths]
        self.num_parameters = sum(self._lengths)
        # At least one value, because workers hang or crash if they get an empty tensor.
        self.size = max(_ALIGNMENT, self.num_parameters + sum(self._padding))

    def arrays(self, vector: tf.Tensor) -> list[tf.Tensor]:
        """The arrays of one vector, in the order of `names`."""
        if not self.names:  # for example, a torso that only flattens
            return []
        sizes = [n for pair in zip(self._lengths, self._padding, strict=True) for n in pair]

        @tf.custom_gradient
        def split(vector: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., tf.Tensor]]:
            flat = tf.split(vector, sizes)[::2]
            found = [tf.reshape(part, shape) for part, shape in zip(flat, self._shapes, strict=True)]
            return found, lambda *gradients: self.vector(gradients)

        return split(vector)

    def vector(self, arrays: Sequence[tf.Tensor]) -> tf.Tensor:
        """The vector of tensors in the order of `names`; the inverse of `arrays`."""
        with_convolutions = any(len(shape) > 2 for shape in self._shapes)  # no XLA on CPUs
        if with_convolutions or not is_for_xla():
            pairs = zip(arrays, self._padding, strict=True)
            return tf.concat([one for a, n in pairs for one in (tf.reshape(a, [-1]), tf.zeros(n))], axis=0)
        # On CPUs XLA computes a `tf.concat` value by value, so each array is written into the vector, in a
        # tenth of the time. Elsewhere this takes five times as long as a `tf.concat`.
        vector, begin = tf.zeros(self.size), 0
        for array, length, padding in zip(arrays, self._lengths, self._padding, strict=True):
            vector = tf.raw_ops.TensorStridedSliceUpdate(
                input=vector,
                begin=[begin],
                end=[begin + length],
                strides=[1],
                value=tf.reshape(array, [-1]),
            )
            begin += length + padding
        return vector

    def initial(self) -> np.ndarray:
        """The initial values of the variables, float32 [size]."""
        return self.join({name: v.numpy() for name, v in zip(self.names, self._variables, strict=True)})

    def join(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """One vector from arrays by name. Raises ValueError if they belong to another network."""
        odd = sorted({*self.names} ^ arrays.keys())
        if odd:
            raise ValueError(f"the weights belong to another network: {odd[0]} is in only one of the two")
        flat = [] if self.names else [np.zeros(self.size)]
        for name, shape, padding in zip(self.names, self._shapes, self._padding, strict=True):
            if arrays[name].shape != shape:
                shapes = f"{arrays[name].shape}, the network needs {shape}"
                raise ValueError(f"the weights belong to another network: {name} has shape {shapes}")
            flat += [arrays[name].reshape(-1), np.zeros(padding)]
        return np.concatenate(flat).astype(np.float32)

    def split(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays of one vector by name."""
        found, begin = {}, 0
        for name, shape, length, padding in zip(
            self.names, self._shapes, self._lengths, self._padding, strict=True
        ):
            found[name] = vector[begin : begin + length].reshape(shape)
            begin += length + padding
        return found


class Functional(Packing):
    """Calls a Keras layer or model with given weights.

    Args:
      layer: a built layer or model without state besides its trained weights; batch normalization has such
        state.

    Attributes:
      layer: the same.
      layers: its layers and operations, and those of its inner models, in order.
    """

    def __init__(self, layer: keras.layers.Layer) -> None:
        self.layers = entrance.layers_of(layer)
        for one in self.layers:
            if getattr(one, "non_trainable_variables", ()):
                raise ValueError(
                    f"{one.name} has state besides its trained weights, like batch normalization or dropout, "
                    "so its results for an observation would change; remove this layer (ppo has --dropout)"
                )
        super().__init__(layer.trainable_variables)
        self.layer = layer

    def __call__(self, weights: tf.Tensor, *inputs: tf.Tensor) -> Any:
        """The layer's outputs with weights float32 [size]."""
        arguments = inputs[0] if len(inputs) == 1 else list(inputs)
        return self.layer.stateless_call(self.arrays(weights), [], arguments)[0]


# Networks


class Network:
    """The networks of an algorithm by name; a base class.

    The first output is the parameters of a distribution over actions. A network whose outputs are something
    else overrides the methods that choose actions; one with several outputs overrides `outputs`.

    Args:
      layers: Keras layers or models by name.
      acting: the names of the networks that `outputs` calls.
      observation_spec, action_spec: of the env.
      signature: the shapes and dtypes of `outputs` for one observation; None: those of the acting model.

    Attributes:
      entrance: unpacks the observations.
      distribution: makes the policy's distribution from the first output.
      functions: the layers as functions of weight vectors.
      noise_size: K, the number of random numbers of one action.
      has_probabilities: True if there are only a few actions, whose probabilities videos can show.
      fixed_rows: the number of rows of every part of a forward pass on CPUs; None: it depends on the batch.
      compiled_rows: the number of rows of a part that XLA compiles; None if it is not compiled.
      state_size: S, the size of a recurrent network's state, which is its last output; otherwise 0.
      memory_size: M, the size of the memory input of a recurrent network; otherwise 0.
    """

    compiled_rows: int | None = None
    state_size = 0
    memory_size = 0

    def __init__(
        self,
        layers: Mapping[str, keras.layers.Layer],
        *,
        acting: Sequence[str],
        observation_spec: ArraySpec,
        action_spec: ActionSpec,
        signature: Sequence[tf.TensorSpec] | None = None,
    ) -> None:
        self.entrance = entrance.Entrance(observation_spec)
        self.distribution = distribution_for(action_spec)
        self.noise_size = self.distribution.noise_size
        self.has_probabilities = isinstance(action_spec, Discrete)
        self.functions = {name: Functional(layer) for name, layer in layers.items()}
        of_all = (one for function in self.functions.values() for one in function.layers)
        is_own = any(one.name == entrance.OWN_FEATURES for one in of_all)
        self.fixed_rows = _rows_of_own_torsos() if is_own else None
        self.acting = tuple(acting)
        self._signature = signature or [tf.TensorSpec([layers[acting[0]].output_shape[-1]])]

    def outputs(self, weights: Weights, observations: tf.Tensor) -> Sequence[tf.Tensor]:
        """The outputs that decide actions, [B, ...] each, for observations [B, *shape]."""
        (name,) = self.acting
        return [self.entrance.mask(observations, self.functions[name](weights[name], observations))]

    def graph_def(self) -> Any:
        """The graph of the outputs that decide actions, a TensorFlow GraphDef."""
        weights = {name: tf.TensorSpec(vector.shape, tf.float32) for name, vector in self.initial().items()}
        spec = self.entrance.spec
        inputs = [tf.TensorSpec((None, *spec.shape), spec.dtype, "observations")]
        if self.memory_size:
            inputs.append(tf.TensorSpec((None, self.memory_size), tf.float32, "memory"))
        with portable():  # operations that a reader knows
            traced = graph(self.outputs).get_concrete_function(weights, *inputs)
        return traced.graph.as_graph_def()

    @property
    def has_deviation(self) -> bool:
        """True if the policy of continuous actions has a standard deviation of its own."""
        return isinstance(self.distribution, TanhNormalActions)

    def draw_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """The random numbers of one env's actions, float32 [steps, K]."""
        return self.distribution.draw_noise(generator, steps)

    def draw_training_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """The random numbers of the actions of one training env, float32 [steps, K].

        A subclass may draw more numbers than `draw_noise`, such as those of dropout.
        """
        return self.draw_noise(generator, steps)

    def sample(self, outputs: Sequence[tf.Tensor], noise: tf.Tensor) -> tf.Tensor:
        """Actions [B, *shape] drawn with noise float32 [B, K]."""
        return self.distribution(outputs[0]).sample(noise)

    def greedy(self, outputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """The most likely, or best, actions [B, *shape]."""
        return self.distribution(outputs[0]).mode()

    def probabilities(self, outputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """The probability of each of a few actions, float32 [B, A]."""
        return tf.nn.softmax(outputs[0])

    def exported(self, outputs: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
        """The outputs of the SavedModel by name: the best `action`, and the distribution's parameters."""
        name = "logits" if self.has_probabilities else "parameters"
        return {"action": self.greedy(outputs), name: outputs[0]}

    def forward_pass(self, *, on_gpu: bool, at_once: int) -> Callable[..., Sequence[tf.Tensor]]:
        """Returns `outputs` for acting; CPUs compute it in parts, `at_once` at a time."""
        return self.in_parts(self.outputs, self._signature, on_gpu=on_gpu, at_once=at_once)

    def in_parts(
        self,
        function: Callable[..., Sequence[tf.Tensor]],
        signature: Sequence[tf.TensorSpec],
        *,
        on_gpu: bool,
        at_once: int,
        part_rows: int | None = None,
    ) -> Callable[..., Sequence[tf.Tensor]]:
        """Returns a function of weights and rows (such as observations) that CPUs compute in parts of a few
        rows.

        `part_rows` is the size of a compiled part; None: `compiled_rows`.
        """
        if on_gpu:
            return function
        size = part_rows or self.compiled_rows
        if size is not None:
            function = graph(function, jit_compile=True)
        return lambda weights, *rows: machine.map_rows(
            lambda part: function(weights, *part), rows, signature, at_once, size or self.fixed_rows
        )

    # Tables and pictures

    @property
    def models(self) -> dict[str, keras.Model]:
        """The networks as Keras models by name, for tables and pictures of their layers."""
        found = {name: function.layer for name, function in self.functions.items()}
        return {name: renamed(layer, name) for name, layer in found.items() if isinstance(layer, keras.Model)}

    # Weights

    def initial(self) -> dict[str, np.ndarray]:
        """The initial vectors of a run."""
        return {name: function.initial() for name, function in self.functions.items()}

    def join(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The vectors from arrays by NETWORK/NAME. Raises ValueError if they belong to other networks."""
        split: dict[str, dict[str, np.ndarray]] = {name: {} for name in self.functions}
        for path, array in arrays.items():
            network, _, name = path.partition("/")
            if network not in split:
                raise ValueError(f"the weights belong to another network: {path} is in only one of the two")
            split[network][name] = array
        vectors = {}
        for network, function in self.functions.items():
            try:
                vectors[network] = function.join(split[network])
            except ValueError as error:
                raise ValueError(str(error).replace("network: ", f"network: {network}/")) from None
        return vectors

    def split(self, vectors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The arrays of all networks' vectors by NETWORK/NAME."""
        return {
            f"{network}/{name}": array
            for network, function in self.functions.items()
            for name, array in function.split(np.asarray(vectors[network])).items()
        }


def renamed(layer: Any, name: str) -> Any:
    """Renames a layer in place, but not its weights; returns the layer."""
    layer.name = name
    return layer


def seeds_of(seed: int, count: int) -> list[int]:
    """Seeds of the initial weights of `count` parts, in [0, 2^31), as Keras wants them."""
    return [int(s) for s in np.random.SeedSequence(seed).generate_state(count) >> 1]
