"""The supervised outer loop: epochs of gradient steps, tests, checkpoints; and exact resume from them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping

import numpy as np
import tensorflow as tf

from resnet.supervised import data, pictures, summary
from resnet.supervised.config import Config, check_topology, complete
from resnet.supervised.data import Batch, Dataset, Share, Timed
from resnet.supervised.export import export
from resnet.supervised.learner import Learner
from resnet.supervised.window import Window
from tfrl.cli.errors import TrainingError, UserError
from tfrl.cli.quiet import quiet_start
from tfrl.ops.schedules import learning_rate
from tfrl.run import results
from tfrl.run.console import Console
from tfrl.run.session import Session, open_session
from tfrl.run.stop import Stopped, stop_code
from tfrl.workers.membership import join
from tfrl.workers.tf_config import TFConfig

COLUMNS = ("epoch", "train/loss", "train/accuracy", "train/grad_norm", "train/learning_rate")
COLUMNS += ("test/loss", "test/accuracy", "time/images_per_second", "time/input_wait_fraction")
"""The columns of progress.csv after `images`, in order."""


def train(config: Config, cluster: TFConfig | None) -> int:
    """Runs or continues the run that `config` describes; the process's exit code.

    Raises:
      UserError: the settings do not fit this machine, cluster or data set, or checkpoints cannot be read.
      TrainingError: the run failed: a NaN, say.
    """
    console = Console(enabled=cluster is None or cluster.is_chief)
    names = {"step_name": "step", "saves": "after this step"}
    with join(config, cluster) as (runtime, watchdog):
        check_topology(config, runtime.replicas)
        with open_session(config, runtime, watchdog, console, **names) as session:
            with watchdog.unhurried(), quiet_start():
                dataset = data.load_on_all(config.dataset, config.image_size, runtime, console.message)
            return Trainer(config, session, dataset).run()


class Trainer:
    """The loop of one process. All workers go through the same calls in the same order."""

    def __init__(self, config: Config, session: Session, dataset: Dataset) -> None:
        self._config = config
        self._session = session
        self._runtime = session.runtime
        self._dataset = dataset
        self._share = Share(
            config.batch_size,
            self._runtime.worker,
            self._runtime.num_workers,
            replicas=self._runtime.local_replicas,
        )
        self._learner = _make_learner(config, session, dataset)
        self._steps_per_epoch = -(-len(dataset.train) // config.batch_size)
        steps = config.epochs * self._steps_per_epoch
        self._num_steps = min(steps, config.max_steps or steps)
        self._untested = False  # an epoch is done, but its test is not
        self._window = Window()
        self._result: dict[str, float] = {}

    @property
    def _images(self) -> int:
        """Training images seen by all workers so far."""
        return self._images_after(self._session.step)

    def _images_after(self, steps: int) -> int:
        epochs, steps = divmod(steps, self._steps_per_epoch)
        return epochs * len(self._dataset.train) + steps * self._config.batch_size

    def run(self) -> int:
        """Trains to the end or until told to stop; the exit code."""
        config, session = self._config, self._session
        self._restore()
        if session.step >= self._num_steps and session.is_finished(self._learner.weights()):
            session.console.message(complete(config))
            return session.leave(0)
        self._begin()
        try:
            self._train()
        except Stopped as stopped:
            self._save()
            return session.end_early(stopped.code, f"step {session.step:,}")
        return self._finish()

    # Training

    def _train(self) -> None:
        """Trains and tests to the end. Raises Stopped, with nothing to lose once the state is saved."""
        if self._untested:  # stopped or killed while it tested
            self._conclude_epoch()
        batches = self._batches()
        while self._session.step < self._num_steps:
            self._train_epoch(batches)
            self._conclude_epoch()

    def _batches(self) -> Timed:
        """The batches of this and all later epochs, from the present step on."""
        config, train = self._config, self._dataset.train
        epoch, start = divmod(self._session.step, self._steps_per_epoch)
        passes = data.training_passes(config.augment, config.seed, len(train), first=epoch)
        return Timed(self._share.batches(train, passes, start))

    def _train_epoch(self, batches: Timed) -> None:
        """The rest of the present epoch. Raises Stopped in the middle of it, or at its end, if told to."""
        self._session.phase("training")
        epochs = self._session.step // self._steps_per_epoch + 1
        end = min(epochs * self._steps_per_epoch, self._num_steps)
        config, session = self._config, self._session
        waiting, code = [], None  # sums of steps that may not be finished yet
        began, waited = time.perf_counter(), batches.wait_seconds
        for batch in itertools.islice(batches, end - session.step):
            rate = self._learning_rate(session.step)
            waiting.append(self._learner.step(batch, rate, session.stop.votes()))
            session.step += 1
            session.watchdog.beat()
            session.console.advance_to(self._images, steady=True)
            due = session.step == end or any(
                session.step % every == 0 for every in (config.log_every, config.checkpoint_every)
            )
            # A step's sums are read after the next one is on its way: the device always has work.
            while len(waiting) > (0 if due or code is not None else 1):
                wish = self._take(waiting.pop(0), session.step - len(waiting))
                code = code if wish is None else wish
            now = time.perf_counter()
            self._window.add_time(now - began, batches.wait_seconds - waited)
            began, waited = now, batches.wait_seconds
            self._untested = session.step == end
            if not self._untested:
                self._log_and_save(rate)
                began = time.perf_counter()
            if code is not None:
                raise Stopped(code)

    def _learning_rate(self, step: int) -> float:
        config = self._config
        return learning_rate(config.schedule, config.lr, step, self._num_steps, config.warmup)

    def _take(self, sums: tf.Tensor, step: int) -> int | None:
        """Adds a finished step to the window; the exit code if any worker wishes to stop."""
        values = sums.numpy()
        if not np.isfinite(values).all():
            raise TrainingError(
                f"step {step}: the loss or its gradient is not a finite number; {self._session.kept()}. "
                f"A lower --lr than {self._config.lr:g} or a longer --warmup may help."
            )
        loss, accuracy, *votes, norm = values
        self._window.add_step(loss, accuracy, norm)
        return stop_code(votes)

    def _log_and_save(self, rate: float) -> None:
        step = self._session.step
        if step % self._config.log_every == 0:
            self._write(self._metrics(rate))
        if step % self._config.checkpoint_every == 0:
            self._save()
            self._session.phase("training")

    def _metrics(self, rate: float) -> dict[str, float]:
        """Means since the last row; begins a new window."""
        window, self._window = self._window, Window()
        self._session.seconds += window.seconds
        self._session.watchdog.measured(window.seconds_per_step)
        metrics = window.means(self._config.batch_size)
        return {"epoch": self._session.step / self._steps_per_epoch, "train/learning_rate": rate} | metrics

    def _write(self, metrics: Mapping[str, float]) -> None:
        self._session.writer.write(self._images, metrics)
        self._session.console.update(self._images, metrics)

    # Testing

    def _conclude_epoch(self) -> None:
        """Tests, and writes the epoch's metrics."""
        session = self._session
        self._save()  # a kill during the test costs nothing else
        session.raise_if_stopped()
        session.phase("testing")
        loss, hits = self._learner.test(self._test_batches())
        session.raise_if_stopped()  # before anything is used of a test that may have been broken off
        self._result = {"test/loss": loss, "test/accuracy": hits / len(self._dataset.test), "hits": hits}
        self._untested = False
        metrics = self._metrics(self._learning_rate(session.step - 1))
        self._result |= {"train/loss": metrics["train/loss"], "train/accuracy": metrics["train/accuracy"]}
        self._write(metrics | {k: v for k, v in self._result.items() if k in COLUMNS})
        if self._config.pictures:
            pixels = pictures.kernels(self._learner.weights())
            if pixels is not None:
                session.writer.image("weights/first_layer", pixels, self._images)

    def _test_batches(self) -> Iterator[Batch]:
        test = self._dataset.test
        for batch in self._share.batches(test, data.in_file_order(test)):
            self._session.watchdog.beat()
            yield batch
            if self._session.stop.signalled:
                break

    # Beginning, checkpoints, end

    def _restore(self) -> None:
        found, progress = self._session.restore(), self._session.progress
        if found is None:
            return
        try:
            self._learner.set_state(found.learner)
        except (ValueError, KeyError):
            raise UserError(
                f"the checkpoints in {self._config.run_dir} are of another network; "
                "choose another --run-name."
            ) from None
        self._untested = progress["untested"]
        self._window = Window.of_state(progress["window"])

    def _begin(self) -> None:
        """Opens the run's folder, and tells what is about to be trained."""
        config, session = self._config, self._session
        session.open_folder(COLUMNS, again=self._untested, step_column="images")
        if config.pictures and session.runtime.is_chief:
            path = config.run_dir / "plots" / "model.png"
            pictures.draw_model(self._learner.model, path, session.console.warn)
        sizes = {"steps": self._num_steps, "parameters": self._learner.num_parameters}
        session.console.summary(summary.rows(config, session.runtime, self._dataset, session.found, **sizes))
        total = self._images_after(self._num_steps)
        session.console.start(total, self._images, unit="images", highlights=summary.highlights)

    def _save(self) -> None:
        if not self._session.is_saved:
            progress = {"untested": self._untested, "window": self._window.get_state()}
            self._session.save(self._images, self._learner.get_state(), {}, progress)

    def _finish(self) -> int:
        """Exports, and writes and shows the results."""
        config, session, dataset = self._config, self._session, self._dataset
        with session.finishing():
            if session.runtime.is_chief:
                weights = self._learner.weights()
                with quiet_start():
                    export(
                        config.run_dir / "export",
                        config,
                        weights,
                        precision=session.runtime.precision,
                        image_shape=dataset.image_shape,
                        classes=len(dataset.classes),
                    )
                results.write(config.run_dir, self._results() | session.provenance(weights))
        if session.runtime.is_chief:
            session.console.results(*summary.table(config, self._result), summary.next_commands(config))
        return session.leave(0)

    def _results(self) -> dict[str, object]:
        """What is this trainer's own in results.json."""
        config, step, seconds = self._config, self._session.step, self._session.seconds
        return {
            "model": config.model,
            "dataset": config.dataset,
            "seed": config.seed,
            "epochs": step / self._steps_per_epoch,
            "steps": step,
            "images": self._images,
            "seconds": seconds,
            "images_per_second": self._images / seconds,
            **summary.scores(self._result, len(self._dataset.test)),
            "parameters": self._learner.num_parameters,
        }


def _make_learner(config: Config, session: Session, dataset: Dataset) -> Learner:
    shape, classes = dataset.image_shape, len(dataset.classes)
    try:
        return Learner(config, session.runtime, image_shape=shape, classes=classes)
    except ValueError as error:  # the zoo: an image too small for the network, say
        reason = str(error).splitlines()[0]
        raise UserError(f"--model {config.model} cannot be built for {config.dataset}: {reason}") from None
