"""Replay: the last transitions of this worker's envs, and batches drawn from them.

Row t of an env has o_t, a_t and the results of a_t. The next observation is that of row t + 1, so each
observation is stored once. After a truncated episode, row t + 1 begins another episode, and the final
observation is stored separately. The rows form a ring buffer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from rich import filesize

from tfrl.cli.errors import UserError
from tfrl.config.run import RLSettings
from tfrl.envs import registry
from tfrl.envs.spec import ActionSpec, ArraySpec, Step
from tfrl.ops.q_learning import n_step
from tfrl.run.checkpoint import CheckpointShard
from tfrl.workers import machine


class Batch(NamedTuple):
    """Transitions of K batches: b of each of B envs, in the order of the envs.

    Attributes:
      observation: [K, B, b, *shape].
      next_observation: [K, B, b, *shape], for bootstrapping.
      action: [K, B, b, *shape].
      reward: float32 [K, B, b], the discounted sum of up to n rewards.
      discount: float32 [K, B, b], the factor of the value of the next observation; 0 if the episode
        terminated.
      weight: float32 [K, B, b], the importance-sampling weights; 1 where rows are drawn uniformly.
      rows: int64 [K, B, b], for `ReplayBuffer.set_priorities`.
    """

    observation: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    discount: np.ndarray
    next_observation: np.ndarray
    weight: np.ndarray
    rows: np.ndarray


class ReplayBuffer:
    """The last transitions of some of the global envs.

    Args:
      envs: the global indices of these envs.
      rows: the number of transitions of each env.
      observation, action: the specs.
      gamma, n_step: the discount and the length of n-step returns.
      priority_exponent: alpha of prioritised replay; None draws uniformly.
      learned_rewards: computes the rewards to store, float32 [B], from the env's rewards.

    Attributes:
      steps: the number of actions that each env has taken.
    """

    def __init__(
        self,
        envs: Sequence[int],
        rows: int,
        *,
        observation: ArraySpec,
        action: ActionSpec,
        gamma: float,
        n_step: int = 1,
        priority_exponent: float | None = None,
        learned_rewards: Callable[[np.ndarray], np.ndarray] = lambda rewards: rewards,
    ) -> None:
        self.steps = 0
        self._envs = list(envs)
        # One more row, because the newest observation has no action yet.
        self._ring = ring = rows + 1
        size = (ring, len(self._envs))
        self._observations = np.zeros((*size, *observation.shape), observation.dtype)
        self._actions = np.zeros((*size, *action.shape), action.dtype)
        self._rewards = np.zeros(size, np.float32)
        self._first, self._truncated = np.zeros(size, bool), np.zeros(size, bool)
        self._finals: dict[tuple[int, int], np.ndarray] = {}  # by row of the ring and column
        self._gamma, self._n_step = gamma, n_step
        self._learned_rewards = learned_rewards
        self._exponent = priority_exponent
        self._priorities = [Priorities(ring) for _ in envs] if priority_exponent is not None else []
        self._highest = np.ones(len(self._envs))  # the highest priority of each env so far, for new rows
        self._ranked = 0  # the number of steps whose rows have a priority
        self._shards: list[CheckpointShard] = []
        self._corrections = 0  # of rows in shards, so far

    # Storing

    def show(self, step: Step) -> None:
        """Stores a `Step`: o_t, and the results of a_{t-1}. A repeated call has no effect."""
        self.set_current(step.observation, step.first)
        if self.steps == 0:
            return
        before = (self.steps - 1) % self._ring
        self._rewards[before] = self._learned_rewards(step.reward)
        self._truncated[before] = step.truncated
        if step.final_observation is not None:
            for column, final in zip(np.flatnonzero(step.truncated), step.final_observation, strict=True):
                self._finals[before, int(column)] = np.array(final)

    def set_current(self, observations: np.ndarray, first: np.ndarray) -> None:
        """Sets the current observations [B, *shape] and `first` flags [B]; the previous transition stays."""
        at, before = self.steps % self._ring, (self.steps - 1) % self._ring
        self._observations[at] = observations
        if self.steps and (self._first[before] != first).any():
            self._first[before] = first
            # If the row is in a shard, an env could not be restored exactly, and its saved episode does not
            # continue. After a change of the number of workers, others may keep that shard: `set_state` lets
            # the corrected one win, so it has all rows from there on.
            begins = [shard.about["begin"] for shard in self._shards if shard.about["end"] >= self.steps]
            if begins:
                self._corrections += 1
                self._shards = [shard for shard in self._shards if shard.about["end"] <= min(begins)]

    def resume_round(self, observations: np.ndarray, first: np.ndarray) -> None:
        """Sets the current observations before a round like `set_current`; usually those of the last `show`.

        If another episode begins, the episode before it was truncated at its last shown observation.
        """
        at, before = self.steps % self._ring, (self.steps - 1) % self._ring
        cut = first & ~self._first[before] & (self.steps > 0)
        for column in np.flatnonzero(cut):
            self._finals[before, int(column)] = self._observations[at, column].copy()
        self._truncated[before] |= cut
        self.set_current(observations, first)

    def act(self, actions: np.ndarray) -> None:
        """Stores a_t [B, *shape] for the shown observations; the next row replaces the oldest."""
        self._actions[self.steps % self._ring] = actions
        self.steps += 1
        if self._finals:
            gone = self.steps % self._ring
            for column in range(len(self._envs)):
                self._finals.pop((gone, column), None)

    @property
    def _oldest(self) -> int:
        """The step of the oldest row."""
        return max(0, self.steps - self._ring + 1)

    def __len__(self) -> int:
        """The number of transitions of each env."""
        return self.steps - self._oldest

    # Sampling

    def min_probability(self) -> float:
        """The smallest probability of a row among the rows of its env, for all rows that can be drawn."""
        self._rank_new_rows()
        return min(tree.least / tree.total for tree in self._priorities)

    def sample(
        self,
        generators: Sequence[np.random.Generator],
        batches: int,
        rows_each: int,
        *,
        beta: float = 1.0,
        least: float | None = None,
    ) -> Batch:
        """Draws K batches with b rows of each env, from all but its newest n - 1 rows.

        Args:
          generators: one for each env; it alone decides the rows of the env.
          batches: K.
          rows_each: b.
          beta: the exponent of the importance-sampling weights.
          least: `min_probability` of all envs of all workers; None: these envs are all.
        """
        size = (batches, rows_each)
        if self._priorities:
            least = self.min_probability() if least is None else least
            drawn = [self._draw(i, g.random(size), beta, least) for i, g in enumerate(generators)]
            rows, weights = (np.stack(x, axis=1) for x in zip(*drawn, strict=True))
        else:
            count = len(self) - self._n_step + 1
            rows = np.stack([g.integers(count, size=size) for g in generators], axis=1)  # [K, B, b]
            rows = (rows + self._oldest) % self._ring
            weights = np.ones(rows.shape, np.float32)
        return self._gather(rows, weights)

    def _gather(self, rows: np.ndarray, weights: np.ndarray) -> Batch:
        count = len(self._envs)
        column = np.arange(count)[:, None]
        if self._n_step == 1:
            at = rows * count + column
            reward, ended = self._rewards.reshape(-1).take(at), self._first.reshape(-1).take(at)
            cut = self._truncated.reshape(-1).take(at)
            discount = np.where(ended & ~cut, np.float32(0), np.float32(self._gamma))
            last = rows
        else:
            window = (rows[..., None] + np.arange(self._n_step)) % self._ring
            at = window * count + column[..., None]
            rewards, first, truncated = (
                x.reshape(-1).take(at) for x in (self._rewards, self._first, self._truncated)
            )
            reward, discount, steps = n_step(rewards, first, truncated, gamma=self._gamma)
            last = (rows + steps - 1) % self._ring
            cut = np.take_along_axis(truncated, steps[..., None] - 1, axis=-1)[..., 0]
        after = _take(self._observations, (last + 1) % self._ring * count + column)
        for k, i, j in zip(*np.nonzero(cut), strict=True):
            after[k, i, j] = self._finals[int(last[k, i, j]), int(i)]
        return Batch(
            observation=_take(self._observations, rows * count + column),
            action=_take(self._actions, rows * count + column),
            reward=reward,
            discount=discount,
            next_observation=after,
            weight=weights,
            rows=rows,
        )

    # Priorities

    def set_priorities(self, rows: np.ndarray, errors: np.ndarray) -> None:
        """Sets the priorities of a batch's rows to (|error| + 1e-6)^alpha, [K, B, b]; for repeated rows, the
        last counts. Only with a `priority_exponent`.
        """
        priorities = (np.abs(errors).astype(np.float64) + 1e-6) ** self._exponent
        for i, tree in enumerate(self._priorities):
            mine, values = rows[:, i].reshape(-1), priorities[:, i].reshape(-1)
            tree.set(mine, values)
            self._highest[i] = max(self._highest[i], values.max())

    def _rank_new_rows(self) -> None:
        """Sets new rows to the highest priority so far, and overwritten rows to 0."""
        start, end = max(self._ranked, self._oldest), self.steps - self._n_step + 1
        new = np.arange(start, end) % self._ring
        gone = np.arange(self.steps - self._n_step + 1, self.steps + 1) % self._ring
        for tree, highest in zip(self._priorities, self._highest, strict=True):
            tree.set(gone, 0.0)
            tree.set(new, highest)
        self._ranked = end

    def _draw(self, i: int, uniforms: np.ndarray, beta: float, least: float) -> tuple[np.ndarray, np.ndarray]:
        """Draws rows [K, b] of env i, with weights (N P)^-beta divided by the largest of all envs (section
        3.4).

        All envs have equally many rows in a batch, so P of a row is its share in its env's priorities.
        """
        tree = self._priorities[i]
        rows = tree.draw(uniforms.reshape(-1)).reshape(uniforms.shape)
        return rows, ((tree[rows] / tree.total / least) ** -beta).astype(np.float32)

    # State

    def get_state(self) -> dict[str, np.ndarray]:
        """The arrays of this worker beside the shards."""
        state = {"steps": np.array(self.steps)}
        if self._priorities:
            leaves = np.stack([tree[: self._ring] for tree in self._priorities])
            state |= {"priorities": leaves, "highest": self._highest, "ranked": np.array(self._ranked)}
        return state

    def shards(self) -> list[CheckpointShard]:
        """The rows in shards: the saved ones, and a new one with the rows since then."""
        self._shards = [p for p in self._shards if p.is_saved and p.about["end"] > self._oldest]
        begin = max(self._oldest, self._shards[-1].about["end"] if self._shards else 0)
        if begin < self.steps:
            self._shards.append(self._shard(begin))
        return self._shards

    def _shard(self, begin: int) -> CheckpointShard:
        at = np.arange(begin, self.steps) % self._ring
        stored = (self._observations, self._actions, self._rewards, self._first, self._truncated)
        arrays = {name: array[at] for name, array in zip(_STORED, stored, strict=True)}
        places = {int(place): k for k, place in enumerate(at)}
        finals = sorted((places[p], c, o) for (p, c), o in self._finals.items() if p in places)
        arrays["final_at"] = np.array([(k, c) for k, c, _ in finals], np.int64).reshape(-1, 2)
        arrays["finals"] = np.array([o for *_, o in finals], self._observations.dtype)
        about = {"begin": begin, "end": self.steps, "envs": self._envs, "corrections": self._corrections}
        return CheckpointShard(about, arrays)

    def set_state(self, parts: Sequence[Mapping[str, np.ndarray]], shards: Sequence[CheckpointShard]) -> None:
        """Restores the state of all workers, also of another number of workers.

        Args:
          parts: `get_state` of each worker, with the `indices` of its envs.
          shards: the shards of all workers.
        """
        self.steps = int(parts[0]["steps"])
        self._finals = {}
        mine = [p for p in shards if p.about["end"] > self._oldest and {*p.about["envs"]} & {*self._envs}]
        self._corrections = max((p.about.get("corrections", 0) for p in mine), default=0)
        self._shards = sorted(mine, key=lambda p: (p.about["end"], p.about.get("corrections", 0)))
        for shard in self._shards:  # a row that was corrected comes after its earlier state
            self._take_in(shard)
        if not self._priorities:
            return
        self._ranked = int(parts[0]["ranked"])
        saved = {int(i): (part, k) for part in parts for k, i in enumerate(part["indices"])}
        for column, (env, tree) in enumerate(zip(self._envs, self._priorities, strict=True)):
            part, k = saved[env]
            tree.set(np.arange(self._ring), part["priorities"][k])
            self._highest[column] = part["highest"][k]

    def _take_in(self, shard: CheckpointShard) -> None:
        arrays, envs = shard.load(), shard.about["envs"]
        begin, end = shard.about["begin"], shard.about["end"]
        skipped = max(0, self._oldest - begin)
        at = np.arange(begin + skipped, end) % self._ring
        columns = {i: self._envs.index(env) for i, env in enumerate(envs) if env in self._envs}
        theirs, ours = list(columns), list(columns.values())
        stored = (self._observations, self._actions, self._rewards, self._first, self._truncated)
        for name, array in zip(_STORED, stored, strict=True):
            array[at[:, None], ours] = arrays[name][skipped:, theirs]
        for (k, i), final in zip(arrays["final_at"].tolist(), arrays["finals"], strict=True):
            if k >= skipped and i in columns:
                self._finals[(begin + k) % self._ring, columns[i]] = final


_STORED = ("observations", "actions", "rewards", "first", "truncated")


def _take(array: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Entries [*at.shape, ...] of [rows, envs, ...] at `row * envs + env`."""
    return array.reshape(-1, *array.shape[2:]).take(at, axis=0)


class Priorities:
    """The priorities of rows (Schaul et al. 2016, arXiv:1511.05952), in trees of sums and of minima.

    Each call takes O(log rows). A node depends only on its two children, so the bits of a tree depend only on
    the priorities, not on the order of `set`.
    """

    def __init__(self, rows: int) -> None:
        self._leaves = 1 << max(1, (rows - 1).bit_length())
        self._sum = np.zeros(2 * self._leaves)
        self._least = np.full(2 * self._leaves, np.inf)

    @property
    def total(self) -> float:
        """The sum of all priorities."""
        return float(self._sum[1])

    @property
    def least(self) -> float:
        """The smallest priority above 0; infinite if all are 0."""
        return float(self._least[1])

    def __getitem__(self, rows: np.ndarray | slice) -> np.ndarray:
        """The priorities of rows, float64."""
        return self._sum[self._leaves :][rows]

    def set(self, rows: np.ndarray, priorities: np.ndarray | float) -> None:
        """Sets the priorities of rows [n], float [n]; rows of priority 0 are never drawn.

        For a repeated row, the last priority counts.
        """
        nodes = np.asarray(rows) + self._leaves
        self._sum[nodes] = priorities
        self._least[nodes] = np.where(self._sum[nodes] > 0, self._sum[nodes], np.inf)
        while nodes.size and nodes[0] > 1:
            nodes = np.unique(nodes >> 1)
            left, right = 2 * nodes, 2 * nodes + 1
            self._sum[nodes] = self._sum[left] + self._sum[right]
            self._least[nodes] = np.minimum(self._least[left], self._least[right])

    def draw(self, uniforms: np.ndarray) -> np.ndarray:
        """Draws rows [n] in proportion to their priorities, by numbers in [0, 1), float64 [n]."""
        left_over = uniforms * self.total
        nodes = np.ones(uniforms.shape, np.int64)
        while nodes.size and nodes[0] < self._leaves:
            nodes *= 2
            below = self._sum[nodes]
            # By rounding, a number may exceed the sum of the right child; then the left child is taken.
            right = (left_over >= below) & (self._sum[nodes + 1] > 0)
            left_over -= np.where(right, below, 0.0)
            nodes += right
        return nodes - self._leaves


_SHARE = 0.8  # share of the memory; TensorFlow, networks and checkpoints need the rest


class BufferSettings(RLSettings):
    """The settings of a replay buffer and of random actions before learning, for `tfrl.algorithms.replay`."""

    replay_size: int
    iteration_steps: int
    learning_starts: int
    priority_exponent: float  # of algorithms with `prioritized_replay`, as is the next one
    priority_beta: float

    def exploration(self, env_steps: int) -> tuple[np.float32, ...]:
        """Further arguments of the network's `sample` in training, after `env_steps` env steps."""
        return ()

    @property
    def prioritized_replay(self) -> bool:
        """True if transitions are drawn in proportion to their errors."""
        return False


def replay_bytes(config: BufferSettings) -> int:
    """The bytes of the replay of all workers, without the final observations of truncated episodes."""
    observation, action = registry.specs(config)
    row = sum(math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in (observation, action))
    row += 4 + 2  # the reward and two flags
    if config.prioritized_replay:
        row += 64  # two trees with twice as many nodes as leaves; there may be twice as many leaves as rows
    return config.replay_size * row


def in_words(config: BufferSettings) -> str:
    """The size of the replay of all workers, such as "1,000,000 transitions, 12.3 GB"."""
    return f"{config.replay_size:,} transitions, {filesize.decimal(replay_bytes(config))}"


def check_memory(config: BufferSettings, workers: int, here: int = 1) -> None:
    """Raises UserError, which names a size that fits, if the replay is too large for the memory.

    Arrays of zeros take memory only when they are filled. Without this check, a run would be killed hours
    later.

    Args:
      config: the settings.
      workers: the number of workers, which share the replay evenly.
      here: the number of these workers on this machine.
    """
    needed, memory = replay_bytes(config) * here // workers, machine.memory()
    if needed <= _SHARE * memory:
        return
    fits = int(_SHARE * memory / needed * config.replay_size)
    fits -= fits % 10 ** (len(str(fits)) - 1)  # one digit, rounded down
    held = "" if workers == 1 else f" for {here} of {workers} workers"
    raise UserError(
        f"--replay-size {config.replay_size} needs {filesize.decimal(needed)}{held}, and a replay may use "
        f"{_SHARE:.0%} of this machine's memory of {filesize.decimal(memory)}; use at most {fits}."
    )
