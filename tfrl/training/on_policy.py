"""The learner of algorithms that learn from each rollout in one update, which may prefetch rollouts."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping

import numpy as np

from tfrl.algorithms.actor_critic import ActorCriticAgent, RolloutSettings
from tfrl.cli.errors import TrainingError
from tfrl.envs import registry
from tfrl.experience.levels import LevelReplay, LevelSampler
from tfrl.experience.normalize import ObservationNormalizer, RewardNormalizer, env_moments
from tfrl.experience.rollout import Rollout
from tfrl.run import rng
from tfrl.run.checkpoint import State, under, with_prefix
from tfrl.run.session import Session
from tfrl.training import callbacks
from tfrl.training.learner import EnvLearner, MakeAgent, env_spec, make_envs

_COLUMNS = (
    *("time/env_steps_per_second", "time/rollout_seconds", "time/update_seconds"),
    "time/env_wait_fraction",
)
# The share of an update's time for collecting: an eighth with the default network and settings.
_COLLECTING = 1 / 8


class OnPolicyLearner(EnvLearner):
    """One worker's share of the envs, and its replicas of the agent; arguments as of `EnvLearner`."""

    _config: RolloutSettings
    agent: ActorCriticAgent

    def __init__(self, config: RolloutSettings, session: Session, make_agent: MakeAgent) -> None:
        super().__init__(config, session, make_agent)
        self._indices = list(session.runtime.local_envs(config.num_envs))
        self._rewards = RewardNormalizer(config.num_envs, config.reward_norm_gamma)
        self._levels = LevelSampler.of(config)
        if self._levels is not None:
            scores = callbacks.LevelScores(self._levels, config.checkpoint_every)
            self.callbacks = (*self.callbacks, scores)
        self._observations: ObservationNormalizer | None = None
        self._spec = registry.specs(config)[0]
        if config.normalize_observations and self._spec.num_numbers:
            self._observations = self._initial_scaling()
        # Last, because nobody would close them after an error.
        self.envs, self._prefetch = make_envs(config, session, replicas=session.runtime.local_replicas)
        self.time_columns = (*_COLUMNS, *(self._prefetch.columns if self._prefetch else ()))

    # One update

    def update(self) -> dict[str, float] | None:
        """Collects a rollout, learns from it, and returns the metrics. A collective.

        Nothing learns from a rollout that --max-episodes cuts. None if the update is not finished.
        """
        began = time.perf_counter()
        if self._config.max_episodes is not None:
            self._before = self._env_state()
        rollout = self.collect()
        if self._cut_steps:
            self._count(began)
            self.write_episodes()
            return self.episode_metrics()
        metrics = self.learn(rollout)
        if self._levels is not None:
            self._score_levels(rollout)
        metrics |= self.episode_metrics()
        if self.agent.network.has_deviation:
            last = [rollout.observations] + ([] if rollout.memory is None else [rollout.started_memory])
            metrics |= self.deviation_metric(*(rollout.by_env(array[:, -1:])[0] for array in last))
        metrics |= self.info_metrics(rollout.info)
        if self._observations is not None and not self._config.normalize_random_steps:
            self._update_scaling(self._observations, rollout)
        seconds = self._count(began)
        self.write_episodes()
        waited = rollout.seconds if self._prefetch is None else self._prefetch.waited
        metrics |= {
            "time/env_steps_per_second": self._config.steps_per_update / seconds,
            "time/rollout_seconds": rollout.seconds,
            "time/update_seconds": seconds - waited,
            "time/env_wait_fraction": rollout.env_wait_seconds / rollout.seconds,
        }
        if self._prefetch is not None:
            metrics |= self._prefetch.metrics(self._session.step, rollout, seconds)
        return self._end_update(metrics)

    def _end_update(self, metrics: dict[str, float]) -> dict[str, float] | None:
        """Counts the update, and returns its metrics. A subclass may put this off: it then returns None."""
        self._session.step += 1
        return metrics

    def collect(self) -> Rollout:
        """Collects a rollout with processed rewards, and shows the progress.

        Prefetched rollouts were collected with older weights; then it gives the actors the present weights.
        """
        config, session = self._config, self._session
        session.phase("collecting")

        def on_step(t: int) -> None:
            session.advance_to((session.step + _COLLECTING * t / config.num_steps) * config.steps_per_update)

        if self._prefetch is not None:
            rollout = self._prefetched(self._prefetch)
        else:
            noise, levels = self.agent.acting.draw(session.step, self._indices), None
            if self._levels is not None:
                levels = self._levels.draw(session.step, self._indices, config.num_steps)
            rollout = self._collector.collect(self.agent.acting, noise, on_step, levels)
        self._process_rewards(rollout)
        return rollout

    def _process_rewards(self, rollout: Rollout) -> None:
        """Counts the episodes; scales, shifts and normalises the rewards in place. A collective.

        If --max-episodes cuts the rollout, its rewards stay as they are, because nothing learns from them.
        """
        local = np.stack([rollout.by_env(rollout.rewards), rollout.by_env(rollout.first).astype(np.float32)])
        rewards, first = self._runtime.gather_envs(local)  # [T, N] of all workers
        first = first.astype(bool)
        rounds = self._rounds_until(self._config.max_episodes, first)
        finished = self._episodes.add(rewards[:rounds], first[:rounds])
        self.note_episodes(finished, self.steps_done + finished.rounds * self._config.num_envs)
        if rounds is not None:
            self._cut_after(rounds * self._config.num_envs)
            return
        rewards = self._config.learned_rewards(rewards)
        if self._config.normalize_rewards:
            rewards = self._rewards(rewards, first)
        rollout.rewards[:] = rollout.by_replica(rewards[:, self._indices])

    def _rounds_until(self, most: int | None, first: np.ndarray) -> int | None:
        """The steps of each env in a rollout until `most` episodes have ended; None if the rollout is whole.

        `first`, bool [T, N], says where episodes of all envs ended.
        """
        if most is None:
            return None
        ended = self._episodes.episodes + np.cumsum(first.sum(axis=1))
        rounds = int((ended < most).sum()) + 1
        return rounds if rounds < len(first) else None

    def learn(self, rollout: Rollout) -> dict[str, float]:
        """Takes the gradient steps of the update, and shows the progress; returns the metrics.

        Raises TrainingError if a loss is not finite.
        """
        session, steps = self._session, self.agent.gradient_steps_per_update
        session.phase("updating")

        def on_step(done: int) -> None:
            share = _COLLECTING + (1 - _COLLECTING) * done / steps
            session.advance_to((session.step + share) * self._config.steps_per_update, steady=True)

        try:
            return self.agent.update(rollout, session.step, on_step)
        except TrainingError as error:
            raise TrainingError(f"update {session.step + 1}: {error}; {session.kept()}") from None

    def _score_levels(self, rollout: Rollout) -> None:
        """Scores the levels of the rollout, with level replay. A collective."""
        sampler = self._levels
        assert sampler is not None and rollout.levels is not None
        begin = np.zeros_like(rollout.levels[:, :1])  # so that all arrays have T + 1 rows
        arrays = (
            rollout.levels - sampler.first_level,
            np.concatenate([rollout.first, begin], axis=1),
            np.concatenate([np.abs(self.agent.advantages), begin], axis=1),
        )
        local = np.stack([rollout.by_env(array).astype(np.float32) for array in arrays])
        levels, first, errors = self._runtime.gather_envs(local)
        levels = levels.astype(np.int64) + sampler.first_level
        sampler.update(levels, first[:-1] > 0, errors[:-1])

    def summary(self) -> dict[str, str]:
        """The learner's own rows of the table before training."""
        config, found = self._config, super().summary()
        if isinstance(config, LevelReplay) and config.level_replay:
            how = f"temperature {config.level_temperature:g}, staleness {config.level_staleness:g}"
            found["level replay"] = f"{config.num_levels:,} levels, {how}, {config.level_schedule}"
        return found

    # Observations

    def _initial_scaling(self) -> ObservationNormalizer:
        """Computes mean and deviation from random steps if the settings say so, equally on all workers."""
        steps, normalizer = self._config.normalize_random_steps, ObservationNormalizer(self._spec.num_numbers)
        if steps:
            observations = self._spec.numbers(random_observations(self._config, steps))
            normalizer.update(env_moments(observations), steps)
        self._scale_by(normalizer)
        return normalizer

    def _update_scaling(self, normalizer: ObservationNormalizer, rollout: Rollout) -> None:
        """Adds the rollout to mean and deviation, after training has used the earlier ones."""
        numbers = self._spec.numbers(rollout.observations[:, :-1])
        mine = env_moments(rollout.by_env(numbers))  # [B, ...]
        everyone = self._runtime.gather_envs(np.moveaxis(mine, 0, -1))
        normalizer.update(np.moveaxis(everyone, -1, 0), self._config.num_steps)
        self._scale_by(normalizer)

    def _scale_by(self, normalizer: ObservationNormalizer) -> None:
        self.agent.set_observation_scaling(normalizer.mean, normalizer.scale)

    # State

    def _begin_with(self, state: Mapping[str, np.ndarray]) -> None:
        """Loads the state of another run, with its moments of rewards and observations.

        Raises ValueError or KeyError if it belongs to another network.
        """
        super()._begin_with(state)
        if rewards := under("normalizer/", state):
            self._rewards.begin_with(rewards)
        if self._observations is not None:
            self._load_moments(self._observations, state)
            self._scale_by(self._observations)

    def get_state(self) -> State:
        """The state of the agent, the episodes, the envs and the running statistics."""
        state = super().get_state()
        state.learner.update(with_prefix("normalizer/", self._rewards.get_state()))
        if self._levels is not None:
            state.learner.update(with_prefix("levels/", self._levels.get_state()))
        if self._observations is not None:
            state.learner.update(with_prefix("observations/", self._observations.get_state()))
        return state

    def set_state(self, state: State) -> None:
        """Restores the state of all workers. Raises UserError like `Learner.set_state`."""
        self._rewards.set_state(under("normalizer/", state.learner))
        if self._levels is not None:
            self._levels.set_state(under("levels/", state.learner))
        if self._observations is not None:
            self._observations.set_state(under("observations/", state.learner))
        super().set_state(state)

    def _forget_sums(self, envs: np.ndarray) -> None:
        super()._forget_sums(envs)
        self._rewards.forget(envs)


def random_observations(config: RolloutSettings, steps: int) -> np.ndarray:
    """Observations [steps, 1, *shape] of a separate env with random actions, equal on every worker."""
    env = registry.make(
        dataclasses.replace(env_spec(config), num_envs=1, seed=rng.env_seed(config.seed, rng.Use.WARM_UP))
    )
    generator = rng.generator(config.seed, rng.Use.WARM_UP)
    replays = getattr(config, "level_replay", False)
    observations = []
    for _ in range(steps):
        shown = env.observe().observation
        observations.append(shown.copy())
        allowed = env.observation_spec.allowed(shown)
        if allowed is None:
            actions = env.action_spec.uniform(generator, 1)
        else:
            drawn = generator.random((1, max(1, math.prod(env.action_spec.shape))), np.float32)
            actions = env.action_spec.from_uniform(drawn, allowed)
        levels = [config.start_level + generator.integers(config.num_levels, size=1)] if replays else []
        env.act(actions, *levels)
    env.close()
    return np.stack(observations)
