"""python -m tfrl.ppo_procgen: train PPO on procgen."""

from __future__ import annotations

from collections.abc import Sequence

from tfrl.cli import endings
from tfrl.cli.quiet import quiet_start
from tfrl.config.ppo import check_topology, from_yaml, parse
from tfrl.experience.rollout import check_memory
from tfrl.networks import torso_weights
from tfrl.run.lock import take_run
from tfrl.workers import tf_config


def main(arguments: Sequence[str]) -> int:
    """Trains with the settings of the command line; the exit code.

    Everything that can be wrong with settings and TF_CONFIG is found before TensorFlow is imported, which
    takes seconds.
    """
    config = parse(arguments)
    cluster = tf_config.for_strategy(config.strategy)
    if cluster is not None and cluster.is_evaluator:
        with quiet_start():
            from tfrl.training import evaluator
        return evaluator.follow(config)
    workers = 1 if cluster is None else cluster.num_workers
    check_topology(config, workers, replicas_per_worker=max(1, config.replicas))
    check_memory(config, workers)
    if config.torso_weights is not None:
        torso_weights.check(config)
    with take_run(config, cluster, from_yaml) as config:
        with quiet_start():
            from tfrl.training import on_policy
        return on_policy.train(config, cluster)


if __name__ == "__main__":
    endings.run(main)
