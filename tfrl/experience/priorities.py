"""Priorities of rows, in proportion to which they are drawn (Schaul et al. 2016, arXiv:1511.05952)."""

from __future__ import annotations

import numpy as np


class Priorities:
    """The priorities of `rows` rows in two binary trees, of sums and of the least: all takes log(rows).

    A node is computed from its two children alone, so trees of the same priorities are the same to the bit,
    in whatever order they were set.
    """

    def __init__(self, rows: int) -> None:
        self._leaves = 1 << max(1, (rows - 1).bit_length())
        self._sum = np.zeros(2 * self._leaves)
        self._least = np.full(2 * self._leaves, np.inf)

    @property
    def total(self) -> float:
        """The sum of all."""
        return float(self._sum[1])

    @property
    def least(self) -> float:
        """The least of all that are above 0; infinite where none is."""
        return float(self._least[1])

    def __getitem__(self, rows: np.ndarray | slice) -> np.ndarray:
        """The priorities of rows, float64."""
        return self._sum[self._leaves :][rows]

    def set(self, rows: np.ndarray, priorities: np.ndarray | float) -> None:
        """Gives rows [n] their priorities, float [n]; those of priority 0 are never drawn.

        A row that is named twice gets the last one.
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
        """Rows [n], each as often as its share of the total, by numbers in [0, 1), float64 [n]."""
        left_over = uniforms * self.total
        nodes = np.ones(uniforms.shape, np.int64)
        while nodes.size and nodes[0] < self._leaves:
            nodes *= 2
            below = self._sum[nodes]
            # Rounding may leave more than there is on the right: then the left one is meant.
            right = (left_over >= below) & (self._sum[nodes + 1] > 0)
            left_over -= np.where(right, below, 0.0)
            nodes += right
        return nodes - self._leaves
