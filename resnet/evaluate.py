"""python -m resnet.evaluate RUN: test the newest checkpoint of a supervised run, also before the run ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from resnet.config import from_yaml
from tfrl.cli import endings, flags
from tfrl.cli.errors import UserError
from tfrl.cli.settings import SETTINGS_FILE, algorithm_of
from tfrl.cli.streams import quiet_start, tell
from tfrl.run.checkpoint import CheckpointStore

_USAGE = "python -m resnet.evaluate RUN"


@dataclass(frozen=True)
class Options:
    """No flags beside --help."""


def main(arguments: Sequence[str]) -> int:
    """Prints the accuracy on the whole test set; returns the exit code."""
    words, _ = flags.parse(Options, arguments, _USAGE, "Test the newest checkpoint of a supervised run.")
    run = Path(flags.one(words, "run's folder", _USAGE))
    if algorithm_of(run / SETTINGS_FILE) != "resnet":
        raise UserError(f"{run} is not the folder of a run of resnet.train.")
    config = dataclasses.replace(from_yaml(run / SETTINGS_FILE), strategy="one-device", replicas=0)
    try:
        dataclasses.replace(config, run_name=None, logdir="logs").validate()
    except UserError as error:
        raise UserError(f"{run / SETTINGS_FILE}: {error}") from None
    store = CheckpointStore(run / "checkpoints", keep=1)
    if (saved := store.load(lambda sentence: tell(f"warning: {sentence}"))) is None:
        raise UserError(f"{run} has no checkpoint yet.")
    with quiet_start():
        from resnet import data
        from resnet.learner import Classifier
        from tfrl.workers import strategy

        strategy.set_up_tensorflow()
        data.prepare(config.dataset)
        dataset = data.load(config.dataset, config.image_size)
        shape, classes = dataset.image_shape, len(dataset.classes)
        classifier = Classifier(config, strategy.make(config, None), image_shape=shape, classes=classes)
        try:
            classifier.set_state(saved.learner)
        except (ValueError, KeyError) as error:
            raise UserError(f"{run} has a checkpoint of other settings: {error}.") from None
    count = len(dataset.test)
    batches = data.Share(config.batch_size).batches(dataset.test, [data.Pass(np.arange(count))])
    loss, hits = classifier.test(batches)
    print(f"{config.model} on {config.dataset}, {saved.env_steps:,} images, checkpoint {saved.update}")
    print(f"accuracy  {hits / count!r}  ({hits} of {count} test images)")
    print(f"loss      {loss:.6f}")
    return 0


if __name__ == "__main__":
    endings.run(main)
