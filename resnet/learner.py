"""Supervised learning as a run: a classifier, rows of gradient steps, a test after each epoch."""

from __future__ import annotations

import itertools
import math
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import resnet
from resnet import data
from resnet.config import Config
from resnet.data import Dataset, ImageBatch, Share
from resnet.operations import portable
from tfrl.cli.endings import NUM_VOTES, Stopped, stop_code
from tfrl.cli.errors import TrainingError, UserError
from tfrl.cli.streams import quiet_start
from tfrl.networks.entrance import variable_name
from tfrl.networks.network import Packing
from tfrl.networks.weights import AGENT_PREFIX, PREFIX, WEIGHTS_FILE, read_start, weights_of
from tfrl.ops.graph import compiled, graph
from tfrl.ops.optimizers import SGD, Adam, Nadam, Optimizer, RMSprop, learning_rate
from tfrl.run import files, loop
from tfrl.run.checkpoint import State, encode, with_prefix
from tfrl.run.loop import Conclusion
from tfrl.run.session import Session, tensorboard
from tfrl.training.callbacks import BestPolicy, WeightSummaries
from tfrl.workers.data_parallel import DataParallel, GradientStep, Losses, Weights
from tfrl.workers.strategy import Runtime

KERAS_FILE = "model.keras"
SAVED_MODEL = "saved_model"
_SUMS = 6  # loss, accuracy, gradient norm, steps, seconds, seconds of waiting for images
_VOTES = tuple(f"vote_{k}" for k in range(NUM_VOTES))


def make_learner(config: Config, session: Session) -> ImageLearner:
    """Loads the data set and makes the learner. A collective. Raises UserError."""
    with session.watchdog.unhurried(), quiet_start():
        tell = session.console.message
        dataset = data.load_on_all(config.dataset, config.image_size, session.runtime, tell)
    return ImageLearner(config, session, dataset)


_OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD(0.9),
    "adam": Adam(1e-7, uncorrected_epsilon=True),
    "nadam": Nadam(1e-7),
    "rmsprop": RMSprop(1e-7),
}


class Classifier:
    """A network for images of shape (H, W, C), its optimizer, and the functions that train and test it.

    Raises ValueError if the network of the zoo cannot take images of this shape.
    """

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
            metrics=("loss", "accuracy", *_VOTES),
            norm="grad_norm",
            optimizer=_OPTIMIZERS[config.optimizer],
            batch_size=config.batch_size,
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

    def step(
        self, batch: ImageBatch, learning_rate: float, votes: Sequence[float] | None = None
    ) -> tf.Tensor:
        """One gradient step. Returns its results of all replicas together, float32 [2 + NUM_VOTES + 1].

        They are the mean loss (without the penalty), the share of hits, the mean of the workers' `votes`
        (NUM_VOTES numbers), and the norm of the gradient. Reading them waits for the end of the step.
        """
        counts = np.full(self._runtime.local_replicas, batch.count, np.float32)
        mine = np.zeros((*batch.labels.shape, NUM_VOTES), np.float32)
        mine[:] = 0.0 if votes is None else votes  # a metric of each image
        parts = (batch.images, batch.labels, batch.weights, mine, counts)
        rate = tf.constant(learning_rate, tf.float32)
        return self._runtime.first(self._step(*(self._runtime.per_replica(p) for p in parts), rate))

    @compiled()
    def _step(self, *batch: Any) -> Any:
        return self._runtime.strategy.run(self._step_on_replica, args=batch)

    def _step_on_replica(self, *batch: tf.Tensor) -> tf.Tensor:
        images, labels, weights, votes, count, rate = batch
        weights *= self._batch_size / count  # a filled-up batch has fewer images
        rows = (images, labels, weights, votes)
        outcome = self._learning.steps["step"].step(rows, (), rate)
        return tf.stack(list(outcome.metrics.values()))

    def _loss(self, weights: Weights, rows: tuple[tf.Tensor, ...], _shared: Any) -> Losses:
        """The loss of each image plus the penalty on the weights.

        Rows are images, labels, weights and votes.
        """
        images, labels, shares, votes = rows
        logits, state, penalties = self._logits.stateless_call(
            *self._arrays(weights), images, training=True, return_losses=True
        )
        losses = shares * tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        hits = shares * _hits(labels, logits)
        penalty = tf.add_n(penalties) if penalties else 0.0
        moved = {name: self._packings[name].vector(state) for name in self._packings if name != "network"}
        metrics = {
            "loss": losses,
            "accuracy": hits,
            **dict(zip(_VOTES, tf.unstack(votes, axis=1), strict=True)),
        }
        return Losses(losses + penalty, metrics, moved=moved)

    def _arrays(self, weights: Weights) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The trained arrays and the statistics."""
        arrays = {name: packing.arrays(weights[name]) for name, packing in self._packings.items()}
        return arrays["network"], arrays.get("statistics", [])

    # Testing

    def test(self, batches: Iterable[ImageBatch]) -> tuple[float, int]:
        """Mean loss and number of hits on the batches of all workers, as of the function `test`."""
        return test(self._runtime, self._test, batches)

    @compiled()
    def _test(self, *batch: Any) -> Any:
        return self._runtime.strategy.run(self._test_on_replica, args=batch)

    def _test_on_replica(
        self, images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        arrays = self._arrays(self._learning.weights())
        logits, _ = self._logits.stateless_call(*arrays, images, training=False)
        return scores(tf.nn.softmax(logits), labels, weights)

    # State

    def weights(self) -> dict[str, np.ndarray]:
        """All weights as float32 arrays, by the names of `build`."""
        vectors = self._learning.vectors()
        return {n: a for key, p in self._packings.items() for n, a in p.split(vectors[key]).items()}

    def get_state(self) -> dict[str, np.ndarray]:
        """Weights and optimizer as arrays, the same on every worker."""
        state = self._learning.get_state()
        others = {name: a for name, a in state.items() if name not in self._packings}
        return with_prefix(PREFIX, self.weights()) | with_prefix(AGENT_PREFIX, others)

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from `get_state`. Raises ValueError if the arrays belong to another network."""
        arrays = weights_of(state)
        if arrays.keys() != {name for packing in self._packings.values() for name in packing.names}:
            raise ValueError("the weights belong to another network")
        vectors = {k: p.join({name: arrays[name] for name in p.names}) for k, p in self._packings.items()}
        self._learning.set_state({n.removeprefix(AGENT_PREFIX): a for n, a in state.items()} | vectors)

    def begin_with(self, state: Mapping[str, np.ndarray]) -> None:
        """Begins with `get_state` of another run, or with only its weights. Raises like `set_state`."""
        self.set_state({**self.get_state(), **state})

    def graph_def(self) -> Any:
        """The graph of the network, a TensorFlow GraphDef."""
        images = tf.TensorSpec((None, *self._image_shape), tf.uint8, "images")
        return graph(lambda x: self.model(x)).get_concrete_function(images).graph.as_graph_def()

    def plain_model(self, weights: Mapping[str, np.ndarray]) -> keras.Model:
        """A model outside the strategy with these weights, by the names of `weights`."""
        model = self._build()
        assign(model, weights)
        return model

    def export(self, directory: Path) -> None:
        """Writes `weights.npz` (float32, no pickle), `model.keras` and `saved_model/`.

        Both models map uint8 images [B, H, W, C] to probabilities float32 [B, classes]. They are made outside
        the strategy, so they load anywhere. All files are on the disk on return. Raises OSError.
        """
        weights = self.weights()
        files.make_folder(directory)
        files.write(directory / WEIGHTS_FILE, encode(weights))
        model = self.plain_model(weights)
        with files.replacing(directory / KERAS_FILE) as staged:
            model.save(staged)
        signature = [tf.TensorSpec((None, *self._image_shape), tf.uint8, name="images")]
        with portable(), files.replacing(directory / SAVED_MODEL) as staged, files.tensorflow_writes():
            model.export(str(staged), verbose=False, input_signature=signature)


def assign(model: keras.Model, weights: Mapping[str, np.ndarray]) -> None:
    """Sets the weights of a model of `build`, by the names of `Classifier.weights`."""
    for variable in model.variables:
        variable.assign(weights[variable_name(variable)])


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


def test(runtime: Runtime, scores_of: Callable[..., Any], batches: Iterable[ImageBatch]) -> tuple[float, int]:
    """Mean loss and number of hits on the batches of all workers.

    `scores_of` runs `scores` on all replicas, for images, labels and weights. Raises TrainingError if the
    loss is not a finite number.
    """
    loss, hits, count = 0.0, 0, 0
    for batch in batches:
        parts = (batch.images, batch.labels, batch.weights)
        losses, right = scores_of(*(runtime.per_replica(p) for p in parts))
        loss += sum(float(x) for x in runtime.local_results(losses))
        hits += sum(int(x) for x in runtime.local_results(right))
        count += batch.count
    sums = runtime.sum_over_workers(np.array([loss, hits], np.float64))
    if not np.isfinite(sums[0]):
        raise TrainingError("the loss on the test images is not a finite number")
    return float(sums[0]) / count, int(sums[1])


def scores(probabilities: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Sums over one replica's images of weight 1: loss float64 [], hits int64 []."""
    of_label = tf.gather(probabilities, labels, batch_dims=1)
    losses = tf.cast(-tf.math.log(tf.maximum(of_label, 1e-37)) * weights, tf.float64)  # not log(0)
    hits = tf.cast(_hits(labels, probabilities) * weights, tf.int64)
    return tf.reduce_sum(losses), tf.reduce_sum(hits)


def _hits(labels: tf.Tensor, scores: tf.Tensor) -> tf.Tensor:
    """1 where the class of the highest score is the label, float32 [B]."""
    return tf.cast(tf.argmax(scores, axis=1, output_type=tf.int32) == labels, tf.float32)


class ImageLearner(loop.Learner):
    """A classifier and its labelled images. An update is a row of progress.csv: up to --log-every steps.

    It also ends at the end of an epoch, and when a checkpoint is due.
    """

    columns = (
        *("epoch", "train/loss", "train/accuracy", "train/grad_norm", "train/learning_rate"),
        *("test/loss", "test/accuracy", "time/images_per_second", "time/input_wait_fraction"),
    )
    step_column = unit = "images"

    def __init__(self, config: Config, session: Session, dataset: Dataset) -> None:
        self._config, self._session, self._dataset = config, session, dataset
        runtime = session.runtime
        self._share = Share(
            config.batch_size, runtime.worker, runtime.num_workers, replicas=runtime.local_replicas
        )
        shape, classes = dataset.image_shape, len(dataset.classes)
        try:
            self.classifier = Classifier(config, runtime, image_shape=shape, classes=classes)
        except ValueError as error:  # the zoo: an image too small for the network, say
            reason = str(error).splitlines()[0]
            raise UserError(
                f"--model {config.model} cannot be built for {config.dataset}: {reason}"
            ) from None
        self._steps_per_epoch = -(-len(dataset.train) // config.batch_size)
        steps = config.epochs * self._steps_per_epoch
        self._num_steps = min(steps, config.max_steps or steps)
        self._batches: Iterator[ImageBatch] | None = None
        self._sums = np.zeros(_SUMS)  # of the steps since the last row of metrics
        self._hits = 0  # of the last test
        self._rate = math.nan  # the learning rate that a callback has set; NaN: the schedule's
        self.callbacks = [BestPolicy(config, session, "test/accuracy")]
        if config.tensorboard_graph or config.histograms_every:
            traced = self.classifier.graph_def if config.tensorboard_graph else None
            every, channels = config.histograms_every, shape[-1:]
            self.callbacks.append(WeightSummaries(session, every=every, channels=channels, graph=traced))

    def begin(self) -> None:
        """Begins with the weights of --start-from, if it is given. A collective."""
        if self._config.start_from is None:
            return
        state, self._session.started_from = read_start(self._config, self._session)
        try:
            self.classifier.begin_with(state)
        except (ValueError, KeyError) as error:
            raise UserError(
                f"--start-from {self._config.start_from} has another network: {error}; the images must have "
                "the same size and as many classes."
            ) from None

    # How far the run is

    @property
    def steps_done(self) -> int:
        """Training images seen by all workers so far."""
        return self._images_after(self._session.step)

    @property
    def total_steps(self) -> int:
        """Training images of the whole run."""
        return self._images_after(self._num_steps)

    @property
    def place(self) -> str:
        """The gradient steps so far."""
        return f"step {self._session.step:,}"

    @property
    def is_over(self) -> bool:
        """True after the last gradient step."""
        return self._session.step >= self._num_steps

    def is_evaluation_due(self, before: tuple[int, int]) -> bool:
        """True at the end of an epoch."""
        return self._session.step % self._steps_per_epoch == 0

    def _images_after(self, steps: int) -> int:
        epochs, steps = divmod(steps, self._steps_per_epoch)
        return epochs * len(self._dataset.train) + steps * self._config.batch_size

    def _ends_a_row(self, step: int) -> bool:
        config = self._config
        ends = (self._steps_per_epoch, config.log_every, config.checkpoint_every)
        return step == self._num_steps or any(step % every == 0 for every in ends)

    # Training

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        config = self._config
        if not math.isnan(self._rate):
            return self._rate
        return learning_rate(config.schedule, config.lr, self._session.step, self._num_steps, config.warmup)

    def set_learning_rate(self, rate: float) -> None:
        """Replaces the schedule by the chief's rate from now on, unless it is NaN. A collective."""
        rate = float(self._session.of_workers(rate)[0])
        self._rate = self._rate if math.isnan(rate) else rate

    @property
    def steps_per_epoch(self) -> int:
        """The gradient steps of an epoch."""
        return self._steps_per_epoch

    @property
    def epochs(self) -> int:
        """The epochs of the run; the last one may be a part."""
        return -(-self._num_steps // self._steps_per_epoch)

    def update(self) -> dict[str, float]:
        """Takes the gradient steps of one row. Raises Stopped after a step if a worker was told to stop."""
        config, session = self._config, self._session
        session.phase("training")
        if self._batches is None:
            epoch, start = divmod(session.step, self._steps_per_epoch)
            images = self._dataset.train
            passes = (
                data.training_pass(config.augment, config.seed, epoch, len(images))
                for epoch in itertools.count(epoch)
            )
            self._batches = self._share.batches(images, passes, start)
        waiting, code, ends = [], None, False  # `waiting`: results of steps that may still be computed
        while not ends and code is None:
            began = time.perf_counter()
            batch = next(self._batches)
            waited = time.perf_counter() - began
            rate = self.learning_rate
            waiting.append(self.classifier.step(batch, rate, session.stop.votes()))
            session.step += 1
            session.advance_to(self.steps_done, steady=True)
            ends = self._ends_a_row(session.step)
            # A step's results are read after the next step has begun, so that the device always has work.
            while len(waiting) > (0 if ends or code is not None else 1):
                values = waiting.pop(0).numpy()
                if not np.isfinite(values).all():
                    step = session.step - len(waiting)
                    raise TrainingError(
                        f"step {step}: the loss or its gradient is not a finite number; {session.kept()}. "
                        f"A lower --lr than {config.lr:g} or a longer --warmup may help."
                    )
                loss, accuracy, *votes, norm = values
                self._sums[:4] += loss, accuracy, norm, 1
                wish = stop_code(votes)
                code = code if wish is None else wish
            self._sums[4:] += time.perf_counter() - began, waited
        if code is not None and not ends:
            raise Stopped(code)
        return self._metrics(rate)

    def _metrics(self, rate: float) -> dict[str, float]:
        """Means of the steps since the last row. Begins a new row."""
        loss, accuracy, norm, steps, seconds, waited = self._sums.tolist()
        self._sums[:] = 0.0
        images = self.steps_done - self._images_after(self._session.step - int(steps))
        self._session.seconds += seconds
        self._session.watchdog.measured(seconds / steps)
        return {
            "epoch": self._session.step / self._steps_per_epoch,
            "train/learning_rate": rate,
            "train/loss": loss / steps,
            "train/accuracy": accuracy / steps,
            "train/grad_norm": norm / steps,
            "time/images_per_second": images / seconds,
            "time/input_wait_fraction": waited / seconds,
        }

    def evaluate(self) -> dict[str, float]:
        """Loss and accuracy on the test images."""
        session, test = self._session, self._dataset.test
        session.raise_if_stopped()
        session.phase("testing")

        def batches() -> Iterator[ImageBatch]:
            for batch in self._share.batches(test, [data.Pass(np.arange(len(test)))]):
                session.watchdog.beat()
                yield batch
                if session.stop.signalled:
                    break

        loss, self._hits = self.classifier.test(batches())
        session.raise_if_stopped()  # the test may be incomplete
        return {"test/loss": loss, "test/accuracy": self._hits / len(test)}

    # What people see

    def summary(self) -> dict[str, str]:
        """The images, the steps and the network."""
        config, dataset = self._config, self._dataset
        shape = " x ".join(map(str, dataset.image_shape))
        sizes = f"{len(dataset.train):,} + {len(dataset.test):,} of {shape}"
        width = f"width {config.width}, " if config.width != 1 else ""
        start = self._session.started_from
        started = (
            {} if start is None else {"started from": f"{start['run']}, at {start['env_steps']:,} images"}
        )
        return {
            "images": f"{config.dataset}, {sizes}, {len(dataset.classes)} classes",
            "steps": f"{self._num_steps:,} of {config.batch_size} images, {config.optimizer}, "
            f"learning rate {config.lr:g}, {config.schedule}",
            "network": f"{config.model}, {width}{self.classifier.num_parameters:,} parameters",
        } | started

    def highlights(self, metrics: Mapping[str, float]) -> list[str]:
        """The texts of the progress line for a row of metrics."""
        formats = {
            "time/images_per_second": "{:,.0f} images/s",
            "train/loss": "loss {:.3f}",
            "test/accuracy": "test {:.2%}",
        }
        return [text.format(metrics[name]) for name, text in formats.items() if name in metrics]

    def completed(self, stopped: str | None) -> str:
        """The sentence for a run that is complete."""
        return f"{self._config.run_dir} is complete; see its results.json."

    # State

    def weights(self) -> dict[str, np.ndarray]:
        """All weights by name, float32."""
        return self.classifier.weights()

    def get_state(self) -> State:
        """The classifier, and the sums of a row that is not finished."""
        row = {"row": self._sums.copy(), "rate": np.array(self._rate)}
        return State(self.classifier.get_state() | row, [{}])

    def set_state(self, state: State) -> None:
        """Continues from `get_state`. Raises UserError where the network is another one."""
        try:
            self.classifier.set_state(state.learner)
            self._sums[:] = state.learner["row"]
            self._rate = float(state.learner["rate"])
        except (ValueError, KeyError):
            raise UserError(
                f"the checkpoints in {self._config.run_dir} belong to another network; choose another "
                "--run-name."
            ) from None

    # The end

    def export(self, folder: Path) -> None:
        """Writes the network in all its forms."""
        with quiet_start():
            self.classifier.export(folder)

    def results(self, metrics: Mapping[str, float], evaluation: Mapping[str, float]) -> dict[str, Any]:
        """The network, the images, and the scores of the last row and test."""
        config, session = self._config, self._session
        every = {**metrics, **evaluation}
        names = ("accuracy", "loss")
        scores = {p: {k: every.get(f"{p}/{k}", float("nan")) for k in names} for p in ("train", "test")}
        return {
            "algorithm": config.algorithm,
            "model": config.model,
            "dataset": config.dataset,
            "seed": config.seed,
            "epochs": session.step / self._steps_per_epoch,
            "steps": session.step,
            "images": self.steps_done,
            "seconds": session.seconds,
            "images_per_second": self.steps_done / session.seconds,
            "train": scores["train"],
            "test": scores["test"] | {"hits": self._hits, "images": len(self._dataset.test)},
            "parameters": self.classifier.num_parameters,
            "started_from": session.started_from,
        }

    def conclusion(self, outcome: Mapping[str, Any], stopped: str | None) -> Conclusion:
        """The scores."""
        config = self._config
        header = [f"{config.model} on {config.dataset}", "accuracy", "loss"]
        scores = {part: outcome[part] for part in ("train", "test")}
        rows = [[part, f"{s['accuracy']:.2%}", f"{s['loss']:.4f}"] for part, s in scores.items()]
        why = () if stopped is None else (f"Ended after {self.steps_done:,} images: {stopped}.",)
        run = shlex.quote(str(config.run_dir))
        commands = [tensorboard(config), f"python -m tfrl.report {run}", f"python -m resnet.evaluate {run}"]
        return Conclusion(why, header, rows, commands)
