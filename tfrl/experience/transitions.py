"""The transitions of a recorded set in memory, and the batches of gradient steps drawn from them.

A set that fits is held whole. From a larger one, a window of shards is held: after some gradient steps, the
next shard of a random order replaces the oldest one. The shards of a step and its batch depend only on the
seed and the number of the step, so they are the same on any topology and after a resume.
"""

from __future__ import annotations

import concurrent.futures
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from rich import filesize

from tfrl.cli.errors import UserError
from tfrl.experience.normalize import ObservationNormalizer
from tfrl.experience.recorded import Episode, RecordedSet, Spaces
from tfrl.experience.replay import Batch
from tfrl.ops.q_learning import n_step
from tfrl.run import rng
from tfrl.workers import machine

_SHARE = 0.3  # of the memory, for what is held; concatenating it takes as much again for a moment
_MAX_VALIDATED = 8192  # transitions of validation episodes that are held
_BATCHES, _SHARDS = 0, 1  # keys of random numbers


class Block(NamedTuple):
    """The episodes of a shard, side by side: row t has o_t, a_t and r_t, and row t + 1 the next observation.

    Attributes:
      observations: [rows, *shape].
      actions: [rows, *shape], zeros in the last row of an episode.
      rewards: float32 [rows], of the env.
      terminated: bool [rows]: the action of this row ended its episode for good.
      at: int64 [transitions], the rows that have an action.
    """

    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    at: np.ndarray

    @classmethod
    def of(cls, episodes: Sequence[Episode], spaces: Spaces) -> Block:
        """The block of these episodes."""
        if not episodes:
            nothing = (0, *spaces.observation.shape), (0, *spaces.action.shape)
            shown, taken = (
                np.zeros(nothing[0], spaces.observation.dtype),
                np.zeros(nothing[1], spaces.action.dtype),
            )
            return cls(shown, taken, np.zeros(0, np.float32), np.zeros(0, bool), np.zeros(0, np.int64))
        lengths = np.array([len(episode.rewards) for episode in episodes])
        begins = np.cumsum(lengths + 1) - lengths - 1
        at = np.concatenate([np.arange(b, b + n) for b, n in zip(begins, lengths, strict=True)])
        terminated = np.zeros(int((lengths + 1).sum()), bool)
        terminated[begins + lengths - 1] = [episode.terminated for episode in episodes]
        return cls(
            np.concatenate([episode.observations for episode in episodes]),
            np.concatenate([_with_a_zero(episode.actions) for episode in episodes]),
            np.concatenate([_with_a_zero(episode.rewards) for episode in episodes]),
            terminated,
            at,
        )

    @classmethod
    def joined(cls, blocks: Sequence[Block]) -> Block:
        """One block of several."""
        begins = np.cumsum([0, *(len(block.rewards) for block in blocks)])
        at = np.concatenate([block.at + begin for block, begin in zip(blocks, begins, strict=False)])
        observations, actions, rewards, terminated = (
            np.concatenate(arrays) for arrays in zip(*(block[:4] for block in blocks), strict=True)
        )
        return cls(observations, actions, rewards, terminated, at)

    @property
    def nbytes(self) -> int:
        """Its size in memory."""
        return sum(array.nbytes for array in self)


def _with_a_zero(array: np.ndarray) -> np.ndarray:
    return np.concatenate([array, np.zeros_like(array[:1])])


@dataclass
class Summary:
    """The facts about a set, from one pass over all of it.

    Attributes:
      returns, lengths: of each episode.
      num_bytes: of all transitions in memory.
      shards: the bytes and the transitions of each shard.
    """

    returns: list[float]
    lengths: list[int]
    num_bytes: int
    shards: list[tuple[int, int]]

    @property
    def steps(self) -> int:
        """The number of transitions."""
        return sum(self.lengths)

    @property
    def results(self) -> dict[str, Any]:
        """The entry `dataset` of results.json."""
        returns = np.array(self.returns)
        return {
            "episodes": len(returns),
            "steps": self.steps,
            "return_mean": float(returns.mean()),
            "return_std": float(returns.std()),
            "return_min": float(returns.min()),
            "return_max": float(returns.max()),
        }


class Transitions:
    """The transitions of a set, of which batches are drawn.

    Args:
      recorded: the set.
      spaces: of the env.
      seed, batch_size: those of the run.
      gamma, n_step: the discount of a step, and the length of n-step returns.
      learned_rewards: computes the learner's rewards, float32 [n], from the env's.
      validation: the share of the episodes that no batch has.
      window: the number of shards to hold at a time; None: all if they fit, otherwise as many as fit.
      on_shard: called with the number of shards that the pass over the set has read.

    Attributes:
      summary: what the set has.
      window: the number of shards that are held at a time.
      scaling: mean and deviation of the observations of all transitions.
      validation: observations and actions of the validation episodes, at most 8192 of each.

    Raises UserError if the set has no episodes, does not fit the env, or is damaged.
    """

    def __init__(
        self,
        recorded: RecordedSet,
        spaces: Spaces,
        *,
        seed: int,
        batch_size: int,
        gamma: float,
        n_step: int = 1,
        learned_rewards: Callable[[np.ndarray], np.ndarray] = lambda rewards: rewards,
        validation: float = 0.0,
        window: int | None = None,
        on_shard: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._recorded, self._spaces = recorded, spaces
        self._seed, self._batch_size = seed, batch_size
        self._gamma, self._n_step, self._learned_rewards = gamma, n_step, learned_rewards
        self._validation_share = validation
        self.summary = Summary([], [], 0, [])
        self.scaling = ObservationNormalizer(max(1, spaces.observation.num_numbers))
        self._begins: list[int] = []  # the number of the first episode of each shard
        self._orders: dict[int, np.ndarray] = {}
        kept = self._pass(window, on_shard)
        if not self.summary.lengths:
            raise UserError(f"{recorded.name} has no episodes.")
        if not sum(count for _, count in self.summary.shards):
            raise UserError(
                f"{recorded.name} has no episodes beside those for validation; lower --validation."
            )
        # The shards that have other than validation episodes.
        self._learned = [number for number, (_, count) in enumerate(self.summary.shards) if count]
        self.window = len(self._learned) if kept else min(self._window(window), len(self._learned))
        self._whole = Block.joined(kept) if kept else None
        self._steps_of_shard = max(1, round(self._transitions / len(self._learned) / batch_size))
        self._held: dict[int, concurrent.futures.Future[Block]] = {}
        self._reader = concurrent.futures.ThreadPoolExecutor(1, "recorded")

    def _pass(self, window: int | None, on_shard: Callable[[int], None]) -> list[Block]:
        """Reads the whole set once for its summary; returns its blocks if all are held."""
        kept: list[Block] = []
        held: list[Episode] = []
        spec, limit = self._spaces.observation, _SHARE * machine.memory()
        whole = window is None or window >= len(self._recorded.shards)
        for number, shard in enumerate(self._recorded.shards):
            self._begins.append(len(self.summary.lengths))
            training: list[Episode] = []
            validation: list[Episode] = []
            for episode in shard.episodes(self._spaces):
                mine = validation if self._validates(len(self.summary.lengths)) else training
                mine.append(episode)
                self.summary.returns.append(float(episode.rewards.sum(dtype=np.float64)))
                self.summary.lengths.append(len(episode.rewards))
            block = Block.of(training, self._spaces)
            self.summary.num_bytes += block.nbytes
            self.summary.shards.append((block.nbytes, len(block.at)))
            if spec.num_numbers and len(block.at):
                self._take_in(spec.numbers(block.observations[block.at]))
            if sum(len(episode.rewards) for episode in held) < _MAX_VALIDATED:
                held += validation
            whole = whole and (window is not None or self.summary.num_bytes <= limit)
            kept = [*kept, block] if whole else []
            on_shard(number + 1)
        block = Block.of(held, self._spaces)
        at = block.at[:_MAX_VALIDATED]
        self.validation = block.observations[at], block.actions[at]
        return kept

    def _validates(self, episode: int) -> bool:
        """True if no batch has the episode of this number."""
        share, begin = self._validation_share, 0.499  # about the middle of the first 1 / share episodes
        return math.floor((episode + 1) * share + begin) > math.floor(episode * share + begin)

    def _take_in(self, numbers: np.ndarray) -> None:
        """Adds the numbers [n, K] of observations to mean and deviation."""
        wide = numbers.astype(np.float64)
        mean = wide.mean(axis=0)
        self.scaling.update(np.stack([mean, np.square(wide - mean).sum(axis=0)])[None], len(wide))

    def _window(self, window: int | None) -> int:
        """The number of shards to hold at a time. Raises UserError if two do not fit."""
        most, memory = max(size for size, _ in self.summary.shards), machine.memory()
        fits = int(_SHARE * memory / most) - 1  # and the next one
        wanted = fits if window is None else window
        if wanted > fits or fits < 1:
            place = f"{self._recorded.name} in shards of {filesize.decimal(most)}"
            raise UserError(
                f"{place} does not fit: {max(2, wanted + 1)} of them need more than {_SHARE:.0%} of this "
                f"machine's memory of {filesize.decimal(memory)}; "
                + (f"use --held-shards {fits}." if fits > 0 else "use smaller shards.")
            )
        return wanted

    @property
    def _transitions(self) -> int:
        return sum(count for _, count in self.summary.shards)

    @property
    def is_whole(self) -> bool:
        """True if the whole set is held."""
        return self._whole is not None

    def in_words(self) -> str:
        """The size of the set and of its part in memory, for the table before training."""
        held, whole = self.window, len(self._recorded.shards)
        size = self.summary.num_bytes
        text = f"{self._transitions:,} transitions, {filesize.decimal(size)} in memory"
        if self._whole is not None:
            return text
        share = filesize.decimal(int(size * (held + 1) / whole))
        return f"{text.replace(' in memory', '')}; {held} of {whole} shards, {share}, in memory at a time"

    # Batches

    def sample(
        self, first: int, steps: int, noise_size: int, rows: slice = slice(None)
    ) -> tuple[Batch, np.ndarray]:
        """The batches of gradient steps `first` and the next ones, and their noise.

        Args:
          first: the number of earlier gradient steps.
          steps: K.
          noise_size: standard normal numbers of a transition.
          rows: this worker's rows of the batch of all workers.

        Returns:
          Arrays [K, b, 1, ...] of `Batch`, and float32 [K, b, 1, noise_size], for b rows.
        """
        found, noise = [], []
        for number in range(first, first + steps):
            generator = rng.generator(self._seed, rng.Use.RECORDED, _BATCHES, number)
            blocks = (
                [self._whole] if self._whole is not None else self._blocks(number // self._steps_of_shard)
            )
            counts = np.cumsum([len(block.at) for block in blocks])
            drawn = generator.integers(counts[-1], size=self._batch_size)[rows]
            noise.append(generator.standard_normal((self._batch_size, noise_size), np.float32)[rows])
            found.append(self._gather(blocks, counts, drawn))
        fields = (np.stack(arrays)[:, :, None] for arrays in zip(*found, strict=True))
        return Batch(*fields), np.stack(noise)[:, :, None]

    def draw(self, generator: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
        """Transitions of a set that is held whole: the fields [*shape, ...] of `Batch`."""
        assert self._whole is not None
        drawn = generator.integers(len(self._whole.at), size=shape).reshape(-1)
        fields = self._gather([self._whole], np.array([len(self._whole.at)]), drawn)
        return tuple(array.reshape(*shape, *array.shape[1:]) for array in fields)

    def _gather(
        self, blocks: Sequence[Block], counts: np.ndarray, drawn: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """The fields of `Batch` [b, ...] of the transitions of these numbers, int64 [b]."""
        if len(blocks) == 1:
            return self._of_block(blocks[0], drawn)
        places = np.searchsorted(counts, drawn, side="right")
        order = np.argsort(places, kind="stable")
        parts = []
        for place in np.unique(places):
            begin = counts[place - 1] if place else 0
            parts.append(self._of_block(blocks[place], drawn[places == place] - begin))
        back = np.argsort(order, kind="stable")
        return tuple(np.concatenate(arrays)[back] for arrays in zip(*parts, strict=True))

    def _of_block(self, block: Block, numbers: np.ndarray) -> tuple[np.ndarray, ...]:
        at = block.at[numbers]
        window = np.minimum(numbers[:, None] + np.arange(self._n_step), len(block.at) - 1)
        rows, following = block.at[window], block.at.take(window + 1, mode="clip")
        ends = following != rows + 1
        truncated = ends & ~block.terminated[rows]
        rewards = self._learned_rewards(block.rewards[rows])
        reward, discount, steps = n_step(rewards, ends, truncated, gamma=self._gamma)
        return (
            block.observations.take(at, axis=0),
            block.actions.take(at, axis=0),
            reward,
            discount,
            block.observations.take(at + steps, axis=0),
            np.ones(len(at), np.float32),
            at,
        )

    def _blocks(self, number: int) -> list[Block]:
        """The blocks of window `number`, in the order of their shards; the next shard is read meanwhile."""
        wanted = [self._shard_at(number + k) for k in range(self.window)]
        following = self._shard_at(number + self.window)
        for shard in [s for s in self._held if s not in (*wanted, following)]:
            del self._held[shard]
        for shard in (*wanted, following):
            if shard not in self._held:
                self._held[shard] = self._reader.submit(self._read, shard)
        return [self._held[shard].result() for shard in wanted]

    def _shard_at(self, place: int) -> int:
        """The shard at a place of the random order of shards, which begins anew after each pass."""
        passes, inside = divmod(place, len(self._learned))
        if passes not in self._orders:
            generator = rng.generator(self._seed, rng.Use.RECORDED, _SHARDS, passes)
            self._orders = {k: order for k, order in self._orders.items() if k >= passes - 1}
            self._orders[passes] = generator.permutation(self._learned)
        return int(self._orders[passes][inside])

    def _read(self, shard: int) -> Block:
        episodes = self._recorded.shards[shard].episodes(self._spaces)
        numbered = enumerate(episodes, start=self._begins[shard])
        return Block.of(
            [episode for number, episode in numbered if not self._validates(number)], self._spaces
        )

    def close(self) -> None:
        """Ends the thread that reads."""
        self._reader.shutdown(cancel_futures=True)
