"""The learner of a run, as the loop uses it, and the part that is the same for all kinds of learners."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tfrl.algorithms.algorithm import Agent
from tfrl.cli.errors import UserError
from tfrl.config.run import RLSettings
from tfrl.envs import registry
from tfrl.envs.published import normalized_return
from tfrl.envs.spec import EnvSpec
from tfrl.experience import memory
from tfrl.experience.memory import Memory
from tfrl.experience.normalize import EpisodeStatistics
from tfrl.networks.distributions import distribution_for
from tfrl.run.checkpoint import CheckpointShard, pack_bytes, unpack_bytes
from tfrl.run.session import Session
from tfrl.training import start_from
from tfrl.workers import machine
from tfrl.workers.strategy import Runtime

MakeAgent = Callable[[Any, Runtime], Agent]


@dataclass(frozen=True)
class Update:
    """The results of an update that are to be written; JSON in the checkpoint of one not yet evaluated."""

    metrics: dict[str, float]
    action_counts: list[int]


class Envs(Protocol):
    """A worker's slice of the global envs, a `Collector` say."""

    exact_state: bool

    def get_state(self) -> tuple[list[int], list[bytes], np.ndarray, np.ndarray]:
        """Global env indices and, for each, the env's state, observation and `first` flag."""

    def set_state(self, states: dict[int, bytes]) -> None:
        """Continues from states by global env index; it may hold more envs than this worker's."""


class Learner:
    """Experience, an agent that learns from it, and their state. All workers make the same calls.

    A kind of learner adds `update`, `get_state`, `set_state`, `close` and its `columns`.

    Args:
      config: the settings.
      session: this process's part of the run; `session.step` is the number of finished updates.
      make_agent: makes the agent from the settings and the runtime.

    Attributes:
      agent: the agent.
      columns: the metrics of `update` that the agent does not give, in the order of progress.csv.
    """

    columns: tuple[str, ...]

    def __init__(self, config: RLSettings, session: Session, make_agent: MakeAgent) -> None:
        self._config = config
        self._session = session
        self._runtime = session.runtime
        try:
            self.agent = make_agent(config, session.runtime)
        except ValueError as error:  # the zoo: an image too small for the network, say
            message = str(error).splitlines()[0]
            raise UserError(f"--torso {config.torso} cannot be built for {config.env}: {message}") from None
        self._distribution = distribution_for(registry.specs(config)[1])
        self._episodes = EpisodeStatistics(config.num_envs)

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

    def update(self) -> Update | None:
        """Takes `steps_per_update` env steps and learns; counts `session.step` and seconds. A collective.

        None where there is more to learn before the step counts, and the run may be saved or stopped first:
        the next call goes on.
        """
        raise NotImplementedError

    # The agent as a player

    def act(self, observations: np.ndarray, noise: np.ndarray, *remembered: np.ndarray) -> Any:
        """Actions of an evaluation [B, *shape] of observations [B, *shape], by noise [B, K].

        A recurrent policy takes its memory [B, M], and gives a pair: the actions, and states [B, S].
        """
        self._session.watchdog.beat()
        choose = self.agent.greedy if self._config.eval_greedy else self.agent.sample
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
    def env_steps(self) -> int:
        """Env steps of all finished updates, all workers together."""
        return self._session.step * self._config.steps_per_update

    @property
    def steps_within(self) -> int:
        """Env steps of the update that is under way, all workers together; 0 between two updates."""
        return 0

    @property
    def place(self) -> str:
        """The place of the run, for people: "update 4", or within which one."""
        step = self._session.step
        return f"within update {step + 1}" if self.steps_within else f"update {step}"

    @property
    def position(self) -> float:
        """The env steps to show as done; within an update that takes long, how much of it is done."""
        return self.env_steps

    def work(self, env_steps: float) -> float:
        """The time that a run of so many env steps takes, in any unit: the time left goes by it."""
        return env_steps

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
        return self.env_steps >= self._config.run_steps or enough or self.is_solved

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

    def action_counts(self, actions: np.ndarray) -> list[int]:
        """Counts of all workers' actions [..., *shape] by bin of a histogram. A collective."""
        return self._runtime.sum_over_workers(self._distribution.counts(actions)).tolist()

    def action_histograms(self, counts: Sequence[int]) -> dict[str, np.ndarray]:
        """The values to draw for an update's `action_counts`, by the end of the chart's name."""
        return self._distribution.histograms(np.asarray(counts))

    # State

    def get_state(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The arrays of a checkpoint: those that are the same on all workers, and this worker's own."""
        raise NotImplementedError

    def shards(self) -> Sequence[CheckpointShard]:
        """The parts of this worker's state that are written once, for this checkpoint and later ones."""
        return ()

    def set_state(
        self,
        state: Mapping[str, np.ndarray],
        parts: Sequence[Mapping[str, np.ndarray]],
        shards: Sequence[CheckpointShard] = (),
    ) -> None:
        """Continues from what `get_state` and `shards` gave on all workers, be they more or fewer now.

        Raises UserError on all workers if the network is another one, or if envs then show something else
        than they did.
        """
        raise NotImplementedError

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

    def finish(self) -> None:
        """Removes, when the run is over, the files of its own that only older checkpoints need."""

    def close(self) -> None:
        """Stops what it has started."""
        raise NotImplementedError


def env_spec(config: RLSettings) -> EnvSpec:
    """The global vector of training envs that the settings describe."""
    return EnvSpec.of(
        config,
        num_envs=config.num_envs,
        seed=config.seed,
        # A few step tens of thousands of frames a second, and the network needs the cores.
        num_threads=config.env_threads or max(1, min(4, machine.cores() // 2)),
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
