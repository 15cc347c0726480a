"""python -m resnet.evaluate RUN: test a run's export or newest checkpoint, with or without a strategy."""

from __future__ import annotations

import dataclasses
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from resnet.supervised.config import Config, from_yaml
from tfrl.cli import command_line, endings
from tfrl.cli.errors import UserError
from tfrl.cli.quiet import quiet_start
from tfrl.cli.settings import Range
from tfrl.cli.streams import tell
from tfrl.networks.weights import weights_of
from tfrl.run.checkpoint import CheckpointStore
from tfrl.run.folder import SETTINGS_FILE, has_checkpoint, is_of

if TYPE_CHECKING:
    import tensorflow as tf

_USAGE = "python -m resnet.evaluate RUN"


@dataclass(frozen=True)
class Options:
    """The test."""

    format: Literal["keras", "saved-model"] = "keras"
    """Format of the model in export/ that is loaded. A run without an export is tested by its newest
    checkpoint."""
    strategy: Literal["none", "one-device", "mirrored"] = "none"
    """The strategy under which it is loaded and runs."""
    replicas: Annotated[int, Range(0, 256)] = 0
    """Replicas of the mirrored strategy; 0: one for each GPU."""


def main(arguments: Sequence[str]) -> int:
    """Prints the accuracy on the whole test set; the exit code."""
    words, options = command_line.parse(Options, arguments, _USAGE, "Test a supervised run.")
    run = Path(command_line.one(words, "run's folder", _USAGE))
    config = _settings(run, options)
    with quiet_start():
        loss, hits, count = evaluate(run, config, options)
    tested = options.format if (run / "export").exists() else "newest checkpoint"
    print(f"{config.model} on {config.dataset}, {tested}, strategy {options.strategy}")
    print(f"accuracy  {hits / count!r}  ({hits} of {count} test images)")
    print(f"loss      {loss:.6f}")
    return 0


def evaluate(run: Path, config: Config, options: Options) -> tuple[float, int, int]:
    """Loads a model of the run under a strategy: its mean loss, hits and number of images of the test set.

    Raises UserError if the model cannot be read.
    """
    import tensorflow as tf

    from resnet.supervised import classifier, data
    from tfrl.ops.graph import graph
    from tfrl.workers import strategy

    strategy.set_up_tensorflow()
    if options.strategy == "none":
        plain = tf.distribute.get_strategy()
        runtime = strategy.Runtime(plain, worker=0, num_workers=1, precision="float32")
    else:
        runtime = strategy.make(config, None)
    data.prepare(config.dataset)
    dataset = data.load(config.dataset, config.image_size)
    with runtime.strategy.scope():
        if (run / "export").exists():
            model = _load(run / "export", options.format)
        else:
            store = CheckpointStore(run / "checkpoints", keep=1)
            if (found := store.load(lambda sentence: tell(f"warning: {sentence}"))) is None:
                raise UserError(f"{run} has no checkpoint.")
            shape, classes = dataset.image_shape, len(dataset.classes)
            model = classifier.build(config, config.precision, image_shape=shape, classes=classes)
            classifier.set_weights(model, weights_of(found.learner))

    @graph
    def sums(*batch: Any) -> Any:
        return runtime.strategy.run(classifier.test_sums, args=(model, *batch))

    replicas = runtime.local_replicas
    size = -(-config.batch_size // replicas) * replicas  # a multiple: what a batch lacks is filled up
    batches = data.Share(size, replicas=replicas).batches(dataset.test, data.in_file_order(dataset.test))
    loss, hits = classifier.test(runtime, sums, batches)
    return loss, hits, len(dataset.test)


def _load(export: Path, kind: str) -> Callable[[tf.Tensor], tf.Tensor]:
    import keras
    import tensorflow as tf

    from resnet.supervised.classifier import KERAS_FILE, SAVED_MODEL

    path = export / (KERAS_FILE if kind == "keras" else SAVED_MODEL)
    try:
        if kind == "keras":
            return keras.models.load_model(path)
        saved = tf.saved_model.load(str(path))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, tf.errors.OpError):
        raise UserError(f"{path} cannot be read: it is damaged or incomplete.") from None
    return lambda images: saved.serve(images)  # and not `saved.serve` alone: `saved` holds the variables


def _settings(run: Path, options: Options) -> Config:
    """The run's settings with this command's topology. Raises UserError without export and checkpoint."""
    if not (run / SETTINGS_FILE).exists():
        raise UserError(f"{run} is not a run's folder: it has no {SETTINGS_FILE}.")
    if is_of(run, "env"):
        raise UserError(f"{run} is a run of an RL algorithm; evaluate it with python -m tfrl.evaluate.")
    if not (run / "export").exists() and not has_checkpoint(run):
        raise UserError(f"{run} has no checkpoint and no export yet.")
    if options.replicas > 1 and options.strategy != "mirrored":
        raise UserError(f"--replicas {options.replicas} needs --strategy mirrored.")
    strategy = "auto" if options.strategy == "none" else options.strategy
    return dataclasses.replace(from_yaml(run / SETTINGS_FILE), strategy=strategy, replicas=options.replicas)


if __name__ == "__main__":
    endings.run(main)
