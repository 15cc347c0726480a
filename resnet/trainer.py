"""The supervised outer loop: epochs of gradient steps, tests, checkpoints; and exact resume from them."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import tensorflow as tf

from resnet import data, pictures, summary
from resnet.config import Config, check_topology
from resnet.data import Dataset, Prefetched, Share
from resnet.export import export
from resnet.learner import VOTES, Learner, get_weights
from resnet.schedule import learning_rate
from resnet.window import Window
from tfrl import agreement, distribute, results
from tfrl.actor_critic import weights_sha256
from tfrl.checkpoint import Checkpoint, CheckpointError, CheckpointStore, pack_json, unpack_json
from tfrl.console import Console
from tfrl.distribute import Runtime, StopRequest
from tfrl.errors import TrainingError, UserError
from tfrl.metrics import MetricsWriter, NullMetricsWriter
from tfrl.quiet import quiet_start
from tfrl.rendezvous import rendezvous
from tfrl.run_folder import SETTINGS_FILE
from tfrl.settings import to_yaml
from tfrl.tf_config import TFConfig
from tfrl.watchdog import Watchdog

COLUMNS = ("epoch", "train/loss", "train/accuracy", "train/grad_norm", "train/learning_rate")
COLUMNS += ("test/loss", "test/accuracy", "time/images_per_second", "time/input_wait_fraction")
"""The columns of progress.csv after `images`, in order."""

_STOP_CODES = (143, 130, 0)  # SIGTERM, Ctrl-C, the file `stop`: one vote each
assert len(_STOP_CODES) == VOTES
_NORM = 2 + VOTES


def train(config: Config, cluster: TFConfig | None) -> int:
    """Runs or continues the run that `config` describes; the process's exit code.

    Raises:
      UserError: the settings do not fit this machine, cluster or data set, or checkpoints cannot be read.
      TrainingError: the run failed: a NaN, say.
    """
    console = Console(enabled=cluster is None or cluster.is_chief)
    if cluster is not None:
        with quiet_start():
            settings = agreement.fingerprint(config)
        rendezvous(cluster, settings, config.cluster_timeout, console.message)
    with quiet_start():
        runtime = distribute.make(config, cluster)
    check_topology(config, runtime.replicas)
    stop = StopRequest(
        config.run_dir / "stop",
        lambda name: console.message(f"{name}: saving after this step, then ending; once more ends at once"),
    )
    addresses = cluster.workers if cluster else ("here",)
    folder = config.run_dir / "heartbeats"
    watchdog = Watchdog(folder, addresses, runtime.worker, stall_timeout=config.stall_timeout)
    try:
        with quiet_start():
            dataset = data.load_on_all(config.dataset, config.image_size, runtime, console.message)
        return Trainer(config, runtime, dataset, console, stop, watchdog).run()
    except tf.errors.OpError as error:
        raise distribute.failure(error, runtime.num_workers, watchdog.missing) from error
    finally:
        console.stop()
        stop.restore()


class Trainer:
    """One process's part of a run. All workers go through the same calls in the same order."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        dataset: Dataset,
        console: Console,
        stop: StopRequest,
        watchdog: Watchdog,
    ) -> None:
        self._config = config
        self._runtime = runtime
        self._dataset = dataset
        self._console = console
        self._stop = stop
        self._watchdog = watchdog
        self._share = Share(
            config.batch_size, runtime.worker, runtime.num_workers, replicas=runtime.local_replicas
        )
        try:
            self._learner = Learner(
                config, runtime, image_shape=dataset.image_shape, classes=len(dataset.classes)
            )
        except ValueError as error:  # the zoo: an image too small for the network, say
            reason = str(error).splitlines()[0]
            raise UserError(
                f"--model {config.model} cannot be built for {config.dataset}: {reason}"
            ) from None
        self._store = CheckpointStore(
            config.run_dir / "checkpoints",
            keep=config.keep_checkpoints,
            worker=runtime.worker,
            num_workers=runtime.num_workers,
            agree=runtime.all_agree,
        )
        self._steps_per_epoch = -(-len(dataset.train) // config.batch_size)
        steps = config.epochs * self._steps_per_epoch
        self._num_steps = min(steps, config.max_steps or steps)
        self._step = 0  # finished gradient steps
        self._seconds = 0.0  # of training, in all processes of the run
        self._resumed_at: list[int] = []  # images
        self._saved_at = -1
        self._untested = False  # an epoch is done, but its test is not
        self._window = Window()
        self._result: dict[str, float] = {}

    @property
    def _num_parameters(self) -> int:
        return self._learner.num_parameters

    @property
    def _images(self) -> int:
        """Training images seen by all workers so far."""
        return self._images_after(self._step)

    def _images_after(self, steps: int) -> int:
        epochs, steps = divmod(steps, self._steps_per_epoch)
        return epochs * len(self._dataset.train) + steps * self._config.batch_size

    def run(self) -> int:
        """Trains to the end or until told to stop; the exit code."""
        config = self._config
        found = self._restore()
        if self._is_complete():
            self._console.message(f"{config.run_dir} is complete; see its {results.RESULTS_FILE}.")
            return self._leave(0)
        self._writer = self._make_writer(found)
        self._show_summary(found)
        total = self._images_after(self._num_steps)
        self._console.start(total, self._images, unit="images", highlights=summary.highlights)
        if self._untested:  # stopped or killed while it tested
            self._conclude_epoch()
        while self._step < self._num_steps:
            code = self._train_epoch()
            if self._step % self._steps_per_epoch == 0 or self._step == self._num_steps:
                self._conclude_epoch()
            if code is not None and self._step < self._num_steps:
                return self._end_early(code)
        return self._finish()

    def _phase(self, name: str) -> None:
        self._console.phase(name)
        self._watchdog.beat(name, self._step)

    # Training

    def _train_epoch(self) -> int | None:
        """The rest of the present epoch; the exit code if someone asks to stop."""
        config = self._config
        epoch, start = divmod(self._step, self._steps_per_epoch)
        count = len(self._dataset.train)
        order = data.epoch_order(config.seed, epoch, count)
        augmentation = data.draw_augmentation(config.augment, config.seed, epoch, count)
        batches = Prefetched(self._share.batches(self._dataset.train, order, start, *augmentation))
        self._phase("training")
        end = min((epoch + 1) * self._steps_per_epoch, self._num_steps)
        waiting, code = [], None  # sums of steps that may not be finished yet
        began, waited = time.perf_counter(), 0.0
        try:
            for batch in batches:
                rate = learning_rate(config.schedule, config.lr, self._step, self._num_steps, config.warmup)
                waiting.append(self._learner.step(batch, rate, self._votes()))
                self._step += 1
                self._watchdog.beat()
                self._console.advance_to(self._images)
                due = self._step == end or any(
                    self._step % every == 0 for every in (config.log_every, config.checkpoint_every)
                )
                # A step's sums are read after the next one is on its way: the device always has work.
                while len(waiting) > (0 if due or code is not None else 1):
                    wish = self._take(waiting.pop(0), self._step - len(waiting))
                    code = code if wish is None else wish
                now = time.perf_counter()
                self._window.add_time(now - began, batches.wait_seconds - waited)
                began, waited = now, batches.wait_seconds
                if self._step == end:
                    return code
                self._log_and_save(rate, stopping=code is not None)
                began = time.perf_counter()
                if code is not None:
                    return code
        finally:
            batches.close()
        return code

    def _votes(self) -> np.ndarray:
        """This worker's wish to stop, float32 [VOTES]; it travels with the gradients to all workers."""
        wanted = self._stop.requested()
        return np.array([wanted and self._stop.exit_code == code for code in _STOP_CODES], np.float32)

    def _take(self, sums: tf.Tensor, step: int) -> int | None:
        """Adds a finished step to the window; the exit code if any worker wishes to stop."""
        values = sums.numpy()
        if not np.isfinite(values).all():
            saved = self._store.updates()
            kept = f"the checkpoint of step {saved[-1]} is kept" if saved else "there is no checkpoint yet"
            raise TrainingError(
                f"step {step}: the loss or its gradient is not a finite number; {kept}. A lower --lr than "
                f"{self._config.lr:g} or a longer --warmup may help."
            )
        self._window.add_step(values[0], values[1], values[_NORM])
        votes = values[2:_NORM]
        return next((code for code, vote in zip(_STOP_CODES, votes, strict=True) if vote > 0), None)

    def _log_and_save(self, rate: float, *, stopping: bool) -> None:
        if self._step % self._config.log_every == 0:
            self._write(self._metrics(rate))
        if stopping or self._step % self._config.checkpoint_every == 0:
            self._save()
            self._phase("training")

    def _metrics(self, rate: float) -> dict[str, float]:
        """Means since the last row; begins a new window."""
        window, self._window = self._window, Window()
        self._seconds += window.seconds
        self._watchdog.measured(window.seconds_per_step)
        metrics = window.means(self._config.batch_size)
        return {"epoch": self._step / self._steps_per_epoch, "train/learning_rate": rate} | metrics

    def _write(self, metrics: Mapping[str, float]) -> None:
        self._writer.write(self._images, metrics)
        self._console.update(self._images, metrics)

    # Testing

    def _conclude_epoch(self) -> None:
        """Tests, and writes the epoch's metrics."""
        self._untested = True
        self._save()  # a kill during the test costs nothing else
        self._phase("testing")
        test = self._dataset.test
        loss, hits = self._learner.test(self._share.batches(test, data.file_order(test)))
        self._result = {"test/loss": loss, "test/accuracy": hits / len(test), "hits": hits}
        self._untested = False
        config, last = self._config, self._step - 1
        rate = learning_rate(config.schedule, config.lr, last, self._num_steps, config.warmup)
        metrics = self._metrics(rate)
        self._result |= {"train/loss": metrics["train/loss"], "train/accuracy": metrics["train/accuracy"]}
        self._write(metrics | {k: v for k, v in self._result.items() if k in COLUMNS})
        if config.pictures:
            pixels = pictures.kernels(get_weights(self._learner.model))
            if pixels is not None:
                self._writer.image("weights/first_layer", pixels, self._images)

    # Checkpoints

    def _save(self) -> None:
        """Saves; a disk that is full costs this checkpoint, not the run."""
        if self._saved_at == self._step:
            return
        self._phase("saving")
        self._writer.flush()
        progress = {"seconds": self._seconds, "resumed_at": self._resumed_at, "untested": self._untested}
        progress |= {"window": self._window.get_state()}
        learner = self._learner.get_state() | {"progress": pack_json(progress)}
        try:
            self._store.save(self._step, learner=learner, worker_part={}, env_steps=self._images)
            self._saved_at = self._step
        except CheckpointError as error:
            self._console.warn(f"{error} Training goes on.")

    def _restore(self) -> Checkpoint | None:
        """Continues from the newest valid checkpoint, if there is one; all workers from the same."""
        found = self._store.load(self._console.warn)
        steps = np.zeros(self._runtime.num_workers, np.int64)
        steps[self._runtime.worker] = -1 if found is None else found.update
        chosen = int(self._runtime.sum_over_workers(steps).min())
        if found is not None and chosen != found.update:
            found = self._store.load(self._console.warn, chosen) if chosen >= 0 else None
        if found is None:
            return None
        try:
            self._learner.set_state(found.learner)
        except (ValueError, KeyError):
            raise UserError(
                f"the checkpoints in {self._config.run_dir} are of another network; "
                "choose another --run-name."
            ) from None
        progress = unpack_json(found.learner["progress"])
        self._step = self._saved_at = found.update
        self._seconds, self._untested = progress["seconds"], progress["untested"]
        self._window = Window.of_state(progress["window"])
        self._resumed_at = [*progress["resumed_at"], found.env_steps]
        return found

    # Beginning and end

    def _make_writer(self, found: Checkpoint | None) -> MetricsWriter | NullMetricsWriter:
        if not self._runtime.is_chief:
            return NullMetricsWriter()
        run = self._config.run_dir
        # The resolved precision: `auto` may mean another one where the run goes on.
        settings = to_yaml(replace(self._config, precision=self._runtime.precision))
        try:
            run.mkdir(parents=True, exist_ok=True)
            staged = run / f"{SETTINGS_FILE}.tmp"
            staged.write_text(settings)
            staged.replace(run / SETTINGS_FILE)
        except OSError as error:
            raise UserError(f"cannot write in {run}: {error.strerror}") from None
        resume_at = None if found is None else found.env_steps - self._untested
        warn = self._console.warn
        writer = MetricsWriter(run, COLUMNS, resume_at=resume_at, warn=warn, step_column="images")
        if found is None:
            writer.text("settings", f"```\n{settings}\n```\n\ncommand: `{' '.join(sys.argv)}`", 0)
        if self._config.pictures:
            pictures.draw_model(self._learner.model, run / "plots" / "model.png", warn)
        return writer

    def _show_summary(self, found: Checkpoint | None) -> None:
        rows = summary.rows(
            self._config, self._runtime, self._dataset, steps=self._num_steps, parameters=self._num_parameters
        )
        if found is not None:
            rows["continues at"] = f"{found.env_steps:,} images (step {found.update})"
        self._console.summary(rows)

    def _end_early(self, code: int) -> int:
        self._save()
        if self._runtime.is_chief:
            (self._config.run_dir / "stop").unlink(missing_ok=True)
        self._writer.close()
        self._console.stop()
        saved = self._saved_at == self._step
        where = f"saved at step {self._step:,}" if saved else "but it could not be saved"
        self._console.message(f"Stopped, {where}; the same command goes on from its last checkpoint.")
        return self._leave(code if saved else 1)

    def _is_complete(self) -> bool:
        """Whether an earlier process has done all of it, down to results.json."""
        if self._step < self._num_steps:
            return False
        written = results.read(self._config.run_dir)
        return written is not None and written.get("weights_sha256") == self._fingerprint()

    def _fingerprint(self) -> str:
        return weights_sha256(get_weights(self._learner.model))

    def _finish(self) -> int:
        """Exports, and writes and shows the results."""
        config, run, dataset = self._config, self._config.run_dir, self._dataset
        self._writer.close()
        if self._runtime.is_chief:
            self._console.phase("exporting")
            try:
                with quiet_start():
                    export(
                        run / "export",
                        config,
                        get_weights(self._learner.model),
                        precision=self._runtime.precision,
                        image_shape=dataset.image_shape,
                        classes=len(dataset.classes),
                    )
                results.write(run, self._results())
            except OSError as error:
                raise TrainingError(f"cannot write the results in {run}: {error.strerror}") from None
            self._console.results(*summary.table(config, self._result), summary.next_commands(config))
        return self._leave(0)

    def _results(self) -> dict[str, object]:
        done = {"epochs": self._step / self._steps_per_epoch, "steps": self._step, "images": self._images}
        time = {"seconds": self._seconds, "images_per_second": self._images / self._seconds}
        scores = summary.scores(self._result, len(self._dataset.test))
        where = {"workers": self._runtime.num_workers, "replicas": self._runtime.replicas}
        return {
            "model": self._config.model,
            "dataset": self._config.dataset,
            "seed": self._config.seed,
            **done,
            **time,
            **scores,
            "parameters": self._num_parameters,
            **where,
            "precision": self._runtime.precision,
            "weights_sha256": self._fingerprint(),
            "resumed_at": self._resumed_at,
        }

    def _leave(self, code: int) -> int:
        self._runtime.all_agree(True)  # a barrier: whoever leaves first would look like a failure
        self._watchdog.close()
        return code
