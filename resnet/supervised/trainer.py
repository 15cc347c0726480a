"""The supervised run: epochs of gradient steps, tests, checkpoints, the results; and exact resume."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping

import numpy as np

from resnet import drawing
from resnet.supervised import data
from resnet.supervised.config import Config
from resnet.supervised.data import Batch, Dataset, Share
from resnet.supervised.learner import Learner
from tfrl.cli.errors import TrainingError, UserError
from tfrl.cli.quiet import quiet_start
from tfrl.ops.schedules import learning_rate
from tfrl.run import files, results, summary
from tfrl.run.console import Console
from tfrl.run.session import Session, open_session
from tfrl.run.stop import Stopped, stop_code
from tfrl.workers.membership import join
from tfrl.workers.tf_config import TFConfig

COLUMNS = ("epoch", "train/loss", "train/accuracy", "train/grad_norm", "train/learning_rate")
COLUMNS += ("test/loss", "test/accuracy", "time/images_per_second", "time/input_wait_fraction")
"""The columns of progress.csv after `images`, in order."""

_SUMS = 6  # loss, accuracy, gradient norm, steps, seconds, seconds of waiting for images


def train(config: Config, cluster: TFConfig | None) -> int:
    """Runs or continues the run that `config` describes; the process's exit code.

    Raises:
      UserError: the settings do not fit this machine, cluster or data set, or checkpoints cannot be read.
      TrainingError: the run failed: a NaN, say.
    """
    console = Console(enabled=cluster is None or cluster.is_chief)
    names = {"step_name": "step", "saves": "after this step"}
    with join(config, cluster) as (runtime, watchdog):
        config.check_topology(runtime.replicas)
        with open_session(config, runtime, watchdog, console, **names) as session:
            with watchdog.unhurried(), quiet_start():
                dataset = data.load_on_all(config.dataset, config.image_size, runtime, console.message)
            return Trainer(config, session, dataset).run()


class Trainer:
    """The loop of one process. All workers go through the same calls in the same order."""

    def __init__(self, config: Config, session: Session, dataset: Dataset) -> None:
        self._config = config
        self._session = session
        self._dataset = dataset
        runtime = session.runtime
        self._share = Share(
            config.batch_size, runtime.worker, runtime.num_workers, replicas=runtime.local_replicas
        )
        shape, classes = dataset.image_shape, len(dataset.classes)
        try:
            self._learner = Learner(config, runtime, image_shape=shape, classes=classes)
        except ValueError as error:  # the zoo: an image too small for the network, say
            reason = str(error).splitlines()[0]
            raise UserError(
                f"--model {config.model} cannot be built for {config.dataset}: {reason}"
            ) from None
        self._steps_per_epoch = -(-len(dataset.train) // config.batch_size)
        steps = config.epochs * self._steps_per_epoch
        self._num_steps = min(steps, config.max_steps or steps)
        self._sums = np.zeros(_SUMS)  # of the steps since the last row of metrics
        self._result: dict[str, float] = {}

    def run(self) -> int:
        """Trains to the end or until told to stop; the exit code."""
        config, session = self._config, self._session
        found = session.restore()
        if found is not None:
            try:
                self._learner.set_state(found.learner)
            except (ValueError, KeyError):
                raise UserError(
                    f"the checkpoints in {config.run_dir} are of another network; choose another --run-name."
                ) from None
            self._sums[:] = session.progress["window"]
        if session.step >= self._num_steps and session.is_finished(self._learner.weights()):
            session.console.message(config.completed)
            return session.leave(0)
        self._begin()
        try:
            if self._ends_an_epoch:  # its checkpoint is of before its test
                self._conclude_epoch()
            epoch, start = divmod(session.step, self._steps_per_epoch)
            train = self._dataset.train
            passes = data.training_passes(config.augment, config.seed, len(train), first=epoch)
            batches = self._share.batches(train, passes, start)
            while session.step < self._num_steps:
                self._train_epoch(batches)
                self._conclude_epoch()
        except Stopped as stopped:
            self._save()
            return session.end_early(stopped.code, f"step {session.step:,}")
        return self._finish()

    def _begin(self) -> None:
        """Opens the run's folder, and tells what is about to be trained."""
        config, session, dataset = self._config, self._session, self._dataset
        session.open_folder(COLUMNS, again=self._ends_an_epoch, step_column="images")
        if config.pictures and session.runtime.is_chief:
            path = config.run_dir / "plots" / "model.png"
            try:
                files.make_folder(path.parent)
                with files.replacing(path) as staged:
                    drawing.draw({config.model: self._learner.model}, staged)
            except OSError as error:
                reason = files.reason(error)
                session.console.warn(
                    f"The picture of the network, {path}, cannot be written ({reason}). Training goes on."
                )
        shape = " x ".join(map(str, dataset.image_shape))
        sizes = f"{len(dataset.train):,} + {len(dataset.test):,} of {shape}"
        rows = {
            "images": f"{config.dataset}, {sizes}, {len(dataset.classes)} classes",
            **summary.hardware(session.runtime),
            "steps": f"{self._num_steps:,} of {config.batch_size} images, {config.optimizer}, "
            f"learning rate {config.lr:g}, {config.schedule}",
            "network": summary.network(config.model, config.width, self._learner.num_parameters),
            **summary.folder(config),
        }
        if session.found is not None:
            rows["continues at"] = f"{session.found.env_steps:,} images (step {session.found.update})"
        session.console.summary(rows)
        total = self._images_after(self._num_steps)
        session.console.start(total, self._images, unit="images", highlights=highlights)

    # Training

    @property
    def _ends_an_epoch(self) -> bool:
        step = self._session.step
        return step > 0 and (step % self._steps_per_epoch == 0 or step == self._num_steps)

    @property
    def _images(self) -> int:
        """Training images seen by all workers so far."""
        return self._images_after(self._session.step)

    def _images_after(self, steps: int) -> int:
        epochs, steps = divmod(steps, self._steps_per_epoch)
        return epochs * len(self._dataset.train) + steps * self._config.batch_size

    def _learning_rate(self, step: int) -> float:
        config = self._config
        return learning_rate(config.schedule, config.lr, step, self._num_steps, config.warmup)

    def _train_epoch(self, batches: Iterator[Batch]) -> None:
        """The rest of the present epoch. Raises Stopped in the middle of it, or at its end, if told to."""
        config, session = self._config, self._session
        session.phase("training")
        waiting, code = [], None  # sums of steps that may not be finished yet
        began = time.perf_counter()
        for batch in batches:
            waited = time.perf_counter() - began
            rate = self._learning_rate(session.step)
            waiting.append(self._learner.step(batch, rate, session.stop.votes()))
            session.step += 1
            session.watchdog.beat()
            session.console.advance_to(self._images, steady=True)
            ends = self._ends_an_epoch
            logs = not ends and session.step % config.log_every == 0
            saves = not ends and session.step % config.checkpoint_every == 0
            # A step's sums are read after the next one is on its way: the device always has work.
            while len(waiting) > (0 if ends or logs or saves or code is not None else 1):
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
            if logs:
                self._write(self._metrics(rate))
            if saves:
                self._save()
                session.phase("training")
            if code is not None:
                raise Stopped(code)
            if ends:
                return
            began = time.perf_counter()

    def _metrics(self, rate: float) -> dict[str, float]:
        """Means of the steps since the last row, which is this one from now on."""
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

    def _write(self, metrics: Mapping[str, float]) -> None:
        self._session.writer.write(self._images, metrics)
        self._session.console.update(self._images, metrics)

    def _save(self) -> None:
        if not self._session.is_saved:
            progress = {"window": self._sums.tolist()}
            self._session.save(self._images, self._learner.get_state(), {}, progress)

    # Testing

    def _conclude_epoch(self) -> None:
        """Tests, and writes the epoch's metrics."""
        session = self._session
        self._save()  # a kill during the test costs nothing else
        session.raise_if_stopped()
        session.phase("testing")
        test = self._dataset.test

        def batches() -> Iterator[Batch]:
            for batch in self._share.batches(test, data.in_file_order(test)):
                session.watchdog.beat()
                yield batch
                if session.stop.signalled:
                    break

        loss, hits = self._learner.test(batches())
        session.raise_if_stopped()  # before anything is used of a test that may have been broken off
        metrics = self._metrics(self._learning_rate(session.step - 1))
        metrics |= {"test/loss": loss, "test/accuracy": hits / len(test)}
        self._result = metrics | {"hits": hits}
        self._write(metrics)
        if self._config.pictures:
            pixels = drawing.kernels(self._learner.weights())
            if pixels is not None:
                session.writer.image("weights/first_layer", pixels, self._images)

    # The end

    def _finish(self) -> int:
        """Exports, and writes and shows the results."""
        config, session, result = self._config, self._session, self._result
        scores = {p: {k: result[f"{p}/{k}"] for k in ("accuracy", "loss")} for p in ("train", "test")}
        with session.finishing():
            if session.runtime.is_chief:
                with quiet_start():
                    self._learner.export(config.run_dir / "export")
                own = {
                    "model": config.model,
                    "dataset": config.dataset,
                    "seed": config.seed,
                    "epochs": session.step / self._steps_per_epoch,
                    "steps": session.step,
                    "images": self._images,
                    "seconds": session.seconds,
                    "images_per_second": self._images / session.seconds,
                    "train": scores["train"],
                    "test": scores["test"] | {"hits": result["hits"], "images": len(self._dataset.test)},
                    "parameters": self._learner.num_parameters,
                }
                results.write(config.run_dir, own | session.provenance(self._learner.weights()))
        if session.runtime.is_chief:
            header = [f"{config.model} on {config.dataset}", "accuracy", "loss"]
            rows = [[part, f"{s['accuracy']:.2%}", f"{s['loss']:.4f}"] for part, s in scores.items()]
            again = shlex.join(["python", "-m", "resnet.evaluate", str(config.run_dir)])
            session.console.results(header, rows, [again, summary.tensorboard(config)])
        return session.leave(0)


def highlights(metrics: Mapping[str, float]) -> list[str]:
    """The texts of the progress line for a row of metrics."""
    formats = {
        "time/images_per_second": "{:,.0f} images/s",
        "train/loss": "loss {:.3f}",
        "test/accuracy": "test {:.2%}",
    }
    return [text.format(metrics[name]) for name, text in formats.items() if name in metrics]
