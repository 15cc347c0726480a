"""The course of `python -m tfrl.ALGORITHM`, from its arguments to the end of a run.

Nothing here imports TensorFlow before all settings are checked: that takes seconds."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cluster import launch
from cluster.places import Place, local_places
from tfrl import config as settings
from tfrl import remote
from tfrl.algorithms import ppg
from tfrl.cli import endings
from tfrl.cli.errors import UserError
from tfrl.cli.flags import flag
from tfrl.cli.quiet import quiet_start
from tfrl.cli.settings import Reader
from tfrl.cli.signals import held_back
from tfrl.config.actors import LEARNER, DistributedSettings, check_ray, leads
from tfrl.config.run import Network, RLSettings
from tfrl.envs import registry
from tfrl.envs.callables import find, is_importable, is_name, search_path
from tfrl.evaluation import policy_files
from tfrl.experience import phase, replay, rollout
from tfrl.networks.weights import check_torso
from tfrl.run import results
from tfrl.run.callbacks import Callback
from tfrl.run.console import Console
from tfrl.run.folder import check_run_folder, has_checkpoint
from tfrl.run.lock import take_run
from tfrl.training import start_from
from tfrl.workers import tf_config
from tfrl.workers.tf_config import TFConfig

if TYPE_CHECKING:
    from tfrl.remote.cluster import Cluster
    from tfrl.remote.learners import Nodes
    from tfrl.training.learner import MakeAgent


@dataclass(frozen=True)
class Command:
    """The command `python -m tfrl.ALGORITHM`: its `main`.

    Attributes:
      reader: reads the algorithm's settings.
      agent: the algorithm's class, made of the settings and the runtime.
    """

    reader: Reader[Any]
    agent: MakeAgent

    def __call__(self, arguments: Sequence[str]) -> int:
        """Trains with the settings of the command line; the exit code."""
        with endings.before_training():
            config = settings.parse(self.reader, arguments)
        return self.train(config, arguments)

    def train(self, config: RLSettings, arguments: Sequence[str], callbacks: Sequence[Callback] = ()) -> int:
        """Trains with settings; the exit code. The Python library calls it, too.

        Everything that can be wrong with settings and TF_CONFIG is found before TensorFlow is imported, which
        takes seconds.

        Args:
          config: the settings that the arguments stand for.
          arguments: of the command line that trains the same; --learners start it.
          callbacks: called by the loop, in this process.
        """
        reader, agent = self.reader, self.agent
        with endings.before_training():
            callbacks = [*_made(config.callbacks), *callbacks]
            if leads(config) and len(callbacks) > len(_names(config.callbacks)):
                raise UserError(
                    f"--learners {config.learners} runs callbacks in other processes: give each as the name "
                    "of its class, package.module:Class."
                )
            cluster = None if leads(config) else tf_config.for_strategy(config.strategy)
            evaluates = cluster is not None and cluster.is_evaluator
            if not evaluates:
                check(config, cluster)
        if evaluates:
            with quiet_start():
                from tfrl.training import evaluator
            return evaluator.follow(config)
        if leads(config):
            return launch_workers(config, reader.prog.removeprefix("python -m "), arguments)
        with endings.before_training(), take_run(config, cluster, reader.from_yaml) as config:
            # Several workers find out together, in the trainer: a shared disk may show a file to one first.
            if cluster is None and (told := told_complete(config)):
                Console(enabled=True).message(told)
                return 0
            with quiet_start(), held_back():
                import tensorflow  # noqa: F401 - here, where signals wait

                from tfrl.run import loop
                from tfrl.training import kinds
            return loop.train(config, cluster, lambda c, s: kinds.make_learner(c, s, agent), callbacks)


def _names(callbacks: str | None) -> list[str]:
    return [name.strip() for name in callbacks.split(",")] if callbacks else []


def _made(callbacks: str | None) -> list[Callback]:
    """The callbacks that --callbacks names. Raises UserError where there is none of a name."""
    made = []
    for name in _names(callbacks):
        try:
            kind = find(name)
        except ValueError as error:
            raise UserError(f"--callbacks: {error}.") from None
        if not (isinstance(kind, type) and issubclass(kind, Callback)):
            raise UserError(f"--callbacks {name} must be a class that extends tfrl.Callback.")
        try:
            made.append(kind())
        except TypeError as error:
            raise UserError(f"--callbacks {name} cannot be made without arguments: {error}.") from None
    return made


def check(config: RLSettings, cluster: TFConfig | None = None) -> None:
    """Raises UserError where the settings do not fit this machine or its workers, or the run's folder."""
    check_ray(config)
    if leads(config):  # on this machine, or spread over the nodes of a Ray
        workers, here = config.learners, 1 if config.ray_address else config.learners
    else:
        workers, here = (1, 1) if cluster is None else (cluster.num_workers, cluster.workers_here)
    config.check_topology(workers, replicas_per_worker=max(1, config.replicas))
    check_callables(config, workers)
    check_run_folder(config)  # first: the disk of a folder that cannot be made has no room either
    _check_memory(config, workers, here)
    if isinstance(config, ppg.Config) and not results.are_of_all(results.read(config.run_dir), config):
        phase.check_disk(config)
    if not has_checkpoint(config.run_dir):
        _check_beginning(config)


def check_callables(config: RLSettings, workers: int) -> None:
    """Raises UserError where processes could not import what settings name: a local function."""
    given = {"an env": config.env, "a torso": config.torso, "a critic_torso": config.critic_torso or ""}
    local = {what: name for what, name in given.items() if is_name(name) and not is_importable(name)}
    if not local:
        return
    what, name = next(iter(local.items()))
    numbers = {
        "learners": workers,
        **{n: getattr(config, n, 0) for n in ("env_processes", "actors", "observers")},
    }
    several = [f"{flag(name)} {n}" for name, n in numbers.items() if n > (name == "learners")]
    if several:
        raise UserError(
            f"{several[0]} needs {what} that other processes can import, and {name} is a lambda, a "
            "local function or one of a notebook: put the function into a module of its own."
        )


def _check_beginning(config: RLSettings) -> None:
    """Raises UserError where what a new run is to begin with is not there, or does not fit."""
    if config.start_from is not None:
        start_from.check(config)
    if isinstance(config, Network) and config.torso_weights is not None:
        check_torso(config)


def _check_memory(config: RLSettings, workers: int, here: int) -> None:
    """Raises UserError where the memory has no room for the replay or the rollouts of a worker."""
    if isinstance(config, replay.BufferSettings):
        replay.check_memory(config, workers, here)
    else:
        steps = config.steps_per_env * config.rollouts_held
        rollout.check_memory(registry.specs(config)[0], config.num_envs, steps, workers, here)


_RESTARTS = 3  # in a row without a new checkpoint
_RESTART_WAIT = 5.0  # seconds before the first of them
_GRACE = 5.0  # seconds from SIGTERM to SIGKILL after a failure


def launch_workers(config: DistributedSettings, module: str, arguments: Sequence[str]) -> int:
    """Trains with --learners, each the same command as a worker of TF_CONFIG; the exit code.

    They are the workers that `cluster.launch` would start, so all that holds of those holds of them. Nothing
    here imports TensorFlow.

    Args:
      config: checked settings.
      module: of the command, tfrl.impala say; with its first argument of a user's algorithm.
      arguments: of the command line.
    """
    places: _Here | Nodes = _Here(config) if config.ray_address is None else _on_nodes(config)
    with contextlib.closing(places):
        return launch.launch(
            places.find,
            [sys.executable, "-m", *module.split(), *arguments],
            max_restarts=_RESTARTS,
            restart_wait=_RESTART_WAIT,
            grace=_GRACE,
            called="learner",
        )


class _Here:
    """Places on this machine, beside a Ray of the run's own where it has actors."""

    def __init__(self, config: DistributedSettings) -> None:
        self._config = config
        self._cluster: Cluster | None = None

    def find(self, told: Callable[[], bool], tell: Callable[[str], None]) -> list[Place]:
        """The learners' places.

        Raises UserError for too few GPUs, and TrainingError if Ray could not be started.
        """
        config, address = self._config, ""
        if config.actors:
            from tfrl.remote.cluster import Cluster, store_bytes  # which imports Ray, and may not be there

            if self._cluster is not None and not self._cluster.is_alive():
                self.close()
            if self._cluster is None:
                self._cluster = Cluster(
                    None, {"--actors": config.actors}, store_bytes(config, config.num_envs)
                )
            address = self._cluster.address
        places = local_places(config.learners, None)
        # They import functions of the user's program from where it found them: its own folder, say.
        own = {LEARNER: address, "PYTHONPATH": search_path()}
        marked = ({**place.environment, **own} for place in places)
        return [
            dataclasses.replace(place, environment=environment)
            for place, environment in zip(places, marked, strict=True)
        ]

    def close(self) -> None:
        """Ends Ray."""
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None


def _on_nodes(config: DistributedSettings) -> Nodes:
    remote.reach_other_machines()
    from tfrl.remote.learners import Nodes  # which imports Ray, and may not be there

    return Nodes(config)


def told_complete(config: RLSettings) -> str | None:
    """The sentence for a run that is complete: its results are of its newest checkpoint. Otherwise None.

    Raises UserError as `check_length` does, and where no checkpoint is valid.
    """
    found = policy_files.results_of_newest(config.run_dir)
    if found is None or not results.are_of_all(found, config):
        return None
    check_length(config, found["env_steps"])
    return complete_sentence(config, found["env_steps"], found["episodes"])


def check_length(config: RLSettings, env_steps: int) -> None:
    """Raises UserError where the run is at more env steps than the settings want."""
    beyond = config.steps_per_update - 1 if config.updates_vary else 0  # how far its end may be
    if env_steps > config.run_steps + beyond:
        raise UserError(
            f"{config.run_dir} is at {env_steps:,} env steps, and --total-steps {config.total_steps:,} "
            "is less; give at least as many to go on with it, or another --run-name."
        )


def complete_sentence(config: RLSettings, env_steps: int, episodes: float, stopped: str | None = None) -> str:
    """Says that the run is complete after so many env steps and episodes, and how to go on with it.

    `stopped` is why a callback stopped it, None if none did.
    """
    if stopped is not None:
        return f"{config.run_dir} is complete, stopped by a callback ({stopped}); without it, it would go on."
    return f"{config.run_dir} is complete; {_advice(config, env_steps, episodes)}."


def _advice(config: RLSettings, env_steps: int, episodes: float) -> str:
    if env_steps < config.run_steps:
        if config.max_episodes is not None and episodes >= config.max_episodes:
            return "without --max-episodes, or with a higher one, it would go on"
        open_again = dataclasses.replace(config, solved_at=None).complete()
        without = "without --solved-at, or " if open_again.solved_at is None else ""
        return f"{without}with a higher {'one' if without else '--solved-at'}, it would go on"
    if "total_steps" in config.may_change:
        return "more --total-steps would go on with it"
    return (
        "its learning rate followed --total-steps to its end; another run goes on with its weights by "
        f"--start-from {config.run_dir}"
    )
