"""python -m resnet.evaluate RUN: test a checkpoint or the SavedModel of a supervised run."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from resnet.config import Config, of_run
from tfrl.algorithms.runs import run_folder
from tfrl.cli import endings, flags
from tfrl.cli.errors import UserError
from tfrl.cli.flags import Range
from tfrl.cli.streams import quiet_start, tell
from tfrl.networks.weights import PREFIX, read_state, split_checkpoint
from tfrl.run.checkpoint import under, with_prefix
from tfrl.workers import tf_config

if TYPE_CHECKING:
    from resnet.data import Dataset, ImageBatch
    from tfrl.workers.strategy import Runtime

_USAGE = "python -m resnet.evaluate RUN"


@dataclass(frozen=True)
class Options:
    """The test."""

    checkpoint: str = "last"
    """Checkpoint to test: last, best (by the test accuracy) or the number of a step."""
    format: Literal["checkpoint", "saved-model"] = "checkpoint"
    """checkpoint: the weights of --checkpoint; saved-model: RUN/export/saved_model of a finished run."""
    strategy: Literal["auto", "one-device", "mirrored", "multi-worker"] = "auto"
    """TensorFlow's strategy. auto: mirrored with --replicas, otherwise one-device; multi-worker: the workers
    of TF_CONFIG."""
    replicas: Annotated[int, Range(0, 256)] = 0
    """Devices of this process that test together: GPUs, or this many equal parts of its CPU. 0: all GPUs with
    --strategy mirrored, otherwise one device."""


def main(arguments: Sequence[str]) -> int:
    """Prints the accuracy on the whole test set; returns the exit code."""
    words, options = flags.parse(Options, arguments, _USAGE, "Test a supervised run on its test images.")
    run, checkpoint = split_checkpoint(
        run_folder(flags.one(words, "run's folder", _USAGE)), options.checkpoint
    )
    config = of_run(run)
    saved = options.format == "saved-model"
    if saved and checkpoint != "last":
        raise UserError(f"a SavedModel has the last weights: leave --checkpoint {checkpoint} out.")
    model = run / "export" / "saved_model"
    if saved and not model.is_dir():
        raise UserError(f"{run} has no export/saved_model yet: the end of the run makes it.")
    strategy = options.strategy
    if strategy == "auto":
        strategy = "mirrored" if options.replicas > 1 else "one-device"
    # The watchdog's files must not be among those of a training.
    changes: dict[str, Any] = {
        "logdir": str(run),
        "run_name": "evaluation",
        "strategy": strategy,
        "replicas": options.replicas,
        # These suited the machine that trained.
        "device": "auto",
        "micro_batch": 0,
    }
    config = dataclasses.replace(config, **changes)
    config.check()
    cluster = tf_config.for_strategy(strategy)
    found = None if saved else read_state(run, checkpoint)
    with quiet_start():
        from resnet import data
        from tfrl.workers.strategy import join
    with join(config, cluster) as (runtime, _):
        shares = -(-config.batch_size // runtime.replicas)
        config = dataclasses.replace(config, batch_size=shares * runtime.replicas)
        with quiet_start():
            dataset = data.load_on_all(config.dataset, config.image_size, runtime, lambda sentence: None)
        if found is None:
            loss, hits = _test_saved_model(config, runtime, dataset, model)
            name = "SavedModel"
        else:
            loss, hits = _test_weights(config, runtime, dataset, run, under(PREFIX, found.arrays))
            images = "" if found.env_steps is None else f"{found.env_steps:,} images, "
            name = images + found.name.replace("update", "checkpoint")
        runtime.all_agree(True)  # the first to exit would look like a failure
    with contextlib.suppress(OSError):
        config.run_dir.rmdir()
    if runtime.is_chief:
        count, devices = (
            len(dataset.test),
            f"{type(runtime.strategy).__name__}, {runtime.replicas} replica(s)",
        )
        print(f"{config.model} on {config.dataset}, {name}, {devices}")
        print(f"accuracy  {hits / count!r}  ({hits} of {count} test images)")
        print(f"loss      {loss:.6f}")
    return 0


def _test_weights(
    config: Config, runtime: Runtime, dataset: Dataset, run: Path, weights: dict[str, np.ndarray]
) -> tuple[float, int]:
    """Loss and hits of the classifier with these weights. Raises UserError if they are of another network."""
    from resnet.learner import Classifier

    with quiet_start():
        shape, classes = dataset.image_shape, len(dataset.classes)
        classifier = Classifier(config, runtime, image_shape=shape, classes=classes)
    try:
        classifier.begin_with(with_prefix(PREFIX, weights))
    except (ValueError, KeyError) as error:
        raise UserError(f"{run} has a checkpoint of other settings: {error}.") from None
    return classifier.test(_batches(config, runtime, dataset))


def _test_saved_model(config: Config, runtime: Runtime, dataset: Dataset, path: Path) -> tuple[float, int]:
    """Loss and hits of a SavedModel, loaded in the strategy's scope."""
    import tensorflow as tf

    from resnet.learner import scores, test
    from tfrl.ops.graph import graph

    try:
        with quiet_start(), runtime.strategy.scope():
            saved = tf.saved_model.load(str(path))
    except (OSError, ValueError) as error:
        tell(f"warning: {error}")
        raise UserError(f"{path} cannot be loaded; continue the run to export it again.") from None

    def scores_of(*batch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return runtime.strategy.run(lambda images, *others: scores(saved.serve(images), *others), args=batch)

    return test(runtime, graph(scores_of), _batches(config, runtime, dataset))


def _batches(config: Config, runtime: Runtime, dataset: Dataset) -> Iterator[ImageBatch]:
    """This worker's part of the batches of test images."""
    from resnet.data import Pass, Share

    share = Share(config.batch_size, runtime.worker, runtime.num_workers, replicas=runtime.local_replicas)
    return share.batches(dataset.test, [Pass(np.arange(len(dataset.test)))])


if __name__ == "__main__":
    endings.run(main)
