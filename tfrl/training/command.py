"""The course of `python -m tfrl.ALGORITHM`, from its arguments to the end of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfrl import config as settings
from tfrl.algorithms import ppg
from tfrl.cli import endings
from tfrl.cli.quiet import quiet_start
from tfrl.cli.settings import Reader
from tfrl.cli.signals import held_back
from tfrl.config.actors import check_ray, leads
from tfrl.config.run import RLSettings
from tfrl.envs import registry
from tfrl.experience import phase, replay, rollout
from tfrl.networks.weights import check_torso
from tfrl.run import restart, results
from tfrl.run.console import Console
from tfrl.run.folder import check_run_folder, has_checkpoint
from tfrl.run.lock import take_run
from tfrl.training import finished, learners, start_from
from tfrl.workers import tf_config
from tfrl.workers.tf_config import TFConfig

if TYPE_CHECKING:
    from tfrl.training.learner import MakeAgent


def run(reader: Reader, agent: MakeAgent, arguments: Sequence[str]) -> int:
    """Trains with the settings of the command line; the exit code.

    Everything that can be wrong with settings and TF_CONFIG is found before TensorFlow is imported, which
    takes seconds.

    Args:
      reader: reads the algorithm's settings.
      agent: the algorithm's class, made of the settings and the runtime.
      arguments: of the command line.
    """
    with endings.before_training():
        config = settings.parse(reader, arguments)
        leading = leads(config)
        cluster = None if leading else tf_config.for_strategy(config.strategy)
        evaluates = cluster is not None and cluster.is_evaluator
        if not evaluates:
            check(config, cluster)
        if cluster is None or cluster.is_chief:
            restart.check(config, arguments)
    if evaluates:
        with quiet_start():
            from tfrl.training import evaluator
        return evaluator.follow(config)
    if leading:
        agreed = [*arguments, "--yes"] if config.resume == "restart" else arguments
        return learners.lead(config, reader.prog.removeprefix("python -m "), agreed)
    with endings.before_training(), take_run(config, cluster, reader.from_yaml) as config:
        # Several workers find out together, in the trainer: a shared disk may show a file to one first.
        if cluster is None and (told := finished.complete(config)):
            Console(enabled=True).message(told)
            return 0
        with quiet_start(), held_back():
            import tensorflow  # noqa: F401 - here, where signals wait

            from tfrl.training import trainer
            from tfrl.training.actor_learner import make_learner
        return trainer.train(config, cluster, lambda c, session: make_learner(c, session, agent))


def check(config: RLSettings, cluster: TFConfig | None = None) -> None:
    """Raises UserError where the settings do not fit this machine or its workers, or the run's folder."""
    check_ray(config)
    if leads(config):  # on this machine, or spread over the nodes of a Ray
        workers, here = config.learners, 1 if config.ray_address else config.learners
    else:
        workers, here = (1, 1) if cluster is None else (cluster.num_workers, cluster.workers_here)
    config.check_topology(workers, replicas_per_worker=max(1, config.replicas))
    check_run_folder(config)  # first: the disk of a folder that cannot be made has no room either
    _check_memory(config, workers, here)
    if isinstance(config, ppg.Config) and not results.are_of_all(results.read(config.run_dir), config):
        phase.check_disk(config)
    if config.resume == "restart" or not has_checkpoint(config.run_dir):
        _check_beginning(config)


def _check_beginning(config: RLSettings) -> None:
    """Raises UserError where what a new run is to begin with is not there, or does not fit."""
    if config.start_from is not None:
        start_from.check(config)
    if getattr(config, "torso_weights", None) is not None:
        check_torso(config)


def _check_memory(config: RLSettings, workers: int, here: int) -> None:
    """Raises UserError where the memory has no room for the replay or the rollouts of a worker."""
    if hasattr(config, "replay_size"):
        replay.check_memory(config, workers, here)
    else:
        steps = config.steps_per_env * config.rollouts_held
        rollout.check_memory(registry.specs(config)[0], config.num_envs, steps, workers, here)
