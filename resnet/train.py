"""python -m resnet.train: train a network of the zoo on labelled images.

It shares strategies, run folder, display, checkpoints and exit codes with `tfrl.ppo_procgen`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from resnet.callbacks import KerasCallback, is_keras_callback
from resnet.config import READER, Config, check_start
from tfrl.cli import endings
from tfrl.cli.errors import UserError
from tfrl.run.callbacks import Callback
from tfrl.run.folder import check_run_folder, has_checkpoint
from tfrl.training.command import Command
from tfrl.workers import tf_config
from tfrl.workers.tf_config import TFConfig

if TYPE_CHECKING:
    from tfrl.run.loop import Learner
    from tfrl.run.session import Session


class Supervised(Command):
    """The `main` of `python -m resnet.train`, and the algorithm "resnet" of `tfrl.train` and sweeps."""

    reader = READER

    def __init__(self) -> None:
        """Overrides that of `Command`, whose settings belong to an agent."""

    def train(self, config: Config, arguments: Sequence[str], callbacks: Sequence[Callback] = ()) -> int:
        """Trains with given settings; returns the exit code. Arguments are those of `Command.train`."""
        with endings.before_training():
            cluster = tf_config.for_strategy(config.strategy)
            if cluster is not None and cluster.is_evaluator:
                raise UserError(
                    "resnet.train tests after each epoch itself and has no evaluator; remove the evaluator "
                    "from TF_CONFIG."
                )
        return super().train(config, arguments, callbacks)

    def check(self, config: Config, cluster: TFConfig | None = None) -> None:
        """Raises UserError if the settings do not fit the workers or the run's folder."""
        workers = 1 if cluster is None else cluster.num_workers
        config.check_topology(workers, max(1, config.replicas))
        check_run_folder(config)
        if config.start_from is not None and not has_checkpoint(config.run_dir):
            check_start(config)

    def learner_of(self, config: Config) -> Callable[[Session], Learner]:
        """Returns a function that makes the learner in a session. Imports TensorFlow."""
        from resnet.learner import make_learner

        return lambda session: make_learner(config, session)

    def as_callback(self, given: Any) -> Callback:
        """The callback as the loop calls it; Keras's are called at the ends of rows and epochs."""
        return KerasCallback(given) if is_keras_callback(type(given)) else super().as_callback(given)

    def is_callback(self, kind: Any) -> bool:
        """True for a class of callbacks, tfrl's or Keras's."""
        return is_keras_callback(kind) or super().is_callback(kind)


main = Supervised()

if __name__ == "__main__":
    endings.run(main)
