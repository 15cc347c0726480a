"""A classifier under a strategy: equal gradient steps on any number of replicas, tests and exports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import resnet
from resnet.supervised.config import Config
from resnet.supervised.data import Batch
from tfrl.cli.errors import TrainingError
from tfrl.networks.entrance import variable_name
from tfrl.networks.network import Packing
from tfrl.networks.weights import PREFIX, weights_of
from tfrl.ops.graph import compiled
from tfrl.ops.optimizers import SGD, Adam
from tfrl.run import files
from tfrl.run.checkpoint import encode
from tfrl.run.stop import NUM_VOTES
from tfrl.workers.data_parallel import DataParallel, GradientStep, Losses, Weights
from tfrl.workers.strategy import Runtime

WEIGHTS_FILE = "weights.npz"
KERAS_FILE = "model.keras"
SAVED_MODEL = "saved_model"


class Classifier:
    """A network for images of shape (H, W, C), its optimizer, and the functions that train and test it."""

    def __init__(
        self, config: Config, runtime: Runtime, *, image_shape: tuple[int, ...], classes: int
    ) -> None:
        self._runtime = runtime
        self._image_shape = image_shape
        self._build = partial(build, config, runtime.precision, image_shape=image_shape, classes=classes)
        with runtime.strategy.scope():
            self.model = self._build()
        # The loss is computed from logits, because the logarithm of a probability near 0 is not exact.
        self._logits = keras.Model(self.model.input, self.model.get_layer("logits").output)
        self._packings = {"network": Packing(self._logits.trainable_variables)}
        if self._logits.non_trainable_variables:  # moving statistics of batch normalization
            self._packings["statistics"] = Packing(self._logits.non_trainable_variables)
        moved = tuple(self._packings)[1:]
        step = GradientStep(
            learned=("network",),
            rates=(1.0,),  # the schedule's rate scales it
            loss=self._loss,
            metrics=("loss", "accuracy"),
            optimizer=SGD(0.9) if config.optimizer == "sgd" else Adam(1e-7, uncorrected_epsilon=True),
            batch_rows=config.batch_size,
            # The statistics of a part would differ from those of the batch.
            part_rows=config.batch_size // runtime.replicas if moved else runtime.micro_batch(config),
            moved=moved,
        )
        vectors = {name: packing.initial() for name, packing in self._packings.items()}
        self._learning = DataParallel(runtime, vectors, {"step": step})
        self._batch_size = config.batch_size

    @property
    def num_parameters(self) -> int:
        """The number of trained parameters."""
        return self._packings["network"].num_parameters

    # Training

    def step(self, batch: Batch, learning_rate: float, votes: np.ndarray | None = None) -> tf.Tensor:
        """One gradient step. Returns sums over all replicas, float32 [2 + NUM_VOTES + 1].

        They are the mean loss (without the penalty), the share of hits, the votes (float32 [NUM_VOTES] of
        each worker) and the norm of the gradient. Reading them waits for the end of the step.
        """
        mine = np.zeros((self._runtime.local_replicas, NUM_VOTES), np.float32)
        mine[0] = 0.0 if votes is None else votes
        counts = np.full(len(mine), batch.count, np.float32)
        parts = (batch.images, batch.labels, batch.weights, counts, mine)
        rate = tf.constant(learning_rate, tf.float32)
        return self._runtime.first(self._step(*(self._runtime.per_replica(p) for p in parts), rate))

    @compiled()
    def _step(self, *batch: Any) -> Any:
        return self._runtime.strategy.run(self._step_on_replica, args=batch)

    def _step_on_replica(self, *batch: tf.Tensor) -> tf.Tensor:
        images, labels, weights, count, votes, rate = batch
        rows = (images, labels, weights * (self._batch_size / count))  # a filled-up batch has fewer images
        outcome = self._learning.gradient_step("step", rows, (), rate, gathered=tf.unstack(votes))
        votes = [tf.reduce_sum(vote) for vote in outcome.gathered]
        return tf.concat([outcome.means, votes, [outcome.norm]], axis=0)

    def _loss(self, weights: Weights, rows: tuple[tf.Tensor, ...], _shared: Any) -> Losses:
        """The loss of each image plus the penalty on the weights; rows are images, labels and weights."""
        images, labels, shares = rows
        logits, state, penalties = self._logits.stateless_call(
            *self._arrays(weights), images, training=True, return_losses=True
        )
        losses = shares * tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        hits = shares * _hits(labels, logits)
        penalty = tf.add_n(penalties) if penalties else 0.0
        moved = {name: self._packings[name].vector(state) for name in self._packings if name != "network"}
        return Losses(losses + penalty, {"loss": losses, "accuracy": hits}, moved=moved)

    def _arrays(self, weights: Weights) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The trained arrays and the statistics."""
        arrays = {name: packing.arrays(weights[name]) for name, packing in self._packings.items()}
        return arrays["network"], arrays.get("statistics", [])

    # Testing

    def test(self, batches: Iterable[Batch]) -> tuple[float, int]:
        """Mean loss and number of hits on the batches of all workers.

        Raises TrainingError if the loss is not a finite number.
        """
        runtime, loss, hits, count = self._runtime, 0.0, 0, 0
        for batch in batches:
            parts = (batch.images, batch.labels, batch.weights)
            losses, right = self._test(*(runtime.per_replica(p) for p in parts))
            loss += sum(float(x) for x in runtime.local_results(losses))
            hits += sum(int(x) for x in runtime.local_results(right))
            count += batch.count
        sums = runtime.sum_over_workers(np.array([loss, hits], np.float64))
        if not np.isfinite(sums[0]):
            raise TrainingError("the loss on the test images is not a finite number")
        return float(sums[0]) / count, int(sums[1])

    @compiled()
    def _test(self, *batch: Any) -> Any:
        return self._runtime.strategy.run(self._test_on_replica, args=batch)

    def _test_on_replica(
        self, images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sums over one replica's images of weight 1: loss float64, hits int64."""
        arrays = self._arrays(self._learning.weights())
        logits, _ = self._logits.stateless_call(*arrays, images, training=False)
        probabilities = tf.nn.softmax(logits)
        of_label = tf.gather(probabilities, labels, batch_dims=1)
        losses = tf.cast(-tf.math.log(tf.maximum(of_label, 1e-37)) * weights, tf.float64)  # not log(0)
        hits = tf.cast(_hits(labels, probabilities) * weights, tf.int64)
        return tf.reduce_sum(losses), tf.reduce_sum(hits)

    # State

    def weights(self) -> dict[str, np.ndarray]:
        """All weights as float32 arrays, by the names of `build`."""
        vectors = self._learning.vectors()
        return {n: a for key, p in self._packings.items() for n, a in p.split(vectors[key]).items()}

    def get_state(self) -> dict[str, np.ndarray]:
        """Weights and optimizer as arrays, the same on every worker."""
        state = self._learning.get_state()
        others = {f"agent/{name}": a for name, a in state.items() if name not in self._packings}
        return {f"{PREFIX}{name}": array for name, array in self.weights().items()} | others

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from `get_state`. Raises ValueError if the arrays belong to another network."""
        arrays = weights_of(state)
        if arrays.keys() != {name for packing in self._packings.values() for name in packing.names}:
            raise ValueError("the weights belong to another network")
        vectors = {k: p.join({name: arrays[name] for name in p.names}) for k, p in self._packings.items()}
        self._learning.set_state({n.removeprefix("agent/"): a for n, a in state.items()} | vectors)

    def export(self, directory: Path) -> None:
        """Writes `weights.npz` (float32, no pickle), `model.keras` and `saved_model/`.

        Both models map uint8 images [B, H, W, C] to probabilities float32 [B, classes]. They are made outside
        the strategy, so they load anywhere. All files are on the disk on return. Raises OSError.
        """
        weights = self.weights()
        files.make_folder(directory)
        files.write(directory / WEIGHTS_FILE, encode(weights))
        model = self._build()
        for variable in model.variables:
            variable.assign(weights[variable_name(variable)])
        with files.replacing(directory / KERAS_FILE) as staged:
            model.save(staged)
        signature = [tf.TensorSpec((None, *self._image_shape), tf.uint8, name="images")]
        with files.replacing(directory / SAVED_MODEL) as staged, files.tensorflow_writes():
            model.export(str(staged), verbose=False, input_signature=signature)


def build(config: Config, precision: str, *, image_shape: tuple[int, ...], classes: int) -> keras.Model:
    """The classifier that the settings describe: uint8 [B, H, W, C] -> probabilities [B, classes].

    The `variable_name` of a weight is torso/LAYER/WEIGHT, as in tfrl's networks, or head/logits/WEIGHT.
    """
    dtype = "mixed_bfloat16" if precision == "bfloat16" else "float32"
    model = resnet.classifier(
        config.model, image_shape, classes, dtype=dtype, seed=config.seed, **config.model_options
    )
    for variable in model.variables:
        name = variable_name(variable)
        variable.in_file = f"{'head' if name.startswith('logits/') else 'torso'}/{name}"
    return model


def _hits(labels: tf.Tensor, scores: tf.Tensor) -> tf.Tensor:
    """1 where the class of the highest score is the label, float32 [B]."""
    return tf.cast(tf.argmax(scores, axis=1, output_type=tf.int32) == labels, tf.float32)
