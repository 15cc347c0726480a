"""Blocks to build a trainer of your own with: rollout workers, replay, a parameter server and a learner.

Each block is an actor of Ray; `examples/ray_blocks.py` trains SAC with them. They reuse the parts of the
commands: `RolloutActor` acts, `ReplayBuffer` stores, and the algorithm takes its gradient steps. Unlike a
run's own processes (`--actors`), they write no files and nobody replaces them: a call of a dead one raises
`ray.exceptions.RayActorError`.

Import this module before `ray`, which reads its environment variables when it is imported. An actor's
resources are set as usual: `Learner.options(num_gpus=1).remote(SACAgent, config)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfrl.algorithms.policies import RolloutActor
from tfrl.algorithms.replay import ReplayAgent, ReplaySettings
from tfrl.envs import registry
from tfrl.envs.spec import EnvSpec
from tfrl.experience.collector import Collector, Versioned
from tfrl.experience.replay import Batch, ReplayBuffer
from tfrl.experience.rollout import Rollout
from tfrl.remote.cluster import ray, serve_driver
from tfrl.run import rng
from tfrl.workers import machine, strategy

_KEPT = 2  # versions in a shard of the parameter server: the newest one, and one that a reader may be reading


class Played(NamedTuple):
    """The rewards float32 [T, N] of N envs, and `first` bool [T, N]: an episode ended with that step."""

    rewards: np.ndarray
    first: np.ndarray


class Drawn(NamedTuple):
    """Batches of transitions, and standard normal numbers float32 [K, B, b, update_noise] for their rows."""

    batch: Batch
    noise: np.ndarray


@ray.remote(num_cpus=0, max_restarts=0)
class ParameterShard:
    """Some arrays of the weights by version; `ParameterServer` makes several."""

    def __init__(self) -> None:
        serve_driver()
        self._versions: dict[int, dict[str, np.ndarray]] = {}

    def put(self, version: int, arrays: dict[str, np.ndarray]) -> None:
        """Stores the arrays of a version, and forgets all but the newest two."""
        self._versions[version] = arrays
        for old in sorted(self._versions)[:-_KEPT]:
            del self._versions[old]

    def newest(self) -> int:
        """The newest version; -1 before the first one."""
        return max(self._versions, default=-1)

    def get(self, version: int) -> dict[str, np.ndarray] | None:
        """The arrays of a version, or None if it is forgotten."""
        return self._versions.get(version)


class ParameterServer:
    """Weights in several actors, each with about the same number of bytes. It may be sent to other actors.

    Args:
      shards: the number of actors.
    """

    def __init__(self, shards: int = 1) -> None:
        kind: Any = ParameterShard
        self._shards = [kind.remote() for _ in range(shards)]

    def put(self, version: int, weights: Mapping[str, np.ndarray]) -> None:
        """Stores weights by name, float32 of any shape. Versions must grow, and have equal names."""
        parts: list[dict[str, np.ndarray]] = [{} for _ in self._shards]
        sizes = [0] * len(parts)
        for name in sorted(weights, key=lambda name: (-weights[name].nbytes, name)):
            smallest = sizes.index(min(sizes))
            parts[smallest][name] = weights[name]
            sizes[smallest] += weights[name].nbytes
        ray.get([s.put.remote(version, part) for s, part in zip(self._shards, parts, strict=True)])

    def get(self) -> Versioned:
        """The newest weights that all shards have. Raises ValueError before the first `put`."""
        while True:
            version = min(ray.get([shard.newest.remote() for shard in self._shards]))
            if version < 0:
                raise ValueError("the parameter server has no weights yet")
            parts = ray.get([shard.get.remote(version) for shard in self._shards])
            if all(part is not None for part in parts):  # else two newer versions came between the calls
                return Versioned(version, {name: array for part in parts for name, array in part.items()})


@ray.remote(num_cpus=0, max_restarts=0)
class ReplayShard:
    """The transitions of some rollout workers. A replay of several shards is a list of them.

    Args:
      config: the settings; the envs share --replay-size equally.
      workers: the global indices of the envs of each of its workers, by the worker's number.
      noise: the random numbers of each row that the algorithm needs, `Learner.update_noise`.

    Raises ValueError for --prioritized and --dataset: its transitions are drawn uniformly.
    """

    def __init__(self, config: ReplaySettings, workers: Mapping[int, Sequence[int]], noise: int) -> None:
        serve_driver()
        if config.prioritized_replay or config.dataset is not None:
            raise ValueError("ReplayShard draws uniformly, without --prioritized and --dataset")
        observation, action = registry.specs(config)
        self._config, self._workers = config, {w: list(indices) for w, indices in workers.items()}
        self._noise = noise
        self._buffers = {
            worker: ReplayBuffer(
                indices,
                config.replay_size // config.num_envs,
                observation=observation,
                action=action,
                gamma=config.gamma,
                n_step=config.n_step,
                learned_rewards=config.learned_rewards,
            )
            for worker, indices in self._workers.items()
        }

    def add(self, worker: int, rollout: Rollout, first: np.ndarray) -> int:
        """Stores a rollout [1, T, N] of a worker; returns the transitions of this shard.

        `first` is bool [N]: the rollout's first observation begins an episode.
        """
        replay = self._buffers[worker]
        replay.resume_round(rollout.observations[0, 0], first)
        for actions, step in rollout.steps():
            replay.act(actions)
            replay.show(step)
        return sum(len(b) * len(self._workers[w]) for w, b in self._buffers.items())

    def sample(self, steps_done: int, batches: int) -> Drawn:
        """Draws K batches: --batch-size / --num-envs transitions of each env, in the order of the envs.

        The transitions depend on --seed and `steps_done`, the gradient steps before these batches.
        """
        config, each = self._config, self._config.batch_size // self._config.num_envs
        found, noise = [], []
        for worker, indices in self._workers.items():
            generators = [rng.generator(config.seed, rng.Use.REPLAY, steps_done, i) for i in indices]
            found.append(self._buffers[worker].sample(generators, batches, each))
            shape = (batches, each, self._noise)
            noise.append(np.stack([g.standard_normal(shape, np.float32) for g in generators], axis=1))
        return _join([Drawn(batch, numbers) for batch, numbers in zip(found, noise, strict=True)])


def _join(drawn: Sequence[Drawn]) -> Drawn:
    """Joins batches of neighbouring envs."""
    arrays = (np.concatenate(parts, axis=1) for parts in zip(*(d.batch for d in drawn), strict=True))
    return Drawn(Batch(*arrays), np.concatenate([d.noise for d in drawn], axis=1))


@ray.remote(num_cpus=1, max_restarts=0)
class RolloutWorker:
    """Some of the envs, and a copy of the policy that acts in them.

    Args:
      number: the worker's number.
      config: the settings.
      indices: the global indices of its envs.
      weights: where the newest weights are.
      replay: the shard that gets its rollouts.
      threads: CPU threads that its policy may use.
    """

    def __init__(
        self,
        number: int,
        config: ReplaySettings,
        indices: Sequence[int],
        weights: ParameterServer,
        replay: Any,
        threads: int = 1,
    ) -> None:
        serve_driver()
        strategy.set_up_tensorflow()
        machine.one_thread_each()
        spec = EnvSpec.of(config, num_envs=config.num_envs, seed=config.seed)
        collector = Collector(config, spec, indices, replicas=1, in_halves=False)
        precision = strategy.resolve_precision(config.precision, small=config.small_network)
        self._actor = RolloutActor(config, collector, precision, at_once=threads)
        self._number, self._weights, self._replay = number, weights, replay

    def collect(self, rollout: int) -> Played:
        """Steps its envs through a rollout of --iteration-steps / --num-envs steps, and stores it.

        `rollout` is the number of the rollout: it decides the exploration, and whether actions are still
        random (--learning-starts).
        """
        first = self._actor.collector.observe().first
        collected = self._actor.collect(rollout, self._weights.get()).rollout
        ray.get(self._replay.add.remote(self._number, collected, first))
        return Played(collected.rewards[0], collected.first[0])


@ray.remote(num_cpus=1, max_restarts=0)
class Learner:
    """The networks, the optimizers and the gradient steps of an algorithm with replay.

    Args:
      agent: the class of the algorithm, such as `tfrl.algorithms.sac.SACAgent` or your own.
      config: the settings.
    """

    def __init__(self, agent: type[ReplayAgent], config: ReplaySettings) -> None:
        serve_driver()
        self._config = config
        self._agent = agent(config, strategy.make(config, None))
        self._gradient_steps = 0

    def learn(self, iteration: int, *drawn: Drawn) -> dict[str, float]:
        """Takes a gradient step on each of the K batches that the shards have drawn.

        Args:
          iteration: decides the learning rate (--lr-schedule).
          drawn: of each shard, in the order of the envs; K is the same in all calls.

        Returns:
          The means of the metrics, such as `train/q_loss`.

        Raises TrainingError if a loss is not finite.
        """
        batch, noise = _join(drawn)
        count, done = len(batch.reward), self._gradient_steps
        pending = self._agent.begin_gradient_steps(
            batch, noise, steps_done=done, count=count, iteration=iteration
        )
        sums = pending.wait().metrics
        self._gradient_steps += count
        return {name: value / count for name, value in sums.items()}

    def weights(self) -> dict[str, np.ndarray]:
        """The weights of all networks by name, for a `ParameterServer` or `tfrl.networks.weights.export`."""
        return self._agent.get_weights()

    def update_noise(self) -> int:
        """The numbers of each row that `ReplayShard` draws for this algorithm."""
        return self._agent.update_noise
