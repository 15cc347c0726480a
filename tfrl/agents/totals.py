"""The metrics of an update, from the sums of its minibatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tfrl.cli.errors import TrainingError


@dataclass
class Totals:
    """The steps of an update so far, and what they came to."""

    names: Sequence[str]  # of the means over minibatches; the gradient's norm follows them
    steps: int = 0
    ended: bool = False  # before all epochs: by --target-kl, or because something is no number
    sums: np.ndarray = field(init=False)  # float32 [names + 1]
    first_error: float = 0.0
    explained_variance: float = 0.0

    def __post_init__(self) -> None:
        self.sums = np.zeros(len(self.names) + 1, np.float32)

    def add(self, steps: int, ended: bool, sums: np.ndarray, first_error: float) -> None:
        """Takes in the steps of one call.

        Its sums go on from those before, so that they are the same however many steps a call has.
        """
        self.first_error = first_error if self.steps == 0 else self.first_error
        self.steps, self.ended, self.sums = self.steps + steps, ended, sums

    def metrics(self) -> dict[str, float]:
        """Means over the steps, named as in progress.csv. Raises TrainingError for what is no number."""
        means = (self.sums / np.float32(self.steps)).tolist()
        metrics = dict(zip((*self.names, "grad_norm"), means, strict=True))
        metrics |= {"explained_variance": self.explained_variance, "first_ratio_error": self.first_error}
        bad = [name for name, value in metrics.items() if not np.isfinite(value)]
        if bad:
            raise TrainingError(f"{bad[0]} is not a finite number (minibatch {self.steps} of the update)")
        return {f"train/{name}": value for name, value in metrics.items()}
