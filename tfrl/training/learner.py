"""What an update changes: this worker's envs, the agent and the running statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tfrl import envs
from tfrl.agents import Agent
from tfrl.agents.ppo import PPOAgent
from tfrl.cli.errors import TrainingError, UserError
from tfrl.config.ppo import Config
from tfrl.envs.published import normalized_return
from tfrl.experience.normalize import EpisodeStatistics, RewardNormalizer
from tfrl.experience.rollout import Collector, Rollout, too_large
from tfrl.run import rng
from tfrl.run.checkpoint import pack_bytes, unpack_bytes
from tfrl.run.session import Session
from tfrl.workers import machine
from tfrl.workers.strategy import Runtime


class Learner:
    """One worker's share of the envs, and its replicas of the agent.

    Args:
      config: the settings.
      session: this process's part of the run; `session.step` is the number of finished updates.
    """

    def __init__(self, config: Config, session: Session) -> None:
        self._config = config
        self._session = session
        self._runtime = session.runtime
        self.collector = _make_collector(config, session.runtime)
        self.agent = _make_agent(config, session.runtime, self.collector)
        self._normalizer = RewardNormalizer(config.num_envs)
        self._episodes = EpisodeStatistics(config.num_envs)

    def update(self) -> tuple[Rollout, dict[str, float]]:
        """Collects and learns once: the rollout, whose buffers are used again, and the metrics."""
        rollout = self.collect()
        return rollout, self.learn(rollout) | self.episode_metrics()

    def weights(self) -> dict[str, np.ndarray]:
        """The agent's weights by name."""
        return self.agent.network.get_weights()

    def sample(self, observations: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
        """Actions int32 [B] of observations uint8 [B, H, W, C] and uniforms float32 [B]."""
        self._session.watchdog.beat()
        return self.agent.sample(observations, uniforms)

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

    def action_counts(self, rollout: Rollout) -> list[int]:
        """How often all workers' envs took each action. A collective."""
        counts = np.bincount(rollout.actions.reshape(-1), minlength=self.collector.num_actions)
        return self._runtime.sum_over_workers(counts).tolist()

    def close(self) -> None:
        """Stops the envs."""
        self.collector.close()

    # One update

    def collect(self) -> Rollout:
        """A rollout, with normalised rewards. The console moves with the env steps."""
        config, session = self._config, self._session
        session.phase("collecting")
        start = session.step * config.batch_size

        def on_step(t: int) -> None:
            session.watchdog.beat()
            # Collecting is the smaller part of an update's time, about a fifth of it.
            session.console.advance_to(start + 0.2 * config.num_envs * t)

        indices = self.collector.indices
        uniforms = rng.action_uniforms(config.seed, session.step, indices, config.num_steps)
        rollout = self.collector.collect(self.agent, uniforms, on_step)
        local = np.stack([_by_env(rollout.rewards), _by_env(rollout.first).astype(np.float32)])
        rewards, first = self._runtime.gather_envs(local)  # [T, N] of all workers
        first = first.astype(bool)
        self._episodes.add(rewards, first)
        if config.normalize_rewards:
            mine = self._normalizer(rewards, first)[:, indices]
            by_replica = mine.reshape(config.num_steps, self._runtime.local_replicas, -1)
            rollout.rewards[:] = by_replica.swapaxes(0, 1)
        return rollout

    def learn(self, rollout: Rollout) -> dict[str, float]:
        """Takes the update's gradient steps; its metrics. Raises TrainingError where a loss is no number."""
        update = self._session.step
        self._session.phase("updating")
        try:
            return self.agent.update(rollout, update)
        except TrainingError as error:
            raise TrainingError(f"update {update + 1}: {error}; {self._session.kept()}") from None

    # State

    def get_state(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """What is the same on all workers, and this worker's envs."""
        indices, states, observations, first = self.collector.get_state()
        data, lengths = pack_bytes(states)
        state = self.agent.get_state()
        state |= {f"normalizer/{k}": v for k, v in self._normalizer.get_state().items()}
        state |= {f"episodes/{k}": v for k, v in self._episodes.get_state().items()}
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
        self._normalizer.set_state(_under("normalizer/", state))
        self._episodes.set_state(_under("episodes/", state))
        states: dict[int, bytes] = {}
        for part in parts:
            packed = unpack_bytes(part["states"], part["lengths"])
            states |= dict(zip(part["indices"].tolist(), packed, strict=True))
        self.collector.set_state(states)
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


def _make_collector(config: Config, runtime: Runtime) -> Collector:
    spec = envs.EnvSpec(
        name=config.env,
        num_envs=config.num_envs,
        seed=config.seed,
        distribution_mode=config.distribution_mode,
        num_levels=config.num_levels,
        start_level=config.start_level,
        # A few step tens of thousands of frames a second, and the network needs the cores.
        num_threads=config.env_threads or max(1, min(4, machine.cores() // 2)),
    )
    indices = runtime.local_envs(config.num_envs)
    try:
        return Collector(spec, indices, replicas=runtime.local_replicas, num_steps=config.num_steps)
    except MemoryError:
        raise too_large(config, runtime.num_workers) from None


def _make_agent(config: Config, runtime: Runtime, collector: Collector) -> Agent:
    try:
        return PPOAgent(
            config,
            runtime,
            observation_shape=collector.observation_shape,
            num_actions=collector.num_actions,
        )
    except ValueError as error:  # the zoo: an image too small for the network, say
        message = str(error).splitlines()[0]
        raise UserError(f"--torso {config.torso} cannot be built for {config.env}: {message}") from None


def _by_env(array: np.ndarray) -> np.ndarray:
    """[R, T, B] to [T, R * B]: this worker's envs in the order of their global indices."""
    return array.swapaxes(0, 1).reshape(array.shape[1], -1)


def _under(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {k[len(prefix) :]: v for k, v in arrays.items() if k.startswith(prefix)}
