"""Algorithms that learn from each rollout as it comes: collect, learn, and the running statistics of both."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfrl.agents.agent import Agent
from tfrl.cli.errors import TrainingError, UserError
from tfrl.envs import registry
from tfrl.envs.published import normalized_return
from tfrl.envs.spec import EnvSpec, random_actions
from tfrl.experience.collector import Collector
from tfrl.experience.normalize import EpisodeStatistics, ObservationNormalizer, RewardNormalizer, env_moments
from tfrl.experience.rollout import Rollout, too_large
from tfrl.networks.distributions import distribution_for
from tfrl.run import rng
from tfrl.run.arrays import pack_bytes, unpack_bytes
from tfrl.run.session import Session
from tfrl.training.trainer import Update
from tfrl.workers import machine
from tfrl.workers.strategy import Runtime

MakeAgent = Callable[[Any, Runtime], Agent]

# The part of an update's time that collecting takes: an eighth with the default network and settings.
_COLLECTING = 1 / 8


class OnPolicyLearner:
    """One worker's share of the envs, and its replicas of the agent; follows `tfrl.training.trainer.Learner`.

    Args:
      config: the settings, with the sections Task and Hardware and the algorithm's own.
      session: this process's part of the run; `session.step` is the number of finished updates.
      make_agent: makes the agent from the settings and the runtime.
    """

    columns = (
        *("time/env_steps_per_second", "time/rollout_seconds", "time/update_seconds"),
        *("time/allreduce_seconds", "time/env_wait_fraction"),
    )

    def __init__(self, config: Any, session: Session, make_agent: MakeAgent) -> None:
        self._config = config
        self._session = session
        self._runtime = session.runtime
        self.collector = self._make_collector()
        self.agent = _make_agent(config, session, make_agent)
        self._distribution = distribution_for(self.collector.action_spec)
        self._rewards = RewardNormalizer(config.num_envs)
        self._episodes = EpisodeStatistics(config.num_envs)
        self._observations: ObservationNormalizer | None = None
        if config.normalize_observations:
            self._observations = ObservationNormalizer(*self.collector.observation_spec.shape)
            self._begin_observations()

    def begin(self) -> None:
        """Gives a new run the weights that it starts from; one that goes on has its own."""
        self.agent.begin()

    def update(self) -> Update | None:
        """Collects a rollout and learns from it. A collective."""
        update = self.take()
        self._session.step += 1
        return update

    def take(self) -> Update:
        """The same without counting it."""
        config, session, began = self._config, self._session, time.perf_counter()
        rollout = self.collect()
        metrics = self.learn(rollout) | self.episode_metrics()
        self._take_in_observations(rollout)
        seconds = time.perf_counter() - began
        session.watchdog.measured(seconds)
        session.seconds += seconds
        sums = self.agent.floats_per_sum, self.agent.steps_per_update
        metrics |= session.runtime.communication(session.step + 1, *sums)
        metrics |= {
            "time/env_steps_per_second": config.steps_per_update / seconds,
            "time/rollout_seconds": rollout.seconds,
            "time/env_wait_fraction": rollout.env_wait_seconds / rollout.seconds,
        }
        return Update(metrics | self._shares(rollout, seconds), self._action_counts(rollout))

    def _make_collector(self) -> Collector:
        return make_collector(self._config, self._runtime)

    def _shares(self, rollout: Rollout, seconds: float) -> dict[str, float]:
        """How an update that took `seconds` spent them, by the names of its columns."""
        return {"time/update_seconds": seconds - rollout.seconds}

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

    def episode_metrics(self) -> dict[str, float]:
        """Of the last 100 episodes."""
        config, mean = self._config, self._episodes.mean_return
        score = normalized_return(config.env, config.distribution_mode, mean)
        return {
            "rollout/episode_return": mean,
            "rollout/episode_length": self._episodes.mean_length,
            "rollout/normalized_return": float("nan") if score is None else score,
            "rollout/episodes": self._episodes.episodes,
        }

    @property
    def solved(self) -> bool:
        """Whether the last 100 episodes have come to --solved-at, the same on all workers."""
        wanted = self._config.solved_at
        return wanted is not None and self._episodes.is_full and self._episodes.mean_return >= wanted

    def _action_counts(self, rollout: Rollout) -> list[int]:
        """How often all workers' actions fell into each bin of their histograms. A collective."""
        counts = self._distribution.counts(rollout.actions)
        return self._runtime.sum_over_workers(counts).tolist()

    def action_histograms(self, counts: Sequence[int]) -> dict[str, np.ndarray]:
        """The values to draw for an update's `action_counts`, by the end of the chart's name."""
        return self._distribution.histograms(np.asarray(counts))

    def close(self) -> None:
        """Stops the envs."""
        self.collector.close()

    # One update

    def collect(self) -> Rollout:
        """A rollout, with normalised rewards. The console moves with the env steps."""
        config, session = self._config, self._session
        session.phase("collecting")

        def on_step(t: int) -> None:
            session.watchdog.beat()
            session.console.advance_to(self._at(_COLLECTING * t / config.num_steps))

        indices, draw = self.collector.indices, self.agent.draw_noise
        noise = rng.action_noise(config.seed, session.step, indices, config.num_steps, draw)
        rollout = self.collector.collect(self.agent, noise, on_step)
        self._take_in_rewards(rollout)
        return rollout

    def _take_in_rewards(self, rollout: Rollout) -> None:
        """Counts its episodes, and normalises its rewards where they stand. A collective."""
        local = np.stack([rollout.by_env(rollout.rewards), rollout.by_env(rollout.first).astype(np.float32)])
        rewards, first = self._runtime.gather_envs(local)  # [T, N] of all workers
        first = first.astype(bool)
        self._episodes.add(rewards, first)
        if self._config.normalize_rewards:
            mine = self._rewards(rewards, first)[:, self.collector.indices]
            rollout.rewards[:] = rollout.by_replica(mine)

    def learn(self, rollout: Rollout) -> dict[str, float]:
        """Takes the update's gradient steps, with which the console moves; its metrics.

        Raises TrainingError where a loss is no number.
        """
        session, steps = self._session, self.agent.steps_per_update
        session.phase("updating")

        def on_step(done: int) -> None:
            share = _COLLECTING + (1 - _COLLECTING) * done / steps
            session.console.advance_to(self._at(share), steady=True)

        try:
            return self.agent.update(rollout, session.step, on_step)
        except TrainingError as error:
            raise TrainingError(f"update {session.step + 1}: {error}; {session.kept()}") from None

    def _at(self, share: float) -> float:
        """The env steps to show when a part of the present update is done."""
        return (self._session.step + share) * self._config.steps_per_update

    # Observations

    def _begin_observations(self) -> None:
        """Takes mean and deviation from random steps, where the settings say so, alike on all workers."""
        steps = self._config.normalize_random_steps
        if steps:
            observations = random_observations(self._config, steps)
            self._observations.update(env_moments(observations), steps)
        self._set_scaling()

    def _take_in_observations(self, rollout: Rollout) -> None:
        """Updates mean and deviation, for the next rollout on: a rollout is learned from as it was acted."""
        if self._observations is None or self._config.normalize_random_steps:
            return
        mine = env_moments(rollout.by_env(rollout.observations[:, :-1]))  # [B, ...]
        everyone = self._runtime.gather_envs(np.moveaxis(mine, 0, -1))
        self._observations.update(np.moveaxis(everyone, -1, 0), self._config.num_steps)
        self._set_scaling()

    def _set_scaling(self) -> None:
        self.agent.set_observation_scaling(self._observations.mean, self._observations.scale)

    # State

    def get_state(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """What is the same on all workers, and this worker's envs."""
        indices, states, observations, first = self.collector.get_state()
        data, lengths = pack_bytes(states)
        state = self.agent.get_state()
        state |= {f"normalizer/{k}": v for k, v in self._rewards.get_state().items()}
        state |= {f"episodes/{k}": v for k, v in self._episodes.get_state().items()}
        if self._observations is not None:
            state |= {f"observations/{k}": v for k, v in self._observations.get_state().items()}
        part = {"indices": np.array(indices), "states": data, "lengths": lengths}
        return state, part | {"observations": observations, "first": first}

    def set_state(self, state: Mapping[str, np.ndarray], parts: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Continues from what `get_state` gave on all workers, of which there may have been more or fewer.

        Raises UserError on all workers if the network is another one, or if envs then show something else
        than they did.
        """
        try:
            self.agent.set_state(state)
        except (ValueError, KeyError):
            raise UserError(
                f"the checkpoints in {self._config.run_dir} are of another network; "
                "choose another --run-name."
            ) from None
        self._rewards.set_state(_under("normalizer/", state))
        self._episodes.set_state(_under("episodes/", state))
        if self._observations is not None:
            self._observations.set_state(_under("observations/", state))
        states: dict[int, bytes] = {}
        for part in parts:
            packed = unpack_bytes(part["states"], part["lengths"])
            states |= dict(zip(part["indices"].tolist(), packed, strict=True))
        self.collector.set_state(states)
        if self.collector.exact_state:
            self._check_envs(parts)

    def _check_envs(self, parts: Sequence[Mapping[str, np.ndarray]]) -> None:
        if not self._runtime.all_agree(self._shows(parts)):
            raise UserError(
                f"the envs of {self._config.run_dir} do not show what they did when its checkpoint was "
                f"saved, so {self._config.env} is another build here; go on where the run began, or choose "
                "another --run-name."
            )

    def _shows(self, parts: Sequence[Mapping[str, np.ndarray]]) -> bool:
        """Whether this worker's envs show what they showed when `get_state` gave `parts`."""
        indices, _, observations, first = self.collector.get_state()
        saved = {i: (part, k) for part in parts for k, i in enumerate(part["indices"].tolist())}
        return all(
            np.array_equal(observations[mine], part["observations"][k]) and first[mine] == part["first"][k]
            for mine, (part, k) in enumerate(saved[i] for i in indices)
        )


def env_spec(config: Any) -> EnvSpec:
    """The global vector of training envs that the settings describe."""
    return EnvSpec(
        name=config.env,
        num_envs=config.num_envs,
        seed=config.seed,
        distribution_mode=config.distribution_mode,
        num_levels=config.num_levels,
        start_level=config.start_level,
        # A few step tens of thousands of frames a second, and the network needs the cores.
        num_threads=config.env_threads or max(1, min(4, machine.cores() // 2)),
    )


def random_observations(config: Any, steps: int) -> np.ndarray:
    """Observations [steps, 1, *shape] of an env of its own, played at random: the same on every worker."""
    env = registry.make(
        dataclasses.replace(env_spec(config), num_envs=1, seed=rng.env_seed(config.seed, rng.Use.WARM_UP))
    )
    generator = rng.generator(config.seed, rng.Use.WARM_UP)
    observations = []
    for _ in range(steps):
        observations.append(env.observe().observation.copy())
        env.act(random_actions(env.action_spec, generator, 1))
    env.close()
    return np.stack(observations)


def make_collector(config: Any, runtime: Runtime) -> Collector:
    """This worker's envs, and the buffers of the rollouts that are held at once. Raises UserError."""
    held = config.rollouts_held
    sizes = {"replicas": runtime.local_replicas, "num_steps": config.num_steps, "rollouts": held}
    try:
        return Collector(env_spec(config), runtime.local_envs(config.num_envs), **sizes)
    except MemoryError:
        spec = registry.specs(config.env)[0]
        raise too_large(spec, config.num_envs, held * config.num_steps, runtime.num_workers) from None


def _make_agent(config: Any, session: Session, make_agent: MakeAgent) -> Agent:
    try:
        return make_agent(config, session.runtime)
    except ValueError as error:  # the zoo: an image too small for the network, say
        message = str(error).splitlines()[0]
        raise UserError(f"--torso {config.torso} cannot be built for {config.env}: {message}") from None


def _under(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {k[len(prefix) :]: v for k, v in arrays.items() if k.startswith(prefix)}
