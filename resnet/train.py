"""python -m resnet.train: train a network of the zoo on labelled images.

It shares strategies, run folder, display, checkpoints and exit codes with `tfrl.ppo_procgen`.
"""

from __future__ import annotations

from collections.abc import Sequence

from resnet.config import READER
from tfrl.cli import endings
from tfrl.cli.errors import UserError
from tfrl.cli.signals import held_back
from tfrl.cli.streams import quiet_start, set_log_level
from tfrl.run.folder import take_run
from tfrl.workers import tf_config


def main(arguments: Sequence[str]) -> int:
    """Trains with the settings of the command line; returns the exit code.

    Errors in settings and TF_CONFIG are found before TensorFlow is imported, which takes seconds.
    """
    with endings.before_training():
        config = READER.parse(arguments)
        set_log_level(config.log_level)
        cluster = tf_config.for_strategy(config.strategy)
        if cluster is not None and cluster.is_evaluator:
            raise UserError(
                "resnet.train tests after each epoch itself and has no evaluator; remove the evaluator "
                "from TF_CONFIG."
            )
        workers = 1 if cluster is None else cluster.num_workers
        config.check_topology(workers, max(1, config.replicas))
        with take_run(config, cluster, READER.from_yaml) as config:
            with quiet_start(), held_back():
                from resnet import learner
            return learner.train(config, cluster)


if __name__ == "__main__":
    endings.run(main)
