"""Prioritized Level Replay (Jiang et al. 2021, arXiv:2010.03934): which level an env plays next.

Each training level has a score: how wrong the values were in its last episode. A new episode replays a level
that was seen, by its score and its staleness, or begins a level that was never seen:

    P = (1 - rho) P_score + rho P_stale                                         eq. 3 of the paper
    P_score(l) = h(S_l)^(1 / beta) / sum,   h(S_l) = 1 / rank(S_l)              eq. 1
    P_stale(l) = (c - C_l) / sum                                                eq. 2
    S_l = mean |A_t| over the episode, with A_t of GAE ("value_l1")             table 1, L1 value loss

rho is --level-staleness, beta is --level-temperature, C_l is the number of the last episode that began level
l, and c is the number of all episodes. The probabilities of a rollout follow from the scores after an earlier
update, and the random numbers from (seed, update, env). So the levels do not depend on the topology.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np

from tfrl.cli.flags import FRACTION, POSITIVE
from tfrl.run import rng

MAX_LEVELS = 1_000_000
"""The largest number of levels; their numbers from the first level on are exact in float32."""


@dataclass(frozen=True)
class LevelReplay:
    """Prioritized Level Replay: choose the training levels by how much there is to learn from them."""

    level_replay: bool = False
    """Choose the level of each new training episode by the scores of the levels. Evaluations choose levels
    uniformly. For procgen, and for your own envs whose reset(options={"level": n}) begins level n, with
    --num-levels."""
    level_temperature: Annotated[float, POSITIVE] = 0.1
    """A lower temperature prefers the levels with the highest scores more."""
    level_staleness: Annotated[float, FRACTION] = 0.1
    """Share of replayed episodes whose level is chosen by how long ago it was begun, and not by its score."""
    level_schedule: Literal["proportionate", "unseen-first"] = "proportionate"
    """Choice between seen and unseen levels. proportionate: a seen one with the probability of the share of
    levels seen so far; unseen-first: a seen one only after all levels have been seen."""


class LevelSampler:
    """The scores of the training levels, equal on all workers.

    Args:
      levels: the number of levels L.
      first_level: the number of the first level.
      temperature, staleness, schedule: those of `LevelReplay`.
      seed: keys the random numbers.

    Attributes:
      scores: float64 [L]; 0 for levels that were not seen.
      seen: bool [L].
      stale: int64 [L], the number of episodes that began since the last one on each level.
      episodes: int64 [L], finished episodes of each level.
    """

    def __init__(
        self, levels: int, first_level: int, *, temperature: float, staleness: float, schedule: str, seed: int
    ) -> None:
        self.first_level = first_level
        self._temperature, self._staleness = temperature, staleness
        self._schedule, self._seed = schedule, seed
        self.scores, self.seen = np.zeros(levels), np.zeros(levels, bool)
        self.stale, self.episodes = np.zeros(levels, np.int64), np.zeros(levels, np.int64)

    @classmethod
    def of(cls, config: Any) -> LevelSampler | None:
        """The sampler of a run's settings; None without --level-replay."""
        if not getattr(config, "level_replay", False):
            return None
        return cls(
            config.num_levels,
            config.start_level,
            temperature=config.level_temperature,
            staleness=config.level_staleness,
            schedule=config.level_schedule,
            seed=config.seed,
        )

    def probabilities(self) -> np.ndarray:
        """The probability of each level for the next episodes, float64 [L]."""
        share = float(self.seen.mean())
        replay = share if self._schedule == "proportionate" else float(share == 1.0)
        found = np.zeros(len(self.scores))
        if replay < 1.0:
            found[~self.seen] = (1.0 - replay) / (~self.seen).sum()
        if replay > 0.0:
            found[self.seen] = replay * self._replay_probabilities()
        return found

    def _replay_probabilities(self) -> np.ndarray:
        """P of the module's docstring for the levels that were seen, float64 [S]."""
        scores, stale = self.scores[self.seen], self.stale[self.seen].astype(np.float64)
        ranks = np.empty(len(scores))
        ranks[np.argsort(-scores, kind="stable")] = np.arange(1, len(scores) + 1)
        by_score = (1.0 / ranks) ** (1.0 / self._temperature)
        by_score /= by_score.sum()
        if not stale.any():
            return by_score
        return (1.0 - self._staleness) * by_score + self._staleness * stale / stale.sum()

    def update(self, levels: np.ndarray, first: np.ndarray, errors: np.ndarray) -> None:
        """Scores the levels of a rollout, and counts its episodes.

        An episode that spans several rollouts scores its level once in each, by its steps there: the weights
        change between the rollouts. If a rollout has several episodes of a level, the score is that of the
        last one, in the order of the envs; unfinished episodes come after all finished ones.

        Args:
          levels: int64 [T + 1, N], the level of o_0 to o_T.
          first: bool [T, N], o_{t+1} begins a new episode.
          errors: float [T, N], |A_t|.
        """
        steps, envs = first.shape
        unfinished = []
        for n in range(envs):
            begin = 0
            for end in [*(np.flatnonzero(first[:, n]) + 1).tolist(), steps]:
                if begin == end:
                    continue
                part = int(levels[begin, n]) - self.first_level, float(errors[begin:end, n].mean(dtype=float))
                if first[end - 1, n]:
                    self._score(*part)
                    self.episodes[part[0]] += 1
                else:
                    unfinished.append(part)
                begin = end
        for part in unfinished:
            self._score(*part)
        begun = levels[1:][first] - self.first_level  # in the order of time, then of the envs
        self.stale += len(begun)
        self.stale[begun] = np.arange(len(begun) - 1, -1, -1)  # the last one of a level counts

    def _score(self, level: int, score: float) -> None:
        self.scores[level], self.seen[level] = score, True

    def metrics(self) -> dict[str, float]:
        """Levels seen, their mean staleness in episodes, and exp(entropy of the probabilities)."""
        p = self.probabilities()
        p = p[p > 0]
        return {
            "levels/seen": int(self.seen.sum()),
            "levels/mean_staleness": float(self.stale[self.seen].mean()) if self.seen.any() else 0.0,
            "levels/effective": float(np.exp(-(p * np.log(p)).sum())),
        }

    def draw(
        self, update: int, envs: Sequence[int], steps: int, probabilities: np.ndarray | None = None
    ) -> np.ndarray:
        """The levels of a rollout for some of the global envs, int64 [T, B].

        An env whose episode ends with action t begins level [t, b]. `probabilities` are those of
        `probabilities()` after an earlier update; None: after the last one.
        """
        cumulated = np.cumsum(self.probabilities() if probabilities is None else probabilities)
        numbers = rng.level_numbers(self._seed, update, envs, steps) * cumulated[-1]
        return self.first_level + np.searchsorted(cumulated, numbers, side="right")

    def table(self) -> str:
        """The levels as CSV text, one row a level."""
        columns = (self.scores, self.stale, self.probabilities(), self.episodes)
        rows = [
            f"{self.first_level + k},{int(self.seen[k])},{score!r},{stale},{p!r},{episodes}"
            for k, (score, stale, p, episodes) in enumerate(zip(*(x.tolist() for x in columns), strict=True))
        ]
        return "\n".join(["level,seen,score,staleness,probability,episodes", *rows]) + "\n"

    # State

    def get_state(self) -> dict[str, np.ndarray]:
        """All arrays, equal on every worker."""
        names = ("scores", "seen", "stale", "episodes")
        return {name: getattr(self, name).copy() for name in names}

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from arrays of `get_state`."""
        for name in self.get_state():
            getattr(self, name)[:] = state[name]
