"""A bandit, which learns a choice while training: UCB-DrAC's of an augmentation. In NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


class SlidingWindowUCB:
    """An upper-confidence-bound bandit with a short memory (Raileanu et al. 2021, arXiv:2006.12862).

        choose argmax_f Q(f) + c sqrt(log t / N(f))     eq. 8
        Q(f) = mean of the last K returns after f       eq. 9

    N(f) is how often f was chosen, t how often any was; choices whose returns are still to come count, so
    that none is tried again before its first return. First, each f is tried once (UCB1, Auer et al.
    2002); the authors' code begins with Q = 0 instead, and may then stay with its first f for ever where
    returns are positive. Of equals the first is chosen, so a run repeats itself.

    Args:
      num_choices: how many there are, A.
      exploration: c, in the units of the returns.
      window: K.
    """

    def __init__(self, num_choices: int, *, exploration: float = 0.1, window: int = 10) -> None:
        self._exploration = exploration
        self._counts = np.zeros(num_choices, np.int64)
        self._returns = np.zeros((num_choices, window), np.float64)  # a ring for each choice

    def choose(self, pending: Sequence[int] = ()) -> int:
        """The choice to try next, 0 ... A - 1.

        pending: earlier ones that are not recorded yet.
        """
        counts = self._counts + np.bincount(np.array(pending, np.int64), minlength=len(self._counts))
        if (counts == 0).any() or not self._counts.any():
            return int(np.argmin(counts))
        bonus = self._exploration * np.sqrt(np.log(counts.sum()) / counts)
        return int(np.argmax(np.where(self._counts > 0, self.mean_returns() + bonus, -np.inf)))

    def record(self, choice: int, mean_return: float) -> None:
        """Records the `mean_return` after a `choice`."""
        self._returns[choice, self._counts[choice] % self._returns.shape[1]] = mean_return
        self._counts[choice] += 1

    def mean_returns(self) -> np.ndarray:
        """Q, float64 [A]; 0 for a choice that was never tried."""
        return self._returns.sum(axis=1) / np.clip(self._counts, 1, self._returns.shape[1])

    def counts(self) -> np.ndarray:
        """N, int64 [A]."""
        return self._counts.copy()

    def get_state(self) -> dict[str, np.ndarray]:
        """Copies of the arrays that decide the future choices, by name."""
        return {"counts": self._counts.copy(), "returns": self._returns.copy()}

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from arrays of `get_state`.

        Raises:
          ValueError: they are of another number of choices or another window.
        """
        for name, own in self.get_state().items():
            if state[name].shape != own.shape:
                raise ValueError(f"{name} of a bandit has shape {state[name].shape} instead of {own.shape}")
        self._counts = np.array(state["counts"], np.int64)
        self._returns = np.array(state["returns"], np.float64)
