"""The common part of all learners: the agent as a player, statistics of episodes and of actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfrl.algorithms.algorithm import Agent
from tfrl.cli.errors import UserError
from tfrl.envs import registry
from tfrl.envs.published import normalized_return
from tfrl.envs.spec import EnvSpec
from tfrl.experience.normalize import EpisodeStatistics
from tfrl.networks.distributions import distribution_for
from tfrl.run.session import Session
from tfrl.training import env_states, start_from
from tfrl.workers import machine
from tfrl.workers.strategy import Runtime

MakeAgent = Callable[[Any, Runtime], Agent]


class LearnerBase:
    """The part of `tfrl.training.trainer.Learner` that is the same for all.

    Args:
      config: the settings.
      session: this process's part of the run; `session.step` is the number of finished updates.
      make_agent: makes the agent from the settings and the runtime.
    """

    def __init__(self, config: Any, session: Session, make_agent: MakeAgent) -> None:
        self._config = config
        self._session = session
        self._runtime = session.runtime
        self.agent = _make_agent(config, session, make_agent)
        self._distribution = distribution_for(registry.specs(config)[1])
        self._episodes = EpisodeStatistics(config.num_envs)

    def begin(self) -> None:
        """Gives a new run the weights that it starts from; one that goes on has its own. A collective."""
        self.agent.begin()
        if self._config.start_from is None:
            return
        start = start_from.read(self._config, self._session)
        self._session.started_from = start.about
        try:
            self._begin_with(start.state)
        except (ValueError, KeyError) as error:
            raise start_from.refused(self._config, error) from None

    def _restore_envs(self, envs: env_states.Envs, parts: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Continues from `env_states.pack` of all workers. An episode that was cut off counts no further."""
        begun = env_states.restore(envs, parts, self._config, self._session)
        if begun is not None:
            self._forget(begun)

    def _forget(self, envs: np.ndarray) -> None:
        """Forgets what was summed up of the present episodes of some envs, bool [N] of all."""
        self._episodes.forget(envs)

    def _begin_with(self, state: Mapping[str, np.ndarray]) -> None:
        """Takes what another run has learned from the arrays of its checkpoint, or its weights alone.

        Raises ValueError or KeyError where they are of another network.
        """
        self.agent.begin_with(state)

    def weights(self) -> dict[str, np.ndarray]:
        """The agent's weights by name."""
        return self.agent.get_weights()

    def act(self, observations: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Actions of an evaluation [B, *shape] of observations [B, *shape], by noise [B, K]."""
        self._session.watchdog.beat()
        choose = self.agent.greedy if self._config.eval_greedy else self.agent.sample
        return choose(observations, noise)

    def draw_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """The noise of one evaluation env, float32 [steps, K]."""
        return self.agent.draw_noise(generator, steps)

    @property
    def env_steps(self) -> int:
        """Env steps of all finished updates, all workers together."""
        return self._session.step * self._config.steps_per_update

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
        """The env steps to show as done: those of all finished updates."""
        return self.env_steps

    def work(self, env_steps: float) -> float:
        """The time that a run of so many env steps takes, in any unit: each takes as long as any other."""
        return env_steps

    @property
    def is_over(self) -> bool:
        """True, on all workers, where the run is as long as it is to be, or has come to --max-episodes or
        --solved-at.

        An update that is under way is never the end: its weights are neither those of the update before nor
        those that it will leave.
        """
        if self.steps_within:
            return False
        most = self._config.max_episodes
        enough = most is not None and self._episodes.episodes >= most
        return self.env_steps >= self._config.run_steps or enough or self.is_solved

    @property
    def is_solved(self) -> bool:
        """True once the last 100 episodes have come to --solved-at."""
        wanted = self._config.solved_at
        return wanted is not None and self._episodes.is_full and self._episodes.mean_return >= wanted

    def finish(self) -> None:
        """Does nothing: a checkpoint has all that a run needs."""

    def action_counts(self, actions: np.ndarray) -> list[int]:
        """Counts of all workers' actions [..., *shape] by bin of a histogram. A collective."""
        return self._runtime.sum_over_workers(self._distribution.counts(actions)).tolist()

    def action_histograms(self, counts: Sequence[int]) -> dict[str, np.ndarray]:
        """The values to draw for an update's `action_counts`, by the end of the chart's name."""
        return self._distribution.histograms(np.asarray(counts))

    def _set_agent(self, state: Mapping[str, np.ndarray]) -> None:
        """Raises UserError where a checkpoint's arrays are of another network."""
        try:
            self.agent.set_state(state)
        except (ValueError, KeyError):
            raise UserError(
                f"the checkpoints in {self._config.run_dir} are of another network; "
                "choose another --run-name."
            ) from None


def env_spec(config: Any) -> EnvSpec:
    """The global vector of training envs that the settings describe."""
    return EnvSpec.of(
        config,
        num_envs=config.num_envs,
        seed=config.seed,
        # A few step tens of thousands of frames a second, and the network needs the cores.
        num_threads=config.env_threads or max(1, min(4, machine.cores() // 2)),
    )


def with_prefix(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays by PREFIX + name."""
    return {prefix + name: array for name, array in arrays.items()}


def under(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays whose names begin with the prefix, by the rest of the name: the inverse of `with_prefix`."""
    return {k[len(prefix) :]: v for k, v in arrays.items() if k.startswith(prefix)}


def _make_agent(config: Any, session: Session, make_agent: MakeAgent) -> Agent:
    try:
        return make_agent(config, session.runtime)
    except ValueError as error:  # the zoo: an image too small for the network, say
        message = str(error).splitlines()[0]
        raise UserError(f"--torso {config.torso} cannot be built for {config.env}: {message}") from None
