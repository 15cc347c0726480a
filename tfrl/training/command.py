"""The command `python -m tfrl.ALGORITHM`, from its arguments to the end of the run.

It checks all settings before it imports TensorFlow, because the import takes seconds."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cluster import launch
from cluster.launch import Place, environment_for, local_places
from tfrl.algorithms import registry as algorithms
from tfrl.algorithms.offline import OfflineSettings, needs_dataset
from tfrl.algorithms.runs import check_start
from tfrl.cli import endings
from tfrl.cli.endings import held_back
from tfrl.cli.errors import UserError
from tfrl.cli.flags import flag
from tfrl.cli.settings import Reader
from tfrl.cli.streams import quiet_start, set_log_level
from tfrl.config.distributed import LEARNER, DistributedSettings, check_ray, leads
from tfrl.config.run import NetworkSettings, RLSettings, check_levels
from tfrl.envs import registry
from tfrl.envs.callables import find, search_path
from tfrl.experience import recorded, replay, rollout
from tfrl.networks.weights import check_torso
from tfrl.remote import reach_other_machines
from tfrl.run.callbacks import Callback
from tfrl.run.folder import check_run_folder, confirm_restart, has_checkpoint, take_run
from tfrl.workers import tf_config
from tfrl.workers.tf_config import TFConfig

if TYPE_CHECKING:
    from tfrl.remote.cluster import Cluster
    from tfrl.remote.learners import Nodes
    from tfrl.run.loop import Learner, TrainingRun
    from tfrl.run.session import Session
    from tfrl.training.learner import EnvLearner, MakeAgent


class Command:
    """The `main` of `python -m tfrl.ALGORITHM`.

    Args:
      agent: the class of the algorithm; it takes the settings and the runtime.
      reader: reads the settings; None: the reader of the algorithm.

    Attributes:
      reader: reads the settings.
    """

    reader: Reader[Any]

    def __init__(self, agent: MakeAgent, reader: Reader[Any] | None = None) -> None:
        self._agent = agent
        self.reader = reader or algorithms.reader_of(agent)

    def __call__(self, arguments: Sequence[str]) -> int:
        """Trains with the settings of the command line; returns the exit code."""
        with endings.before_training():
            config = self.reader.parse(arguments)
        return self.train(config, arguments)

    def train(self, config: Any, arguments: Sequence[str], callbacks: Sequence[Callback] = ()) -> int:
        """Trains with given settings; returns the exit code. The Python library also calls this.

        Errors in settings and TF_CONFIG are found before TensorFlow is imported, which takes seconds.

        Args:
          config: the settings.
          arguments: the same settings as a command line, with which --learners starts workers.
          callbacks: of `as_callback`; called by the loop in this process.
        """
        if config.log_level != "warning":
            set_log_level(config.log_level)
        with endings.before_training():
            starts_workers = leads(config)
            if callbacks and starts_workers:
                raise UserError(
                    f"--learners {config.learners} runs callbacks in other processes: give each as the name "
                    "of its class, package.module:Class."
                )
            cluster = None if starts_workers else tf_config.for_strategy(config.strategy)
            evaluates = cluster is not None and cluster.is_evaluator
            if evaluates or starts_workers:
                callbacks = [*self._make_callbacks(config.callbacks), *callbacks]
            if starts_workers:
                self.check(config)
        if evaluates:
            with quiet_start():
                from tfrl.training.callbacks import follow
            return follow(config, has_callbacks=bool(callbacks))
        if starts_workers:
            if config.resume == "restart":  # the workers have no terminal
                confirm_restart(config)
                arguments = [*arguments, "--yes"]
            return launch_workers(config, self.reader.command.removeprefix("python -m "), arguments)
        with self.open(config, callbacks) as run:
            return run.run()

    @contextlib.contextmanager
    def open(self, config: Any, callbacks: Sequence[Callback] = ()) -> Iterator[TrainingRun]:
        """Makes the run of given settings within the context; `TrainingRun.start` starts or resumes it.

        Raises UserError if the settings name other processes that learn, or if this one is an evaluator.
        """
        with endings.before_training():
            cluster = tf_config.for_strategy(config.strategy)
            if leads(config) or (cluster is not None and cluster.is_evaluator):
                raise UserError(
                    "this process does not learn itself, with --learners or as the evaluator of a cluster: "
                    "use tfrl.train."
                )
            callbacks = [*self._make_callbacks(config.callbacks), *callbacks]
            self.check(config, cluster)
        with endings.before_training(), take_run(config, cluster, self.reader.from_yaml) as config:
            with quiet_start(), held_back():
                import tensorflow  # noqa: F401 - here, where signals wait

                from tfrl.run import loop

                make_learner = self.learner_of(config)
            with loop.open_run(config, cluster, make_learner, callbacks) as run:
                yield run

    # What the supervised trainer does in another way

    def check(self, config: Any, cluster: TFConfig | None = None) -> None:
        """Raises UserError if the settings do not fit this machine, its workers or the run's folder."""
        check_ray(config)
        if leads(config):  # on this machine, or on the nodes of a Ray cluster
            workers, here = config.learners, 1 if config.ray_address else config.learners
        else:
            workers, here = (1, 1) if cluster is None else (cluster.num_workers, cluster.workers_here)
        config.check_topology(workers, replicas_per_worker=max(1, config.replicas))
        check_callables(config, workers)
        check_run_folder(config)
        if getattr(config, "level_replay", False):
            check_levels(config)
        dataset = getattr(config, "dataset", None)
        if dataset == "" and isinstance(config, OfflineSettings):
            raise UserError(needs_dataset(config))
        if dataset is not None:
            recorded.check_set(dataset)
        if isinstance(config, replay.BufferSettings):
            replay.check_memory(config, workers, here)
        elif dataset is None:
            steps = config.steps_per_env * config.rollouts_held
            rollout.check_memory(registry.specs(config)[0], config.num_envs, steps, workers, here)
        if config.resume != "restart" and has_checkpoint(config.run_dir):
            return
        if config.start_from is not None:
            check_start(config)
        if isinstance(config, NetworkSettings) and config.torso_weights is not None:
            check_torso(config)

    def learner_of(self, config: Any) -> Callable[[Session], Learner]:
        """Returns a function that makes the learner in a session. Imports TensorFlow."""
        kind, agent = learner_class(config), self._agent
        return lambda session: kind(config, session, agent)

    def as_callback(self, given: Any) -> Callback:
        """The callback as the loop calls it. Raises UserError if the object is no callback."""
        if not isinstance(given, Callback):
            raise UserError(
                "callbacks must be objects of classes that extend tfrl.Callback, such as StopAfter(), or "
                f"names of such classes; got {given!r}."
            )
        return given

    def is_callback(self, kind: Any) -> bool:
        """True for a class whose objects `as_callback` takes."""
        return isinstance(kind, type) and issubclass(kind, Callback)

    def _make_callbacks(self, names: str | None) -> list[Callback]:
        """Creates the callbacks that --callbacks names. Raises UserError if one does not exist."""
        made = []
        for name in names.replace(" ", "").split(",") if names else ():
            try:
                kind = find(name)
            except ValueError as error:
                raise UserError(f"--callbacks: {error}.") from None
            if not self.is_callback(kind):
                raise UserError(f"--callbacks {name} must be a class that extends tfrl.Callback.")
            try:
                made.append(self.as_callback(kind()))
            except TypeError as error:
                raise UserError(f"--callbacks {name} cannot be made without arguments: {error}.") from None
        return made


def of_algorithm(algorithm: str | type) -> Command:
    """The command of an algorithm: a name, `module:Class` or the class. Raises UserError if there is none."""
    if isinstance(algorithm, type):
        return Command(algorithm)
    if not isinstance(algorithm, str):
        raise UserError(f"an algorithm is a name, MODULE:CLASS or a class; got {algorithm!r}.")
    return Command(algorithms.agent_of(algorithm), algorithms.reader(algorithm))


def learner_class(config: RLSettings) -> Callable[[Any, Session, MakeAgent], EnvLearner]:
    """The learner of a run, by its algorithm and its settings. Imports TensorFlow."""
    from tfrl.algorithms import offline, ppg, reinforce
    from tfrl.training.episodic import EpisodicLearner
    from tfrl.training.off_policy import OffPolicyLearner
    from tfrl.training.offline import OfflineLearner
    from tfrl.training.on_policy import OnPolicyLearner
    from tfrl.training.phasic import PhasicLearner

    if isinstance(config, replay.BufferSettings):
        return OffPolicyLearner
    if isinstance(config, offline.OfflineSettings):
        return OfflineLearner
    if isinstance(config, reinforce.Config):
        return EpisodicLearner
    if isinstance(config, ppg.Config):
        return PhasicLearner
    return OnPolicyLearner


def check_callables(config: RLSettings, workers: int) -> None:
    """Raises UserError if other processes cannot import a function of the settings, like a local one."""
    if not config.local_callables:
        return
    setting, name = next(iter(config.local_callables.items()))
    article = "an" if setting == "env" else "a"
    numbers = {
        "learners": workers,
        **{n: getattr(config, n, 0) for n in ("env_processes", "actors", "observers")},
    }
    several = [f"{flag(name)} {n}" for name, n in numbers.items() if n > (name == "learners")]
    if several:
        raise UserError(
            f"{several[0]} needs {article} {setting} that other processes can import, and {name} is a "
            "lambda, a local function or a function of a notebook: put it into a module."
        )


def launch_workers(config: DistributedSettings, module: str, arguments: Sequence[str]) -> int:
    """Trains with --learners: starts the same command once for each worker of a TF_CONFIG; returns the exit
    code.

    The workers are started like those of `cluster.launch`. This function does not import TensorFlow.

    Args:
      config: checked settings.
      module: the module of the command, such as tfrl.impala. For a user's algorithm, the first argument of
        the command follows.
      arguments: the arguments of the command.
    """
    places: _Here | Nodes
    if config.ray_address is None:
        places = _Here(config)
    else:
        reach_other_machines()
        from tfrl.remote.learners import Nodes  # which imports Ray, and may not be there

        places = Nodes(config)
    with contextlib.closing(places):
        return launch.launch(
            places.find,
            [sys.executable, "-m", *module.split(), *arguments],
            max_restarts=3,
            called="learner",
        )


class _Here:
    """Places for learners on this machine, with a Ray of the run if it has actors."""

    def __init__(self, config: DistributedSettings) -> None:
        self._config = config
        self._cluster: Cluster | None = None

    def find(self, told: Callable[[], bool], tell: Callable[[str], None]) -> list[Place]:
        """The places of the learners.

        Raises UserError for too few GPUs, and TrainingError if Ray cannot be started.
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
        places = local_places(config.learners, None, environment_for(config.device))
        # The learners import the user's functions from the same folders as the user's program.
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
