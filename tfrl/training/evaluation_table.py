"""The table of a run's evaluations for people, which grows by a row with each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tfrl.run.console import Console

# By what the algorithms call them, in order: the first one that an update has is shown.
_CRITIC = ("train/value_loss", "train/q_loss")
_ACTOR = ("train/policy_loss", "train/actor_loss")


class EvaluationTable:
    """Prints its header with the first row of a process.

    Args:
      console: where to.
      level_sets: what is evaluated; named in the header where they are several.
    """

    def __init__(self, console: Console, level_sets: Sequence[str]) -> None:
        self._console = console
        self._level_sets = level_sets
        self._widths: list[int] = []

    def row(self, env_steps: int, seconds: float, metrics: Mapping[str, float]) -> None:
        """Prints one evaluation.

        Args:
          env_steps: how long was trained; seconds: how long that took.
          metrics: of the evaluation and, where there was one just before it, of the update.
        """
        cells = {"env steps": f"{env_steps:,}", "seconds": f"{seconds:,.0f}"}
        for level_set in self._level_sets:
            name = "return" if len(self._level_sets) == 1 else f"return, {level_set}"
            cells[name] = _spread(metrics, f"eval_{level_set}/return", 2)
        cells["length"] = _spread(metrics, "eval_test/episode_length", 1)
        cells["critic loss"] = _number(_first(metrics, _CRITIC))
        cells["actor loss"] = _number(_first(metrics, _ACTOR))
        if not self._widths:
            least = {"env steps": 11, "seconds": 7, "length": 13}
            self._widths = [
                max(len(name), least.get(name, 15 if name.startswith("return") else 0)) for name in cells
            ]
            self._print(cells)
        self._print(cells.values())

    def _print(self, cells: Sequence[str]) -> None:
        padded = (cell.rjust(width) for cell, width in zip(cells, self._widths, strict=True))
        self._console.message("  ".join(padded))


def _spread(metrics: Mapping[str, float], name: str, digits: int) -> str:
    """The mean of the episodes and their standard deviation."""
    return f"{metrics[name]:.{digits}f} \u00b1 {metrics[f'{name}_std']:.{digits}f}"


def _first(metrics: Mapping[str, float], names: Sequence[str]) -> float:
    return next((metrics[name] for name in names if name in metrics), math.nan)


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"
