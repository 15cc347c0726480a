"""The common part of all learners from envs."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from tfrl.algorithms.algorithm import Agent
from tfrl.cli.errors import UserError
from tfrl.cli.flags import flag
from tfrl.config.distributed import DistributedSettings
from tfrl.config.run import NetworkSettings, RLSettings, hyperparameters
from tfrl.envs import procgen, registry
from tfrl.envs.facts import NO_ENV
from tfrl.envs.published import RANGES, score_range
from tfrl.envs.registry import TRAIN, level_set_title
from tfrl.envs.spec import EnvSpec, Sums
from tfrl.experience import memory
from tfrl.experience.collector import Collector, EnvStates
from tfrl.experience.episodes import evaluation_columns, evaluation_results
from tfrl.experience.levels import LevelSampler
from tfrl.experience.memory import Memory
from tfrl.experience.normalize import EpisodeStatistics, FinishedEpisodes, ObservationNormalizer
from tfrl.experience.replay import BufferSettings
from tfrl.networks.weights import export, read_start, weights_of
from tfrl.remote import reach_other_machines
from tfrl.run.checkpoint import State, pack_bytes, under, unpack_bytes, with_prefix
from tfrl.run.folder import finite
from tfrl.run.loop import Conclusion, Learner
from tfrl.run.metrics import MetricsWriter, NullMetricsWriter
from tfrl.run.session import Session, tensorboard
from tfrl.training import callbacks
from tfrl.workers import machine
from tfrl.workers.strategy import Runtime

if TYPE_CHECKING:
    from tfrl.experience.recorded import RecordedSet
    from tfrl.experience.rollout import Rollout
    from tfrl.remote.actors import RayCollector
    from tfrl.training.prefetch import Prefetch, ThreadCollector

MakeAgent = Callable[[Any, Runtime], Agent]
_DEVIATION = "train/action_std"


class WorkerEnvs(Protocol):
    """A worker's envs, which its process, a thread of it, or processes on Ray step."""

    @property
    def exact_state(self) -> bool:
        """False if the last `set_state` could not continue exactly in some envs."""

    def get_state(self) -> EnvStates:
        """The state of the envs at the end of the last rollout that was taken."""

    def set_state(self, states: Mapping[int, bytes]) -> None:
        """Continues from states by global env index."""

    def close(self) -> None:
        """Closes the envs, and ends their threads and processes."""


class _EnvState(NamedTuple):
    """The state of the episodes' statistics, of the envs, and of rollouts that are ahead of the learner."""

    episodes: Mapping[str, np.ndarray]
    envs: EnvStates
    ahead: Mapping[str, np.ndarray]


class EnvLearner(Learner):
    """Envs, an agent that learns from them, and their state. All workers make the same calls.

    A subclass adds `envs`, `update` and its `time_columns`, and extends `get_state` and `set_state`.

    Args:
      config: the settings.
      session: this process's part of the run; `session.step` is the number of finished updates.
      make_agent: makes the agent from the settings and the runtime.

    Attributes:
      agent: the agent.
      envs: this worker's envs.
      has_updated: this process has taken an update.
      time_columns: the metrics of `update` that do not come from the agent, in the order of progress.csv.
    """

    _config: RLSettings
    agent: Agent
    envs: WorkerEnvs
    _prefetch: Prefetch | None = None  # None if learner and envs take turns
    _levels: LevelSampler | None = None  # None without level replay
    time_columns: tuple[str, ...]
    has_updated = False

    def __init__(self, config: RLSettings, session: Session, make_agent: MakeAgent) -> None:
        self._config = config
        self._session = session
        self._runtime = session.runtime
        try:
            self.agent = make_agent(config, session.runtime)
        except ValueError as error:  # an error of the zoo, such as too small an image for the network
            message = str(error).splitlines()[0]
            raise UserError(f"--torso {config.torso} cannot be built for {config.env}: {message}") from None
        self._episodes = EpisodeStatistics(config.num_envs)
        self._finished: list[tuple[int, int, float, float]] = []  # episodes of this update: rows of a file
        self._unseen_info = {*config.logged_info}  # keys of --log-info without a number in this process
        self.evaluates_first = config.eval_at_start
        # With --max-episodes: the state before the rollout, and the env steps of a rollout that the last
        # episode has cut. A run that goes on with a higher number repeats this rollout.
        self._before: _EnvState | None = None
        self._cut_steps = 0
        self._waits = callbacks.Waits() if config.is_ahead else None
        self.callbacks = callbacks.of_run(config, session, self.agent.network)
        if self._waits is not None:
            self.callbacks = (*self.callbacks, self._waits)
        self.draw_noise = self.agent.network.draw_noise

    def begin(self) -> None:
        """Sets the first weights of a new run; a resumed run has weights already. A collective."""
        self.agent.begin()
        if self._config.start_from is None:
            return
        state, self._session.started_from = read_start(self._config, self._session)
        try:
            self._begin_with(state)
        except (ValueError, KeyError) as error:
            raise UserError(
                f"--start-from {self._config.start_from} has another network or optimizer: {error}."
            ) from None

    def _begin_with(self, state: Mapping[str, np.ndarray]) -> None:
        """Loads the state of another run's checkpoint, or only its weights.

        Raises ValueError or KeyError if they belong to another network.
        """
        self.agent.begin_with(state)

    def warn_of_other_env(self, recorded: RecordedSet) -> None:
        """Warns, on the chief, if a set was recorded in another env than that of the settings."""
        env = self._config.env
        is_other = recorded.env is not None and env not in (NO_ENV, registry.own_name(recorded.env))
        if is_other and self._runtime.is_chief:
            self._session.console.warn(f"{recorded.name} was recorded in {recorded.env}, and --env is {env}.")

    def _load_moments(self, normalizer: ObservationNormalizer, state: Mapping[str, np.ndarray]) -> None:
        """Loads the moments of observations of another run's checkpoint, or of an export, whose weights
        contain mean and scale.
        """
        if moments := under("observations/", state):
            normalizer.set_state(moments)
        else:
            constants = (weights_of(state)[f"observations/{name}"] for name in ("mean", "scale"))
            normalizer.begin_with(*constants, count=(self._session.started_from or {})["env_steps"])

    def _count(self, began: float) -> float:
        """Counts the seconds of an update, or a part of it, that began at `began`; returns them."""
        self.has_updated = True
        seconds = time.perf_counter() - began
        self._session.watchdog.measured(seconds)
        self._session.seconds += seconds
        return seconds

    @property
    def _collector(self) -> Collector:
        """The envs of a learner without a prefetch, which this process steps itself."""
        assert isinstance(self.envs, Collector)
        return self.envs

    def _prefetched(self, prefetch: Prefetch) -> Rollout:
        """The next rollout of envs that are ahead of the learner. A collective."""
        rollout = prefetch.take(self._session.step, self.agent.get_weights(), self.level_probabilities)
        began = prefetch.collector.began
        # The envs of a replaced actor may have begun new episodes.
        self._forget(began.first[np.argsort(began.indices)])
        return rollout

    @property
    def level_probabilities(self) -> np.ndarray | None:
        """The probabilities of the levels of the next episodes, float64 [L]; None without level replay."""
        return None if self._levels is None else self._levels.probabilities()

    # Evaluation

    def is_evaluation_due(self, before: tuple[int, int]) -> bool:
        """True if --eval-every or --eval-every-steps has been passed since `before`."""
        return self._config.evaluates_at(self._session.step, self.steps_done, since=before)

    def evaluate(self) -> dict[str, float]:
        """Plays all level sets; every worker plays its share of the envs."""
        return callbacks.evaluate(self._config, self._session, self)

    def act(self, observations: np.ndarray, noise: np.ndarray, *remembered: np.ndarray) -> Any:
        """Actions [B, *shape] of an evaluation for observations [B, *shape], by noise [B, K].

        A recurrent policy also takes its memory [B, M], and returns (actions, states [B, S]).
        """
        self._session.watchdog.beat()
        return self.agent.acting.act(observations, None if self._config.eval_greedy else noise, *remembered)

    def memory(self, envs: int) -> Memory | None:
        """The memory of this number of evaluation envs; None if the policy is not recurrent."""
        return memory.of_settings(self._config, envs)

    def weights(self) -> dict[str, np.ndarray]:
        """The agent's weights by name."""
        return self.agent.get_weights()

    # How far the run is

    @property
    def steps_done(self) -> int:
        """Env steps of all finished updates, all workers together, and those of a cut rollout."""
        return self._session.step * self._config.steps_per_update + self._cut_steps

    def _env_state(self) -> _EnvState:
        """The present state of the envs and of what belongs to them."""
        within = self.steps_within > 0
        ahead = {}
        if self._prefetch is not None:
            ahead = self._prefetch.get_state(self._session.step, within=within)
        return _EnvState(self._episodes.get_state(), self.envs.get_state(), ahead)

    def _cut_after(self, env_steps: int) -> None:
        """Ends the run so many env steps after its last update, without learning from them."""
        self._cut_steps = env_steps
        self._session.changed()

    @property
    def total_steps(self) -> int:
        """The number of env steps at which the run ends at the latest."""
        return self._config.run_steps

    @property
    def place(self) -> str:
        """The place of the run in messages, such as "update 4"."""
        step = self._session.step
        return f"within update {step + 1}" if self.steps_within else f"update {step}"

    @property
    def is_solved(self) -> bool:
        """True on all workers if the mean return of the last 100 episodes is --solved-at or more."""
        wanted = self._config.solved_at
        return wanted is not None and self._episodes.is_full and self._episodes.mean_return >= wanted

    @property
    def is_over(self) -> bool:
        """True on all workers at --total-steps, --max-episodes or --solved-at.

        False within an unfinished update, because its weights are not those of a finished update.
        """
        if self.steps_within:
            return False
        most = self._config.max_episodes
        enough = most is not None and self._episodes.episodes >= most
        return self.steps_done >= self._config.run_steps or enough or self.is_solved

    # Metrics

    def episode_metrics(self) -> dict[str, float]:
        """The `rollout/` metrics and those of level replay, in the order of progress.csv.

        Means are over the last 100 episodes. `mean_reward` of an env step and `longest_episode` so far in env
        steps are only of the last update.
        """
        config, mean = self._config, self._episodes.mean_return
        score = config.normalized(mean)
        found = {
            "rollout/episode_return": mean,
            "rollout/episode_length": self._episodes.mean_length,
            "rollout/normalized_return": float("nan") if score is None else score,
            "rollout/episodes": self._episodes.episodes,
            "rollout/mean_reward": self._episodes.mean_reward,
            "rollout/longest_episode": self._episodes.longest,
        }
        return found if self._levels is None else found | self._levels.metrics()

    def note_episodes(self, finished: FinishedEpisodes, env_steps: np.ndarray) -> None:
        """Notes finished episodes for episodes.csv, with the env steps [n] of the run at their ends."""
        columns = (env_steps, finished.envs, finished.returns, finished.lengths)
        self._finished += zip(*(column.tolist() for column in columns), strict=True)

    def write_episodes(self) -> None:
        """Writes the noted episodes, once the seconds of the update are counted. Only the chief writes."""
        self._session.writer.episodes(self._finished, self._session.seconds)
        self._finished = []

    def info_metrics(self, mine: Sums) -> dict[str, float]:
        """The columns of the envs' infos, from the sums of this worker's envs. A collective.

        A column is the mean over all steps of the update whose info has the number.
        """
        names = sorted(mine)
        if self._runtime.num_workers > 1:
            names = self._names_on_all(names)
        if not names:
            return {}
        none = np.zeros((2, len(self._runtime.local_envs(self._config.num_envs))))
        sums = self._runtime.gather_envs(np.stack([mine.get(name, none) for name in names])).sum(axis=-1)
        self._unseen_info -= {*names}
        return {f"info/{name}": float(s / n) for name, (s, n) in zip(names, sums, strict=True)}

    def _names_on_all(self, mine: list[str]) -> list[str]:
        """The sorted names that any worker has. A collective."""
        text = json.dumps(mine).encode()
        sizes, sums = self._session.of_workers(len(text)), self._session.of_workers(zlib.crc32(text))
        if (sizes == sizes[0]).all() and (sums == sums[0]).all():
            return mine
        texts = np.zeros((len(sizes), sizes.max()))
        texts[self._runtime.worker, : len(text)] = np.frombuffer(text, np.uint8)
        texts = self._runtime.sum_over_workers(texts).astype(np.uint8)
        every = (json.loads(row[:size].tobytes()) for row, size in zip(texts, sizes.tolist(), strict=True))
        return sorted({name for names in every for name in names})

    def deviation_metric(self, observations: np.ndarray, *remembered: np.ndarray) -> dict[str, float]:
        """The mean standard deviation of the policy at observations [B, *shape] of this worker's envs.

        Only for a network that `has_deviation`. A recurrent policy also takes its memory [B, M]. A
        collective.
        """
        mine = self.agent.acting.deviations(observations, *remembered)
        return {_DEVIATION: float(self._runtime.gather_envs(mine).mean())}

    # Output for the user

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of progress.csv after `env_steps`, in order."""
        return (
            *self.episode_metrics(),
            *self.agent.metric_names,
            *([_DEVIATION] if self.agent.network.has_deviation else []),
            *evaluation_columns(self._config.level_sets),
            *self.time_columns,
        )

    def describe(self, writer: MetricsWriter | NullMetricsWriter) -> None:
        """Writes the settings for TensorBoard where its curves begin."""
        resolved = dataclasses.replace(self._config, precision=self._runtime.precision)
        writer.hyperparameters(hyperparameters(resolved))

    def summary(self) -> dict[str, str]:
        """The learner's own rows of the table before training."""
        config = self._config
        torso = config.torso + (f" of {config.hidden}" if config.small_network else "")
        if isinstance(config, NetworkSettings) and config.memory != "none":
            torso += f" and {config.memory} of {config.memory_size}"
        width = f"width {config.torso_width}, " if config.torso_width != 1 else ""
        lines = {
            **_env(config),
            "preset": config.preset,
            "length": _length(config),
            **self.agent.summary,
            **(_actors(config) if config.is_ahead else {}),
            "network": f"{torso}, {width}{self.agent.num_parameters:,} parameters",
        }
        if (start := self._session.started_from) is not None:
            lines["started from"] = f"{start['run']}, at step {start['env_steps']:,}"
        return lines

    def check_length(self, found_steps: int) -> None:
        """Raises UserError if the checkpoint has more env steps than --total-steps."""
        config = self._config
        beyond = config.steps_per_update - 1 if config.updates_vary else 0  # the largest possible end
        if found_steps > config.run_steps + beyond:
            raise UserError(
                f"{config.run_dir} is at {found_steps:,} env steps, and --total-steps {config.total_steps:,} "
                "is less; give at least as many to resume it, or choose another --run-name."
            )

    def completed(self, stopped: str | None) -> str:
        """The sentence that says that the run is complete, and how to extend it."""
        config = self._config
        if stopped is not None:
            advice = f"a callback stopped it ({stopped}); without callbacks, it would continue"
        elif self.steps_done < config.run_steps:
            ends = [flag(name) for name in ("solved_at", "max_episodes") if getattr(config, name) is not None]
            advice = f"with a higher {' or '.join(ends)}, it would continue"
        elif "total_steps" in config.may_change:
            advice = "more --total-steps would continue it"
        else:
            advice = f"it followed --total-steps to the end; --start-from {config.run_dir} starts another run"
        return f"{config.run_dir} is complete; {advice}."

    # State

    def get_state(self) -> State:
        """The state of the agent, the episodes and the envs; that before a cut rollout, and its results."""
        env_state, state = self._env_state(), self.agent.get_state()
        if self._cut_steps and self._before is not None:
            state |= with_prefix("cut/", {"steps": np.array(self._cut_steps), **env_state.episodes})
            env_state = self._before
        state |= with_prefix("episodes/", env_state.episodes)
        state |= dict(env_state.ahead)  # the older weights
        indices, states, observations, first = env_state.envs
        data, lengths = pack_bytes(states)
        part = {"indices": np.array(indices), "states": data, "lengths": lengths}
        return State(state, [part | {"observations": observations, "first": first}])

    def set_state(self, state: State) -> None:
        """Restores the state of all workers. Raises UserError like `Learner.set_state`.

        A subclass restores its own running sums of the episodes before.
        """
        try:
            self.agent.set_state(state.learner)
        except (ValueError, KeyError):
            raise UserError(
                f"the checkpoints in {self._config.run_dir} belong to another network; choose another "
                "--run-name."
            ) from None
        self._episodes.set_state(under("episodes/", state.learner))
        if self._prefetch is not None:
            self._prefetch.set_state(state.learner)
        self._restore_envs(state.parts)
        most, cut = self._config.max_episodes, under("cut/", state.learner)
        self.continues_cut = bool(cut) and (most is None or int(cut["episodes"]) < most)
        if cut and not self.continues_cut:
            self._before, self._cut_steps = self._env_state(), int(cut["steps"])
            self._episodes.set_state(cut)

    def _restore_envs(self, parts: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Restores the envs from the parts of all workers, also of another number of workers.

        Envs without exact state begin new episodes, whose sums are dropped, and the chief prints a warning.
        Raises UserError on all workers if other envs show other observations than those saved.
        """
        states: dict[int, bytes] = {}
        for part in parts:
            packed = unpack_bytes(part["states"], part["lengths"])
            states |= dict(zip(part["indices"].tolist(), packed, strict=True))
        self.envs.set_state(states)
        indices, _, *found = self.envs.get_state()
        if self._runtime.any_worker(not self.envs.exact_state):
            if self._runtime.is_chief:
                env = self._config.env
                self._session.console.warn(
                    f"Envs of {env} cannot be restored exactly and begin new episodes."
                )
            self._forget(found[1][np.argsort(indices)])
        elif not self._runtime.all_agree(all(map(np.array_equal, found, shown_envs(parts, indices)))):
            raise UserError(
                f"the envs of {self._config.run_dir} do not show the observations of its checkpoint, so "
                f"{self._config.env} is another build here; resume on the machine where the run began, or "
                "choose another --run-name."
            )

    def _forget(self, mine: np.ndarray) -> None:
        """Drops the running sums of some of this worker's envs, a bool for each of its envs. A collective."""
        self._forget_sums(self._runtime.gather_envs(mine.astype(np.float32)).astype(bool))

    def _forget_sums(self, envs: np.ndarray) -> None:
        """Drops the running sums of some envs, a bool [N] over all envs."""
        self._episodes.forget(envs)

    # The end

    def close(self) -> None:
        """Stops the envs, and their threads and processes."""
        self.envs.close()

    def export(self, folder: Path) -> None:
        """Writes the weights and the policy with `tfrl.networks.weights.export`."""
        precision = self._runtime.precision
        export(folder, self._config, self.weights(), precision=precision, env_steps=self.steps_done)

    def results(self, metrics: Mapping[str, float], evaluation: Mapping[str, float]) -> dict[str, Any]:
        """The entries of results.json about the settings and the results of the training."""
        config, session, episodes = self._config, self._session, self.episode_metrics()
        found = {
            "algorithm": config.algorithm,
            "env": config.env,
            "seed": config.seed,
            "env_steps": self.steps_done,
            "updates": session.step,
            "seconds": session.seconds,
            "env_steps_per_second": self.steps_done / max(session.seconds, 1e-9),
            "episodes": int(episodes["rollout/episodes"]),
            "episode_return": episodes["rollout/episode_return"],
            "normalized_return": episodes["rollout/normalized_return"],
            "solved": self.is_solved,
            "solved_at": config.solved_at,
            "eval": evaluation_results(config, evaluation),
            "started_from": session.started_from,
        }
        found |= {n: getattr(config, n) for n in ("actors", "lag", "observers") if hasattr(config, n)}
        if registry.family(config.env).implementation == registry.FAMILIES["procgen"].implementation:
            found["procgen"] = {
                "version": procgen.version(),
                "ranges": {n: score_range(config.env, config.distribution_mode, n) for n in RANGES},
                "unseen_levels": procgen.UNSEEN_LEVELS,
            }
        if hasattr(config, "learners"):
            found["learners"] = session.runtime.num_workers
        if self._waits is not None:
            found |= self._waits.means()
        return found | self.agent.results

    def conclusion(self, outcome: Mapping[str, Any], stopped: str | None) -> Conclusion:
        """The reason for the end of the run, the returns, and commands that show them."""
        config, sentences = self._config, []
        if self._unseen_info and self.has_updated:
            keys = ", ".join(sorted(self._unseen_info))
            sentences.append(f"No info of the env had a number {keys}, so --log-info gave no column for it.")
        if self._waits is not None and (waits := self._waits.means()):
            learner, actors = (f"{share:.0%}" for share in waits.values())
            sentences.append(f"The learner waited {learner} of the time, and the actors {actors}.")
        if outcome["solved"]:
            sentences.append(
                f"Solved after {self.steps_done:,} env steps: the mean return of the last 100 episodes, "
                f"{outcome['episode_return']:.2f}, has reached the threshold of {config.solved_at:g}."
            )
        elif config.max_episodes is not None and outcome["episodes"] >= config.max_episodes:
            sentences.append(
                f"Ended after {self.steps_done:,} env steps: {outcome['episodes']:,} training episodes "
                f"have reached --max-episodes {config.max_episodes:,}."
            )
        elif stopped is not None:
            sentences.append(f"Ended after {self.steps_done:,} env steps: {stopped}.")
        return Conclusion(sentences, *results_table(outcome), next_commands(config))


def env_spec(config: RLSettings) -> EnvSpec:
    """The global vector of training envs that the settings describe."""
    return EnvSpec.of(
        config,
        num_envs=config.num_envs,
        seed=config.seed,
        # A few threads step tens of thousands of frames per second, and the network needs the cores.
        num_threads=config.env_threads or max(1, min(4, (config.threads or machine.cores()) // 2)),
        num_processes=config.env_processes,
        level_replay=getattr(config, "level_replay", False),
        log_info=config.logged_info,
    )


def make_envs(
    config: DistributedSettings, session: Session, *, replicas: int
) -> tuple[Collector | ThreadCollector | RayCollector, Prefetch | None]:
    """Makes this worker's envs, which this process, a thread or Ray steps, as the settings say.

    Args:
      config: the settings.
      session: this process's part of the run.
      replicas: the number of replicas over which the envs of a rollout are divided.
    """
    if config.actors:
        if config.ray_address is not None:
            reach_other_machines()
        from tfrl.remote.actors import RayCollector  # which imports Ray, and may not be there
        from tfrl.training.prefetch import Prefetch

        on_ray = RayCollector(config, env_spec(config), session, replicas=replicas)
        return on_ray, Prefetch(config, on_ray)
    in_turn = isinstance(config, BufferSettings) and not config.is_ahead
    # On a GPU, a call for half of the envs takes as long as one for all of them (docs/notebook/gpu.md).
    in_halves = not in_turn and not session.runtime.uses_gpu
    try:
        collector = Collector(
            config,
            env_spec(config),
            session.runtime.local_envs(config.num_envs),
            replicas=replicas,
            rollouts=config.rollouts_held,
            in_halves=in_halves,
        )
    except ValueError as error:  # the first env could be made, and another one not
        raise UserError(f"{str(error).rstrip('.')}.") from error
    if not config.is_ahead:
        return collector, None
    from tfrl.training.prefetch import Prefetch, ThreadCollector

    thread = ThreadCollector(config, collector, session)
    return thread, Prefetch(config, thread)


def shown_envs(
    parts: Sequence[Mapping[str, np.ndarray]], envs: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Observations [B, *shape] and `first` flags [B] of some global envs, from the
    parts of `EnvLearner.get_state`."""
    saved = {i: (part, k) for part in parts for k, i in enumerate(part["indices"].tolist())}
    found = [saved[i] for i in envs]
    return tuple(np.stack([part[name][k] for part, k in found]) for name in ("observations", "first"))


def results_table(
    results: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[list[str], list[list[str]]]:
    """The header and rows of the last table of a run.

    `rows` are the scores before those of the evaluation, by title; None: those of the training episodes.
    """
    env = results["env"]
    found: dict[str, Mapping[str, Any]] = dict(rows or {})
    if rows is None:
        episodes = f"last {min(100, results['episodes'])}"
        found["while training"] = {**results, "return": results["episode_return"], "episodes": episodes}
    for level_set, score in results["eval"].items():
        if isinstance(score, Mapping):
            title = level_set_title(env, level_set)
            found[title if title == "evaluation" else f"evaluation, {title}"] = score
    names = ["return", "episodes"]
    if any(finite(score["normalized_return"]) is not None for score in found.values()):
        names.insert(1, "normalized_return")
    unit = "gradient steps" if "gradient_steps" in results else "env steps"
    title = f"{results['algorithm']} on {env}, {results['env_steps']:,} {unit}"
    header = [title, *("normalised" if name == "normalized_return" else name for name in names)]
    return header, [[title, *(_cell(score[name]) for name in names)] for title, score in found.items()]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if math.isfinite(value) else "-"
    return "-" if value is None else str(value)


def next_commands(config: RLSettings) -> list[str]:
    """Commands for a finished run, and a line of Python that loads its policy.

    Commands that need a function that only this program has are left out.
    """
    run, local = shlex.quote(str(config.run_dir)), config.local_callables
    commands = {
        tensorboard(config): "curves",
        f"python -m tfrl.report {run}": "a page with curves and scores",
    }
    if not local and config.env != NO_ENV:
        commands[f"python -m tfrl.record {run}"] = "a video of the policy"
        commands[f"python -m tfrl.evaluate {run}"] = "returns of more episodes"
    place = "this program" if local.keys() - {"env"} else "Python"  # env.json takes the place of the env
    commands[f"policy = tfrl.load({str(config.run_dir)!r})"] = f"in {place}; then policy(observations)"
    width = max(map(len, commands))
    return [f"{command.ljust(width)}  # {text}" for command, text in commands.items()]


def _env(config: RLSettings) -> dict[str, str]:
    observation, action = registry.specs(config)
    limit = config.max_episode_steps
    more = {"observes": str(observation), "takes": str(action)} | (
        {"episodes": f"truncated after {limit:,} steps"} if limit else {}
    )
    if TRAIN not in config.level_sets:
        kwargs = f", {json.dumps(config.env_kwargs)}" if config.env_kwargs else ""
        skip = f", each action {config.frame_skip} times" if config.frame_skip else ""
        return {"env": f"{config.env}{kwargs}{skip}", **more}
    levels = f"levels {config.start_level} to {config.start_level + config.num_levels - 1}"
    if not config.num_levels:
        levels = "all levels"
    if config.distribution_mode == "exploration":
        levels = "a single level"
    return {"game": f"{config.env}, {config.distribution_mode}, {levels}", **more}


def _actors(config: RLSettings) -> dict[str, str]:
    assert isinstance(config, DistributedSettings)
    by = f"{config.actors} actors on Ray" if config.actors else "a thread"
    most = "at the most " if config.free_running else ""
    return {"actors": f"{by}, {most}{config.lag} updates behind"}


def _length(config: RLSettings) -> str:
    steps = config.run_steps
    if config.is_endless:
        return "endless"
    if config.updates_vary:
        about = ", up to the end of an update"
    else:
        rounded = "" if steps == config.total_steps else f", --total-steps {config.total_steps:,} rounded up"
        about = f" ({config.num_updates:,} updates{rounded})"
    frames = registry.frames_per_step(config)
    return f"{steps:,} env steps{about}" + (f", {steps * frames:,} frames of the env" if frames > 1 else "")
