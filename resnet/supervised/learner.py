"""A classifier under a strategy: gradient steps that are the same on any number of replicas, and tests.

Losses are sums divided by the images of the global batch, gradients are summed once over replicas, and the
penalty on the weights, which all replicas share, is added after that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import resnet
from resnet.supervised.config import Config
from resnet.supervised.data import Batch
from tfrl.cli.errors import TrainingError
from tfrl.networks.weights import PREFIX, assign_weights, read_weights, weights_of
from tfrl.ops.graph import graph
from tfrl.ops.optimizers import SGD, Adam
from tfrl.run.stop import NUM_VOTES
from tfrl.workers.data_parallel import sum_parts, sum_replicas
from tfrl.workers.optimizers import VariablesOptimizer
from tfrl.workers.strategy import Runtime


class Learner:
    """A network, its optimizer, and the functions that train and test it.

    Args:
      config: the settings.
      runtime: the strategy and this worker's place in it.
      image_shape: (H, W, C).
      classes: how many.
    """

    def __init__(
        self, config: Config, runtime: Runtime, *, image_shape: tuple[int, ...], classes: int
    ) -> None:
        self._runtime = runtime
        with runtime.strategy.scope():
            self.model = build(config, runtime.precision, image_shape=image_shape, classes=classes)
            # The loss is computed from logits: the logarithm of a probability near 0 has no digits left.
            self._logits = keras.Model(self.model.input, self.model.get_layer("logits").output)
            self._variables = self.model.trainable_variables
            self._statistics = self.model.non_trainable_variables  # moving ones, of batch normalization
            optimizer = SGD(0.9) if config.optimizer == "sgd" else Adam(1e-7, uncorrected_epsilon=True)
            self._optimizer = VariablesOptimizer(optimizer, self._variables, config.lr)
        # Statistics of parts of a batch would be others than its own.
        share = config.batch_size // runtime.replicas
        self._part = share if self._statistics else runtime.micro_batch(config)

    @property
    def num_parameters(self) -> int:
        """The number of trained parameters."""
        return sum(int(np.prod(v.shape)) for v in self._variables)

    # Training

    def step(self, batch: Batch, learning_rate: float, votes: np.ndarray | None = None) -> tf.Tensor:
        """One gradient step; its sums over all replicas, float32 [2 + NUM_VOTES + 1].

        They are the mean loss (without the penalty), the share of hits, the votes (float32 [NUM_VOTES] of
        this worker) and the norm of the gradient. Reading them waits for the step, so do that later.
        """
        self._optimizer.learning_rate.assign(learning_rate)
        mine = np.zeros((self._runtime.local_replicas, NUM_VOTES), np.float32)
        mine[0] = 0.0 if votes is None else votes
        counts = np.full(len(mine), batch.count, np.float32)
        parts = (batch.images, batch.labels, batch.weights, counts, mine)
        return self._runtime.first(self._step(*(self._runtime.per_replica(p) for p in parts)))

    @graph
    def _step(self, *batch: Any) -> Any:
        return self._runtime.strategy.run(self._step_on_replica, args=batch)

    def _step_on_replica(
        self, images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor, count: tf.Tensor, votes: tf.Tensor
    ) -> tf.Tensor:
        grads, sums, moving = self._gradients(images, labels, weights, count)
        shares = [s / self._runtime.replicas for s in moving]
        *summed, sums = sum_replicas([*grads, *shares, tf.concat([sums, votes], axis=0)])
        grads, moving = summed[: len(grads)], summed[len(grads) :]
        with tf.GradientTape() as tape:
            penalty = tf.add_n(self.model.losses) if self.model.losses else tf.constant(0.0)
        penalties = tape.gradient(penalty, [v.value for v in self._variables])
        grads = [g if p is None else g + p for g, p in zip(grads, penalties, strict=True)]
        norm = self._optimizer.apply(grads)
        for variable, value in zip(self._statistics, moving, strict=True):
            variable.assign(value)
        return tf.concat([sums, [norm]], axis=0)

    def _gradients(
        self, images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor, count: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor, list[tf.Tensor]]:
        """This replica's share of the gradients and of (loss, hits), and its new moving statistics."""
        (grads, sums), moving = sum_parts(
            lambda part: self._part_gradients(*part, count),
            (images, labels, weights),
            part_rows=self._part,
            signature=(([tf.TensorSpec(v.shape) for v in self._variables], tf.TensorSpec([2])), []),
            at_once=1,  # one part's activations in memory at a time
        )
        return grads, sums, [value[0] for value in moving]  # of the only part: others have none

    def _part_gradients(
        self, images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor, count: tf.Tensor
    ) -> tuple[tuple[list[tf.Tensor], tf.Tensor], list[tf.Tensor]]:
        # The scope keeps what batch normalization would assign to one replica's variables alone.
        with tf.GradientTape() as tape, keras.StatelessScope() as scope:
            logits = self._logits(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_sum(weights * losses) / count
        grads = tape.gradient(loss, [v.value for v in self._variables])
        hits = tf.reduce_sum(weights * _hits(labels, logits)) / count
        return (grads, tf.stack([loss, hits])), [scope.get_current_value(v) for v in self._statistics]

    # Testing

    def test(self, batches: Iterable[Batch]) -> tuple[float, int]:
        """Mean loss and number of hits on all of this and the other workers' batches."""
        return test(self._runtime, self._test, batches)

    @graph
    def _test(self, *batch: Any) -> Any:
        return self._runtime.strategy.run(test_sums, args=(self.model, *batch))

    # State

    def get_state(self) -> dict[str, np.ndarray]:
        """Weights and optimizer as arrays, the same on every worker."""
        weights = {f"{PREFIX}{k}": v for k, v in get_weights(self.model).items()}
        return weights | self._optimizer.get_state()

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from arrays of `get_state`. Raises ValueError if they belong to another network."""
        set_weights(self.model, weights_of(state))
        self._optimizer.set_state(state)


def build(config: Config, precision: str, *, image_shape: tuple[int, ...], classes: int) -> keras.Model:
    """The classifier that the settings describe: uint8 [B, H, W, C] -> probabilities [B, classes]."""
    dtype = "mixed_bfloat16" if precision == "bfloat16" else "float32"
    return resnet.classifier(
        config.model, image_shape, classes, dtype=dtype, seed=config.seed, **config.model_options
    )


def named_variables(model: keras.Model) -> dict[str, keras.Variable]:
    """Every weight by name: torso/LAYER/WEIGHT, as in tfrl's networks, and head/logits/WEIGHT."""
    names = ("/".join(v.path.split("/")[-2:]) for v in model.variables)
    parts = (f"{'head' if name.startswith('logits/') else 'torso'}/{name}" for name in names)
    return dict(zip(parts, model.variables, strict=True))


def get_weights(model: keras.Model) -> dict[str, np.ndarray]:
    """All weights as float32 arrays."""
    return read_weights(named_variables(model))


def set_weights(model: keras.Model, weights: Mapping[str, np.ndarray]) -> None:
    """Assigns arrays from `get_weights`. Raises ValueError if names or shapes differ."""
    assign_weights(named_variables(model), weights)


def _hits(labels: tf.Tensor, scores: tf.Tensor) -> tf.Tensor:
    """1 where the class of the highest score is the label, float32 [B]."""
    return tf.cast(tf.argmax(scores, axis=1, output_type=tf.int32) == labels, tf.float32)


def test_sums(model: Any, images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """Sums over one replica's images of weight 1: loss float64, hits int64."""
    probabilities = model(images)
    of_label = tf.gather(probabilities, labels, batch_dims=1)
    losses = tf.cast(-tf.math.log(tf.maximum(of_label, 1e-37)) * weights, tf.float64)  # not log(0)
    hits = tf.cast(_hits(labels, probabilities) * weights, tf.int64)
    return tf.reduce_sum(losses), tf.reduce_sum(hits)


def test(runtime: Runtime, function: Any, batches: Iterable[Batch]) -> tuple[float, int]:
    """Mean loss and number of hits of `function`, which runs `test_sums`, over all workers' batches.

    Raises TrainingError where the loss is not a finite number.
    """
    loss, hits, count = 0.0, 0, 0
    for batch in batches:
        parts = (batch.images, batch.labels, batch.weights)
        losses, right = function(*(runtime.per_replica(p) for p in parts))
        loss += sum(float(x) for x in runtime.local_results(losses))
        hits += sum(int(x) for x in runtime.local_results(right))
        count += batch.count
    sums = runtime.sum_over_workers(np.array([loss, hits], np.float64))
    if not np.isfinite(sums[0]):
        raise TrainingError("the loss on the test images is not a finite number")
    return float(sums[0]) / count, int(sums[1])
