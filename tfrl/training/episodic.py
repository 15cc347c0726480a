"""REINFORCE's learner: every env plays an episode, and one agent chooses all actions and learns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from tfrl.algorithms.reinforce import Config, ReinforceAgent
from tfrl.cli.errors import TrainingError
from tfrl.envs.spec import Sums
from tfrl.experience.observer import Observer
from tfrl.experience.rollout import EpisodeBatch
from tfrl.remote import reach_other_machines
from tfrl.run import rng
from tfrl.run.checkpoint import State
from tfrl.run.session import Session
from tfrl.training.learner import EnvLearner, MakeAgent, env_spec

if TYPE_CHECKING:
    from tfrl.remote.actors import RayObservers

_DRAWN_AT_ONCE = 64  # steps for which an env's random numbers are drawn at once
_COLLECTING = 0.9  # share of an update's time, for the progress line


class EpisodicLearner(EnvLearner):
    """Learns from one episode of every env in each update; the arguments are those of `EnvLearner`."""

    _config: Config
    agent: ReinforceAgent
    envs: Observer | RayObservers
    time_columns = (
        *("time/env_steps_per_second", "time/rollout_seconds", "time/update_seconds"),
        "time/observer_wait_fraction",
    )

    def __init__(self, config: Config, session: Session, make_agent: MakeAgent) -> None:
        super().__init__(config, session, make_agent)
        self.envs = self._make_observers()
        self._steps_done = 0
        self._info: Sums = {}  # of the last episodes
        self._waited = 0.0  # seconds of the present update, for observers

    def _make_observers(self) -> Observer | RayObservers:
        config, session = self._config, self._session
        if not config.observers:
            return Observer(env_spec(config), range(config.num_envs))
        if config.ray_address is not None:
            reach_other_machines()
        from tfrl.remote.actors import RayObservers  # which imports Ray, and may not be there

        return RayObservers(config, env_spec(config), session)

    @property
    def steps_done(self) -> int:
        """Env steps of all finished updates, and those of a cut one."""
        return self._steps_done + self._cut_steps

    def update(self) -> dict[str, float]:
        """Plays an episode in every env, and takes a gradient step."""
        session, began = self._session, time.perf_counter()
        if self._config.max_episodes is not None:
            self._before = self._env_state()
        episodes = self.play()
        played = time.perf_counter()
        if self._is_last(episodes.ended) and (episodes.playing[-1] & ~episodes.ended).any():
            self._count_episodes(episodes)
            self._count(began)
            self.write_episodes()
            self._cut_after(episodes.env_steps)
            return self.episode_metrics()
        session.phase("updating")
        try:
            metrics = self.agent.update(episodes)
        except TrainingError as error:
            raise TrainingError(f"update {session.step + 1}: {error}; {session.kept()}") from None
        self._count_episodes(episodes)
        seconds = self._count(began)
        self.write_episodes()
        session.step += 1
        self._steps_done += episodes.env_steps
        metrics |= self.episode_metrics()
        if self.agent.network.has_deviation:
            metrics |= self.deviation_metric(self.envs.observation)
        metrics |= self.info_metrics(self._info)
        metrics |= {
            "time/env_steps_per_second": episodes.env_steps / seconds,
            "time/rollout_seconds": played - began,
            "time/update_seconds": seconds - (played - began),
            "time/observer_wait_fraction": self._waited / (played - began),
        }
        return metrics

    def play(self) -> EpisodeBatch:
        """Plays an episode in every env, at most --max-steps of it, and shows the progress.

        It ends early at --max-episodes."""
        config, session = self._config, self._session
        session.phase("collecting")
        playing, ended = np.ones(config.num_envs, bool), np.zeros(config.num_envs, bool)
        steps, count, self._waited = [], 0, 0.0
        for noise in self._noise():
            shown = self.envs.observation
            actions, log_probs = self.agent.sample(shown, noise)
            began = time.perf_counter()
            seen = self.envs.step(actions, playing)
            self._waited += time.perf_counter() - began
            steps.append((shown, actions, noise, log_probs, seen.reward, playing))
            count += int(playing.sum())
            session.advance_to(self._steps_done + _COLLECTING * count)
            ended = ended | seen.ended
            playing = playing & ~seen.ended
            if not playing.any() or self._is_last(ended):
                break
        self._info = self.envs.settle()
        shown, actions, noise, log_probs, rewards, played = (
            np.stack(arrays) for arrays in zip(*steps, strict=True)
        )
        return EpisodeBatch(shown, actions, noise, log_probs, rewards, played, ended)

    def _count_episodes(self, episodes: EpisodeBatch) -> None:
        """Counts and notes the episodes that have ended."""
        taken = episodes.playing.sum(axis=1).cumsum()  # env steps of all envs after each round
        totals = episodes.rewards.sum(axis=0, dtype=np.float64), episodes.playing.sum(axis=0)
        finished = self._episodes.add_one_each(*totals, episodes.ended)
        self.note_episodes(finished, self._steps_done + taken[finished.rounds - 1])

    def _is_last(self, ended: np.ndarray) -> bool:
        """True if --max-episodes is reached with the episodes of this update that have ended, bool [N]."""
        most = self._config.max_episodes
        return most is not None and self._episodes.episodes + int(ended.sum()) >= most

    def _noise(self) -> Iterator[np.ndarray]:
        """The random numbers of each step of an update, float32 [N, K], for up to --max-steps steps."""
        config, update = self._config, self._session.step
        generators = [rng.generator(config.seed, rng.Use.ACTION, update, i) for i in range(config.num_envs)]
        for begin in range(0, config.max_steps, _DRAWN_AT_ONCE):
            drawn = np.stack([self.agent.draw_training_noise(g, _DRAWN_AT_ONCE) for g in generators], axis=1)
            yield from drawn[: config.max_steps - begin]

    # State

    def get_state(self) -> State:
        """The state of the agent, the episodes and the envs."""
        state = super().get_state()
        state.learner["env_steps"] = np.array(self._steps_done)
        return state

    def set_state(self, state: State) -> None:
        """Restores the state of all workers. Raises UserError like `Learner.set_state`."""
        self._steps_done = int(state.learner["env_steps"])
        super().set_state(state)
