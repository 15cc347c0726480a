"""The recurrent core of a network: an LSTM or a GRU between a torso and the heads.

One matrix product takes the inputs of all steps. Only the product with the hidden state is computed step by
step. One product of all steps also gives the gradients of the weights (`_unroll`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf


class Sequences(NamedTuple):
    """The arrays that a recurrent network takes beside the observations of n sequences of U steps.

    Rows are in the order of time; the first steps of all sequences are first.

    Attributes:
      state: float32 [n, S], the states before the first steps.
      keep: float32 [U * n], 0 at the first step of an episode, where the state is reset, otherwise 1.
      inputs: float32 [U * n, I], the encoded previous actions and rewards; I may be 0.
    """

    state: tf.Tensor
    keep: tf.Tensor
    inputs: tf.Tensor


def _lstm(inputs: tf.Tensor, products: tf.Tensor, state: tf.Tensor) -> tf.Tensor:
    """An LSTM's step (Hochreiter and Schmidhuber 1997) with a forget gate (Gers et al. 2000).

        i, f, o = sigmoid(.),   g = tanh(.),   c' = f c + i g,   h' = o tanh(c')        state = [h, c]

    Args:
      inputs, products: float32 [n, 4 H]: x W + b and h U, in the order i, f, g, o.
      state: float32 [n, 2 H].
    """
    i, f, g, o = tf.split(inputs + products, 4, axis=-1)
    _, cell = tf.split(state, 2, axis=-1)
    cell = tf.sigmoid(f) * cell + tf.sigmoid(i) * tf.tanh(g)
    return tf.concat([tf.sigmoid(o) * tf.tanh(cell), cell], axis=-1)


def _gru(inputs: tf.Tensor, products: tf.Tensor, state: tf.Tensor) -> tf.Tensor:
    """A GRU's step (Cho et al. 2014, arXiv:1406.1078), which resets after the product, as cuDNN does.

        z, r = sigmoid(.),   g = tanh(x W_g + b_g + r (h U_g)),   h' = z h + (1 - z) g       state = h

    Args:
      inputs, products: float32 [n, 3 H]: x W + b and h U, in the order z, r, g.
      state: float32 [n, H].
    """
    (z, r, g), (pz, pr, pg) = tf.split(inputs, 3, axis=-1), tf.split(products, 3, axis=-1)
    z, r = tf.sigmoid(z + pz), tf.sigmoid(r + pr)
    return z * state + (1.0 - z) * tf.tanh(g + r * pg)


class _Kind(NamedTuple):
    step: Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]
    gates: int
    states: int  # number of vectors of size H in the state


_KINDS = {"lstm": _Kind(_lstm, gates=4, states=2), "gru": _Kind(_gru, gates=3, states=1)}


class Core(keras.layers.Layer):
    """A recurrent layer over sequences, in float32.

    Args:
      kind: "lstm" or "gru".
      units: H, the size of the hidden state, which is the output.
      features: D, the size of the inputs.
      by_row: the results of a single step do not depend on the batch size (see `dense` of
        `resnet.networks.Layers`); not needed if XLA compiles one number of rows.
      seed: decides the initial weights.
      length: the number of steps of truncated backpropagation; None: all steps.

    Attributes:
      state_size: S, the size of its state.
    """

    def __init__(
        self,
        kind: str,
        units: int,
        *,
        features: int,
        by_row: bool,
        seed: int,
        length: int | None = None,
        name: str = "core",
    ) -> None:
        super().__init__(name=name, dtype="float32")
        self._kind, self.units, self._by_row, self._length = _KINDS[kind], units, by_row, length
        self.state_size = self._kind.states * units
        gates = self._kind.gates
        orthogonal = [keras.initializers.Orthogonal(seed=seed + k)((units, units)) for k in range(gates)]
        kernel = keras.initializers.GlorotUniform(seed=seed)((features, gates * units))
        bias = np.zeros(gates * units, np.float32)
        if kind == "lstm":
            bias[units : 2 * units] = 1.0  # bias of the forget gate (Jozefowicz et al. 2015)
        self.kernel = keras.Variable(kernel, name="kernel")
        self.recurrent = keras.Variable(np.concatenate(orthogonal, axis=1), name="recurrent_kernel")
        self.bias = keras.Variable(bias, name="bias")
        self.built = True

    def compute_output_spec(
        self, arguments: list[keras.KerasTensor]
    ) -> tuple[keras.KerasTensor, keras.KerasTensor]:
        """The shapes of the outputs, for Keras models, which do not know the number of steps."""
        features, state, _ = arguments
        return keras.KerasTensor((features.shape[0], self.units)), keras.KerasTensor(state.shape)

    def call(self, arguments: list[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        """The hidden states of all steps, float32 [U * n, H], and the last states, float32 [n, S].

        Args:
          arguments: features float32 [U * n, D], and the `state` and `keep` of `Sequences`.
        """
        features, state, keep = arguments
        kernel, recurrent, bias = map(tf.convert_to_tensor, (self.kernel, self.recurrent, self.bias))
        steps = _steps(features, state)
        product = _by_row if self._by_row and steps == 1 else tf.matmul
        inputs = product(features, kernel) + bias
        shape = (steps, -1, inputs.shape[-1])
        keep = tf.reshape(keep, (steps, -1, 1))
        states = _unroll(
            self._kind.step, tf.reshape(inputs, shape), recurrent, state, keep, product, self._length
        )
        return tf.reshape(states[..., : self.units], (-1, self.units)), states[-1]


def _steps(features: tf.Tensor, state: tf.Tensor) -> int:
    """U; batches of any size are single steps."""
    rows, sequences = features.shape[0], state.shape[0]
    return 1 if rows is None or sequences is None else rows // sequences


def _by_row(x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    """A matrix product, [n, D] x [D, G], as a 1 x 1 convolution, which computes each row separately."""
    return tf.nn.conv2d(x[:, None, None], kernel[None, None], 1, "VALID")[:, 0, 0]


def _unroll(
    step: Callable[..., tf.Tensor],
    inputs: tf.Tensor,
    recurrent: tf.Tensor,
    state: tf.Tensor,
    keep: tf.Tensor,
    product: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    length: int | None,
) -> tf.Tensor:
    """The states after each of L steps, float32 [L, n, S].

    It defines its own gradient. TensorFlow's would add a gradient as large as the recurrent weights at every
    step.

    Args:
      step: computes the next state from x W + b, h U and the state, of which h is a part.
      inputs: x W + b of all steps, float32 [L, n, G].
      recurrent: U, float32 [H, G].
      state: the state before the first step, float32 [n, S].
      keep: float32 [L, n, 1], by which the state before each step is multiplied.
      product: of h and U.
      length: gradients stop after this number of steps; None: they never stop.
    """
    units, steps = recurrent.shape[0], inputs.shape[0]

    @tf.custom_gradient
    def unrolled(inputs: tf.Tensor, recurrent: tf.Tensor, state: tf.Tensor) -> tuple[tf.Tensor, Any]:
        def forward(before: tf.Tensor, now: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
            x, kept = now
            before = before * kept
            return step(x, product(before[:, :units], recurrent), before)

        if steps == 1:
            states = forward(state, (inputs[0], keep[0]))[None]
        else:
            states = tf.scan(forward, (inputs, keep), state)

        def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            befores = tf.concat([state[None], states[:-1]], axis=0) * keep
            hidden = befores[..., :units]
            flows = keep if length is None else keep * _flows(steps, length)

            def backward(later: tuple[tf.Tensor, ...], now: tuple[tf.Tensor, ...]) -> tuple[tf.Tensor, ...]:
                above, x, h, before, flow = now
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    products = tf.matmul(h, recurrent)
                    tape.watch([x, products, before])
                    after = step(x, products, before)
                of_x, of_products, of_before = tape.gradient(
                    after, [x, products, before], above + later[0], unconnected_gradients="zero"
                )
                of_hidden = tf.matmul(of_products, recurrent, transpose_b=True)
                of_before += tf.pad(of_hidden, [[0, 0], [0, before.shape[1] - units]])
                return of_before * flow, of_x, of_products

            nothing = (tf.zeros_like(state), tf.zeros_like(inputs[0]), tf.zeros_like(inputs[0]))
            now = (upstream, inputs, hidden, befores, flows)
            of_state, of_inputs, of_products = tf.scan(backward, now, nothing, reverse=True)
            of_recurrent = tf.matmul(
                tf.reshape(hidden, (-1, units)),
                tf.reshape(of_products, (-1, inputs.shape[-1])),
                transpose_a=True,
            )
            return of_inputs, of_recurrent, of_state[0]

        return states, gradient

    return unrolled(inputs, recurrent, state)


def _flows(steps: int, length: int) -> tf.Tensor:
    """Factors float32 [U, 1, 1]: 0 at the first step of every sequence of this length except the first,
    otherwise 1.
    """
    flows = np.ones((steps, 1, 1), np.float32)
    flows[length::length] = 0.0
    return tf.constant(flows)
