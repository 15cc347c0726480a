"""Callbacks: work beside training. Those of tfrl and those of users have the same interface."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
from typing_extensions import TypeVar

from tfrl.cli.errors import UserError
from tfrl.run.checkpoint import pack_json, under, unpack_json

if TYPE_CHECKING:
    from tfrl.cli.settings import Settings
    from tfrl.config.run import RLSettings
    from tfrl.run.loop import Learner
    from tfrl.run.session import Session

_PREFIX = "callbacks/"
ConfigT = TypeVar("ConfigT", bound="Settings", default="RLSettings")
"""The class of a run's settings. Without a parameter, `RunOfCallback` is a run in envs."""


class RunOfCallback(Generic[ConfigT]):
    """The run as a callback sees it.

    Attributes:
      config: the settings.
      folder: the run's folder.
      metrics: the metrics of the last update by name; empty before the first update.
    """

    def __init__(self, config: ConfigT, session: Session, learner: Learner) -> None:
        self.config: ConfigT = config
        self.folder: Path = config.run_dir
        self.metrics: dict[str, float] = {}
        self._session, self._learner = session, learner
        self._stopped: str | None = None  # the reason that a callback gave to stop the run

    @property
    def learner(self) -> Learner:
        """The learner, for callbacks of tfrl itself."""
        return self._learner

    @property
    def updates(self) -> int:
        """The number of finished updates."""
        return self._session.step

    @property
    def env_steps(self) -> int:
        """Env steps of the finished updates, all workers together. In a supervised run, images."""
        return self._learner.steps_done

    @property
    def seconds(self) -> float:
        """The seconds of training in all processes of the run."""
        return self._session.seconds

    @property
    def is_chief(self) -> bool:
        """True on the one worker that may write files."""
        return self._session.runtime.is_chief

    def weights(self) -> dict[str, np.ndarray]:
        """The agent's weights by name, float32."""
        return self._learner.weights()

    def act(self, observations: np.ndarray, noise: np.ndarray, *memory: np.ndarray) -> Any:
        """Actions [B, *shape] for observations [B, *shape], drawn by noise float32 [B, K].

        A recurrent policy also takes its memory [B, M], and returns (actions, states [B, S]).
        """
        return self._learner.act(observations, noise, *memory)

    def memory(self, envs: int) -> Any:
        """The `tfrl.experience.memory.Memory` of so many envs; None if the policy is not recurrent."""
        return self._learner.memory(envs)

    def draw_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """The random numbers for the actions of one env, float32 [steps, K]."""
        return self._learner.draw_noise(generator, steps)

    def warn(self, sentence: str) -> None:
        """Prints `warning: SENTENCE` above the progress line, on the chief."""
        if self.is_chief:
            self._session.console.warn(sentence)

    def stop(self, why: str) -> None:
        """Ends the run after the present update, with an evaluation, an export and results.

        All workers stop, even if only one of them calls it.
        """
        self._stopped = self._stopped or why


class Callback:
    """Called by the loop of a run. Each method does nothing unless a subclass overrides it.

    Every worker has the same callbacks and calls them in the same order. A checkpoint has the state of the
    chief's callbacks. A killed run resumes from its last checkpoint, so its callbacks see the later updates
    again.
    """

    def on_start(self, run: RunOfCallback[Any]) -> None:
        """Called once in each process, before its first update."""

    def on_update(self, run: RunOfCallback[Any], metrics: dict[str, float]) -> None:
        """Called after each update, and after the evaluation that belongs to it.

        Args:
          run: the run. `run.stop` ends it.
          metrics: the metrics of the update, and of the evaluation if there was one. A callback may add
            floats by name; each becomes a column of progress.csv and a curve in TensorBoard. The names of the
            run's own columns are taken: a callback that changes one of them ends the run with an error.
        """

    def on_evaluation(self, run: RunOfCallback[Any], evaluation: Mapping[str, float]) -> None:
        """Called after each evaluation with its metrics, such as `eval_test/return`."""

    def on_end(self, run: RunOfCallback[Any], results: Mapping[str, Any]) -> None:
        """Called once, when the run is complete, with the content of results.json."""

    def get_state(self) -> dict[str, Any]:
        """The state that a resumed run needs: JSON values and NumPy arrays by name."""
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a state of `get_state`."""


def check_metrics(callback: Callback, metrics: Mapping[str, Any], own: Mapping[str, float | None]) -> None:
    """Raises UserError if a callback has added a metric that is no number, or changed one of the run itself.

    `own` has the run's metrics before the call, and its columns that have no value now as None.
    """
    who = f"the callback {type(callback).__name__}"
    for name, value in own.items():
        if metrics.get(name) is not value:
            raise UserError(
                f"{who} changed {name}, which is a column of the run itself: choose another name."
            )
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise UserError(f"{who} gave a metric the name {name!r}; a name is text.")
        try:
            math.isnan(value)
        except (TypeError, ValueError):  # ValueError: a tensor of several numbers
            raise UserError(
                f"{who} set the metric {name} to a value of type {type(value).__name__}; a metric is a "
                "single number."
            ) from None


def get_states(callbacks: Sequence[Callback]) -> dict[str, np.ndarray]:
    """The states of all callbacks as arrays of a checkpoint."""
    found = {}
    for name, callback in _named(callbacks).items():
        state = callback.get_state()
        arrays = {key for key, value in state.items() if isinstance(value, np.ndarray)}
        if rest := {key: value for key, value in state.items() if key not in arrays}:
            found[f"{_PREFIX}{name}"] = pack_json(rest)
        found |= {f"{_PREFIX}{name}/{key}": state[key] for key in arrays}
    return found


def set_states(callbacks: Sequence[Callback], state: Mapping[str, np.ndarray]) -> None:
    """Restores the callbacks' states from `get_states`. A callback without a saved state keeps its own."""
    for name, callback in _named(callbacks).items():
        of_it = f"{_PREFIX}{name}"
        found = unpack_json(state[of_it]) if of_it in state else {}
        found |= under(f"{of_it}/", state)
        if found:
            callback.set_state(found)


def _named(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Callbacks by class and by their number within the class."""
    kinds = [type(callback).__name__ for callback in callbacks]
    return {f"{kind}.{kinds[:k].count(kind)}": callbacks[k] for k, kind in enumerate(kinds)}
