"""The part that all learners from envs have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tfrl import config as settings
from tfrl.algorithms.algorithm import Agent
from tfrl.cli.errors import UserError
from tfrl.config.run import RLSettings
from tfrl.envs.published import normalized_return
from tfrl.envs.spec import EnvSpec
from tfrl.evaluation.episodes import evaluation_columns, evaluation_results
from tfrl.experience import memory
from tfrl.experience.memory import Memory
from tfrl.experience.normalize import EpisodeStatistics
from tfrl.networks.weights import export
from tfrl.run import results
from tfrl.run.checkpoint import pack_bytes, unpack_bytes
from tfrl.run.loop import Conclusion, Learner
from tfrl.run.metrics import MetricsWriter, NullMetricsWriter
from tfrl.run.session import Session
from tfrl.training import callbacks as own_callbacks
from tfrl.training import command, start_from, summary
from tfrl.workers import machine
from tfrl.workers.strategy import Runtime

MakeAgent = Callable[[Any, Runtime], Agent]


class Envs(Protocol):
    """A worker's slice of the global envs, a `Collector` say."""

    @property
    def exact_state(self) -> bool:
        """True if `set_state` continues exactly; after a call of it, true if that call did."""

    def get_state(self) -> tuple[list[int], list[bytes], np.ndarray, np.ndarray]:
        """Global env indices and, for each, the env's state, observation and `first` flag."""

    def set_state(self, states: Mapping[int, bytes]) -> None:
        """Continues from states by global env index; it may hold more envs than this worker's."""

    def close(self) -> None:
        """Stops the envs."""


class EnvLearner(Learner):
    """Experience of envs, an agent that learns from it, and their state. All workers make the same calls.

    A kind of learner adds `update`, `get_state`, `set_state`, `close` and its `time_columns`.

    Args:
      config: the settings.
      session: this process's part of the run; `session.step` is the number of finished updates.
      make_agent: makes the agent from the settings and the runtime.

    Attributes:
      agent: the agent.
      time_columns: the metrics of `update` that the agent does not give, in the order of progress.csv.
    """

    _config: RLSettings
    agent: Agent
    time_columns: tuple[str, ...]

    def __init__(self, config: RLSettings, session: Session, make_agent: MakeAgent) -> None:
        self._config = config
        self._session = session
        self._runtime = session.runtime
        try:
            self.agent = make_agent(config, session.runtime)
        except ValueError as error:  # the zoo: an image too small for the network, say
            message = str(error).splitlines()[0]
            raise UserError(f"--torso {config.torso} cannot be built for {config.env}: {message}") from None
        self._episodes = EpisodeStatistics(config.num_envs)
        self._evaluation = own_callbacks.Evaluation(config, session)
        self._waits = own_callbacks.Waits()
        self.callbacks = (*own_callbacks.of_run(config, session), self._waits)
        self.notes = config.notes

    def begin(self) -> None:
        """Gives a new run its first weights; a run that goes on has its own. A collective."""
        self.agent.begin()
        if self._config.start_from is None:
            return
        start = start_from.read(self._config, self._session)
        self._session.started_from = start.about
        try:
            self._begin_with(start.state)
        except (ValueError, KeyError) as error:
            raise start_from.refused(self._config, error) from None

    def _begin_with(self, state: Mapping[str, np.ndarray]) -> None:
        """Takes what another run has learned from the arrays of its checkpoint, or its weights alone.

        Raises ValueError or KeyError where they are of another network.
        """
        self.agent.begin_with(state)

    # Evaluation

    def is_evaluation_due(self, before: tuple[int, int]) -> bool:
        """True if --eval-every or --eval-every-steps has been passed since `before`."""
        return self._config.evaluates_at(self._session.step, self.steps_done, since=before)

    def evaluate(self) -> dict[str, float]:
        """Plays all level sets; every worker plays its share of the envs."""
        return self._evaluation.evaluate(self)

    def act(self, observations: np.ndarray, noise: np.ndarray, *remembered: np.ndarray) -> Any:
        """Actions of an evaluation [B, *shape] of observations [B, *shape], by noise [B, K].

        A recurrent policy takes its memory [B, M], and gives a pair: the actions, and states [B, S].
        """
        self._session.watchdog.beat()
        choose: Callable[..., Any] = self.agent.greedy if self._config.eval_greedy else self.agent.sample
        return choose(observations, noise, *remembered)

    def memory(self, envs: int) -> Memory | None:
        """The memory of so many evaluation envs, if the policy is recurrent."""
        return memory.of_settings(self._config, envs)

    def draw_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """The noise of one evaluation env, float32 [steps, K]."""
        return self.agent.draw_noise(generator, steps)

    def weights(self) -> dict[str, np.ndarray]:
        """The agent's weights by name."""
        return self.agent.get_weights()

    # How far the run is

    @property
    def steps_done(self) -> int:
        """Env steps of all finished updates, all workers together."""
        return self._session.step * self._config.steps_per_update

    @property
    def total_steps(self) -> int:
        """The env steps at which the run ends, if nothing ends it earlier."""
        return self._config.run_steps

    @property
    def place(self) -> str:
        """The place of the run, for people: "update 4", or within which one."""
        step = self._session.step
        return f"within update {step + 1}" if self.steps_within else f"update {step}"

    @property
    def is_solved(self) -> bool:
        """True, on all workers, where the last 100 episodes have come to --solved-at."""
        wanted = self._config.solved_at
        return wanted is not None and self._episodes.is_full and self._episodes.mean_return >= wanted

    @property
    def is_over(self) -> bool:
        """True, on all workers, at --total-steps, --max-episodes or --solved-at.

        An update that is under way is never the end: its weights are neither those of the update before nor
        those that it will leave.
        """
        if self.steps_within:
            return False
        most = self._config.max_episodes
        enough = most is not None and self._episodes.episodes >= most
        return self.steps_done >= self._config.run_steps or enough or self.is_solved

    # Metrics

    def episode_metrics(self) -> dict[str, float]:
        """The `rollout/` metrics, in the order of progress.csv.

        Means are of the last 100 episodes; `mean_reward`, of an env step, and `longest_episode`, in env steps
        so far, are of the last update alone.
        """
        config, mean = self._config, self._episodes.mean_return
        score = normalized_return(config.env, config.distribution_mode, mean)
        return {
            "rollout/episode_return": mean,
            "rollout/episode_length": self._episodes.mean_length,
            "rollout/normalized_return": float("nan") if score is None else score,
            "rollout/episodes": self._episodes.episodes,
            "rollout/mean_reward": self._episodes.mean_reward,
            "rollout/longest_episode": self._episodes.longest,
        }

    # What people see

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of progress.csv after `env_steps`, in order."""
        return (
            *self.episode_metrics(),
            *self.agent.metric_names,
            *evaluation_columns(self._config.level_sets),
            *self.time_columns,
        )

    def describe(self, writer: MetricsWriter | NullMetricsWriter) -> None:
        """Tells TensorBoard the settings of a new run."""
        resolved = dataclasses.replace(self._config, precision=self._runtime.precision)
        writer.hyperparameters(settings.hyperparameters(resolved))

    def summary(self, logged: int) -> dict[str, str]:
        """The settings that matter."""
        place = f"{self.steps_done + self.steps_within:,} {self.unit} ({self.place})"
        return summary.rows(self._config, self._session, self.agent, logged, place)

    def check_length(self, found_steps: int) -> None:
        """Raises UserError where --total-steps is less than what the checkpoint has."""
        command.check_length(self._config, found_steps)

    def completed(self, stopped: str | None) -> str:
        """The sentence for a run that is complete, and how to go on with it."""
        episodes = self.episode_metrics()["rollout/episodes"]
        return command.complete_sentence(self._config, self.steps_done, episodes, stopped)

    # State

    def _set_agent(self, state: Mapping[str, np.ndarray]) -> None:
        """Raises UserError where a checkpoint's arrays are of another network."""
        try:
            self.agent.set_state(state)
        except (ValueError, KeyError):
            raise UserError(
                f"the checkpoints in {self._config.run_dir} are of another network; "
                "choose another --run-name."
            ) from None

    def _restore_envs(self, envs: Envs, parts: Sequence[Mapping[str, np.ndarray]]) -> np.ndarray | None:
        """Continues from `pack_envs` of all workers, of which there may have been more or fewer.

        Envs that cannot go on exactly begin new episodes, and the chief says so. Raises UserError on all
        workers if other envs then show something else than they did.

        Returns:
          bool [N] of all envs, the same on all workers: those that stand at the beginning of an episode. None
          where all go on exactly.
        """
        states: dict[int, bytes] = {}
        for part in parts:
            packed = unpack_bytes(part["states"], part["lengths"])
            states |= dict(zip(part["indices"].tolist(), packed, strict=True))
        envs.set_state(states)
        indices, _, *found = envs.get_state()
        if self._runtime.any_worker(not envs.exact_state):
            if self._runtime.is_chief:
                env = self._config.env
                self._session.console.warn(f"Envs of {env} cannot go on exactly: they begin new episodes.")
            mine = found[1][np.argsort(indices)].astype(np.float32)
            return self._runtime.gather_envs(mine).astype(bool)
        if not self._runtime.all_agree(all(map(np.array_equal, found, shown_envs(parts, indices)))):
            raise UserError(
                f"the envs of {self._config.run_dir} do not show what they did when its checkpoint was "
                f"saved, so {self._config.env} is another build here; go on where the run began, or choose "
                "another --run-name."
            )
        return None

    def _forget(self, envs: np.ndarray) -> None:
        """Forgets what was summed up of the present episodes of some envs, bool [N] of all."""
        self._episodes.forget(envs)

    # The end

    def export(self, folder: Path) -> None:
        """Writes the weights and the policy, as `tfrl.networks.weights.export` says."""
        export(folder, self._config, self.weights(), precision=self._runtime.precision)

    def results(self, metrics: Mapping[str, float], evaluation: Mapping[str, float]) -> dict[str, Any]:
        """The entries that tell what was trained and what it came to."""
        config, session, episodes = self._config, self._session, self.episode_metrics()
        found = {
            "algorithm": config.algorithm,
            "env": config.env,
            "seed": config.seed,
            "env_steps": self.steps_done,
            "updates": session.step,
            "seconds": session.seconds,
            "env_steps_per_second": self.steps_done / session.seconds,
            "episodes": int(episodes["rollout/episodes"]),
            "episode_return": episodes["rollout/episode_return"],
            "normalized_return": episodes["rollout/normalized_return"],
            "solved": self.is_solved,
            "solved_at": config.solved_at,
            "eval": evaluation_results(config, evaluation),
            "started_from": session.started_from,
        }
        found |= {n: getattr(config, n) for n in ("actors", "lag", "observers") if hasattr(config, n)}
        if hasattr(config, "learners"):
            found["learners"] = session.runtime.num_workers
        return found | self._waits.means() | self.agent.results

    def conclusion(self, outcome: Mapping[str, Any], stopped: str | None) -> Conclusion:
        """The reason for the end, the returns, and the commands that show them."""
        config, sentences = self._config, []
        if waits := self._waits.means():
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
        return Conclusion(sentences, *results.table(outcome), summary.next_commands(config))


def env_spec(config: RLSettings) -> EnvSpec:
    """The global vector of training envs that the settings describe."""
    return EnvSpec.of(
        config,
        num_envs=config.num_envs,
        seed=config.seed,
        # A few step tens of thousands of frames a second, and the network needs the cores.
        num_threads=config.env_threads or max(1, min(4, machine.cores() // 2)),
        num_processes=config.env_processes,
    )


def pack_envs(envs: Envs) -> dict[str, np.ndarray]:
    """This worker's envs as arrays of a checkpoint."""
    indices, states, observations, first = envs.get_state()
    data, lengths = pack_bytes(states)
    part = {"indices": np.array(indices), "states": data, "lengths": lengths}
    return part | {"observations": observations, "first": first}


def shown_envs(
    parts: Sequence[Mapping[str, np.ndarray]], envs: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Observations [B, *shape] and `first` flags [B] of some global envs, of all that `pack_envs` gave."""
    saved = {i: (part, k) for part in parts for k, i in enumerate(part["indices"].tolist())}
    found = [saved[i] for i in envs]
    return tuple(np.stack([part[name][k] for part, k in found]) for name in ("observations", "first"))


def with_prefix(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays by PREFIX + name."""
    return {prefix + name: array for name, array in arrays.items()}


def under(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays whose names begin with the prefix, by the rest of the name: the inverse of `with_prefix`."""
    return {k[len(prefix) :]: v for k, v in arrays.items() if k.startswith(prefix)}
