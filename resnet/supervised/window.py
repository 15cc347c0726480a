"""Means over the steps since the last row of metrics."""

from __future__ import annotations

import numpy as np


class Window:
    """Sums that grow with each step and become a row's means; they are part of a checkpoint."""

    def __init__(self) -> None:
        self._sums = np.zeros(6)  # loss, accuracy, gradient norm, steps, seconds, seconds waited

    @property
    def seconds(self) -> float:
        """Seconds of training."""
        return float(self._sums[4])

    @property
    def seconds_per_step(self) -> float:
        """Their mean."""
        return float(self._sums[4] / max(1.0, self._sums[3]))

    def add_step(self, loss: float, accuracy: float, norm: float) -> None:
        """Takes a finished step."""
        self._sums[:4] += loss, accuracy, norm, 1

    def add_time(self, seconds: float, waited: float) -> None:
        """Takes seconds, and those of them spent waiting for images."""
        self._sums[4:] += seconds, waited

    def means(self, batch_size: int) -> dict[str, float]:
        """The metrics that follow."""
        loss, accuracy, norm, steps, seconds, waited = self._sums
        return {
            "train/loss": loss / steps,
            "train/accuracy": accuracy / steps,
            "train/grad_norm": norm / steps,
            "time/images_per_second": steps * batch_size / seconds,
            "time/input_wait_fraction": waited / seconds,
        }

    def get_state(self) -> list[float]:
        """The state, as values for a checkpoint."""
        return self._sums.tolist()

    @classmethod
    def of_state(cls, state: list[float]) -> Window:
        """The window that `get_state` described."""
        window = cls()
        window._sums[:] = state
        return window
