"""Supervised learning as a run: rows of gradient steps, a test after each epoch, and exact resume."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from resnet.supervised import data
from resnet.supervised.classifier import Classifier
from resnet.supervised.config import Config
from resnet.supervised.data import Batch, Dataset, Share
from tfrl.cli.errors import TrainingError, UserError
from tfrl.cli.streams import quiet_start
from tfrl.ops.optimizers import learning_rate
from tfrl.run import loop
from tfrl.run.checkpoint import CheckpointShard
from tfrl.run.loop import Conclusion
from tfrl.run.session import Session, tensorboard
from tfrl.run.stop import Stopped, stop_code
from tfrl.workers.tf_config import TFConfig

_SUMS = 6  # loss, accuracy, gradient norm, steps, seconds, seconds of waiting for images


def train(config: Config, cluster: TFConfig | None) -> int:
    """Starts or resumes the run of `config`; returns the exit code. Raises the errors of `loop.train`."""

    def make(session: Session) -> ImageLearner:
        with session.watchdog.unhurried(), quiet_start():
            tell = session.console.message
            dataset = data.load_on_all(config.dataset, config.image_size, session.runtime, tell)
        return ImageLearner(config, session, dataset)

    return loop.train(config, cluster, make)


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
        self._batches: Iterator[Batch] | None = None
        self._sums = np.zeros(_SUMS)  # of the steps since the last row of metrics
        self._hits = 0  # of the last test

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

    def update(self) -> dict[str, float]:
        """Takes the gradient steps of one row. Raises Stopped after a step if a worker was told to stop."""
        config, session = self._config, self._session
        session.phase("training")
        if self._batches is None:
            epoch, start = divmod(session.step, self._steps_per_epoch)
            images = self._dataset.train
            passes = data.training_passes(config.augment, config.seed, len(images), first=epoch)
            self._batches = self._share.batches(images, passes, start)
        waiting, code = [], None  # sums of steps that may still be computed
        ends = False
        while not ends:
            began = time.perf_counter()
            batch = next(self._batches)
            waited = time.perf_counter() - began
            rate = learning_rate(config.schedule, config.lr, session.step, self._num_steps, config.warmup)
            waiting.append(self.classifier.step(batch, rate, session.stop.votes()))
            session.step += 1
            session.advance_to(self.steps_done, steady=True)
            ends = self._ends_a_row(session.step)
            # A step's sums are read after the next step has begun, so that the device always has work.
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
        self._session.seconds += seconds
        self._session.watchdog.measured(seconds / steps)
        return {
            "epoch": self._session.step / self._steps_per_epoch,
            "train/learning_rate": rate,
            "train/loss": loss / steps,
            "train/accuracy": accuracy / steps,
            "train/grad_norm": norm / steps,
            "time/images_per_second": steps * self._config.batch_size / seconds,
            "time/input_wait_fraction": waited / seconds,
        }

    def evaluate(self) -> dict[str, float]:
        """Loss and accuracy on the test images."""
        session, test = self._session, self._dataset.test
        session.raise_if_stopped()
        session.phase("testing")

        def batches() -> Iterator[Batch]:
            for batch in self._share.batches(test, data.in_file_order(test)):
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
        return {
            "images": f"{config.dataset}, {sizes}, {len(dataset.classes)} classes",
            "steps": f"{self._num_steps:,} of {config.batch_size} images, {config.optimizer}, "
            f"learning rate {config.lr:g}, {config.schedule}",
            "network": f"{config.model}, {width}{self.classifier.num_parameters:,} parameters",
        }

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

    def get_state(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The classifier, and the sums of a row that is not finished."""
        return self.classifier.get_state() | {"row": self._sums.copy()}, {}

    def set_state(
        self,
        state: Mapping[str, np.ndarray],
        parts: Sequence[Mapping[str, np.ndarray]],
        shards: Sequence[CheckpointShard] = (),
    ) -> None:
        """Continues from `get_state`. Raises UserError where the network is another one."""
        try:
            self.classifier.set_state(state)
            self._sums[:] = state["row"]
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
        }

    def conclusion(self, outcome: Mapping[str, Any], stopped: str | None) -> Conclusion:
        """The scores."""
        config = self._config
        header = [f"{config.model} on {config.dataset}", "accuracy", "loss"]
        scores = {part: outcome[part] for part in ("train", "test")}
        rows = [[part, f"{s['accuracy']:.2%}", f"{s['loss']:.4f}"] for part, s in scores.items()]
        return Conclusion((), header, rows, [tensorboard(config)])
