"""An iteration of a run from replay while it is under way, and when it pauses to be saved or stopped."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from tfrl.envs.spec import ActionSpec, Step
from tfrl.experience.rollout import Rollout
from tfrl.run.arrays import pack_json, unpack_json
from tfrl.run.stop import StopRequest, stop_code
from tfrl.workers.strategy import Runtime

_STATE = "iteration"
_BY_ENV = ("rewards", "first", "actions")
_NUMBERS = ("done", "counted", "taken", "seconds", "clock", "sums")
_LOOK = 1.0  # seconds between two looks at the clock and at whether to stop, of all workers together
_PART = 30.0  # seconds after which an iteration pauses


class Iteration:
    """The steps and sums of an iteration so far.

    Args:
      num_steps: T, steps of each env in the whole iteration.
      envs: B, of this worker.
      action: their action space.
      taken: gradient steps before it.

    Attributes:
      done: steps of each env so far; counted: those whose episodes are counted already, as some were cut off.
      rewards: float32 [T, B]; first: bool [T, B]; actions: [T, B, *shape]. All but `done` rows are zero.
      taken: as given.
      clock: seconds of each kind of work; sums: of the metrics of all gradient steps so far, by name.
      seconds: that it took so far, in all processes of the run.
    """

    def __init__(self, num_steps: int, envs: int, action: ActionSpec, taken: int) -> None:
        self.done, self.counted, self.taken, self.seconds = 0, 0, taken, 0.0
        self.rewards = np.zeros((num_steps, envs), np.float32)
        self.first = np.zeros((num_steps, envs), bool)
        self.actions = np.zeros((num_steps, envs, *action.shape), action.dtype)
        self.clock, self.sums = Counter(), Counter()

    def add(self, actions: np.ndarray, step: Step) -> None:
        """Takes actions [B, *shape] and what they led to."""
        t, self.done = self.done, self.done + 1
        self.actions[t], self.rewards[t], self.first[t] = actions, step.reward, step.first

    def get_state(self) -> dict[str, np.ndarray]:
        """The numbers that are the same on all workers."""
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        return {_STATE: pack_json(numbers)}

    def get_part(self) -> dict[str, np.ndarray]:
        """The steps of this worker's envs."""
        return {name: getattr(self, name)[: self.done] for name in _BY_ENV}

    def set_state(
        self, state: Mapping[str, np.ndarray], parts: Sequence[Mapping[str, np.ndarray]], envs: Sequence[int]
    ) -> None:
        """Continues from `get_state`, and `get_part` of all workers, with the `indices` of their envs.

        `envs` are the global indices of this worker's envs now.
        """
        numbers = unpack_json(state[_STATE])
        self.done, self.taken, self.seconds = (numbers[name] for name in ("done", "taken", "seconds"))
        self.counted = numbers.get("counted", 0)  # one of before has none
        self.clock, self.sums = Counter(numbers["clock"]), Counter(numbers["sums"])
        for name in _BY_ENV:
            getattr(self, name)[: self.done] = columns(parts, name, envs)


def is_in(state: Mapping[str, np.ndarray]) -> bool:
    """True if a checkpoint was made within an iteration."""
    return _STATE in state


def columns(parts: Sequence[Mapping[str, np.ndarray]], name: str, envs: Sequence[int]) -> np.ndarray:
    """The array [T, B, ...] of some global envs, of those that all workers saved with their `indices`."""
    saved = {int(i): (part, k) for part in parts for k, i in enumerate(part["indices"])}
    return np.stack([part[name][:, k] for part, k in (saved[i] for i in envs)], axis=1)


_ROUND = ("observations", "actions", "rewards", "first", "truncated")


def pack_round(rollout: Rollout) -> dict[str, np.ndarray]:
    """A round of one replica as arrays, [T, B, ...] or [T + 1, B, ...] each."""
    finals = sorted(rollout.final_observations.items())
    return {name: getattr(rollout, name)[0] for name in _ROUND} | {
        "final_at": np.array([place for place, _ in finals], np.int64).reshape(-1, 3),
        "finals": np.array([final for _, final in finals], rollout.observations.dtype),
        "times": np.array([rollout.seconds, rollout.idle_seconds, rollout.version]),
    }


def join_rounds(parts: Sequence[Mapping[str, np.ndarray]], envs: Sequence[int]) -> Rollout:
    """The round of some global envs, of those that all workers packed, with the `indices` of their envs."""
    arrays = {name: columns(parts, name, envs)[None] for name in _ROUND}
    finals = {}
    for part in parts:
        for (_, t, b), final in zip(part["final_at"].tolist(), part["finals"], strict=True):
            if part["indices"][b] in envs:
                finals[0, t, list(envs).index(part["indices"][b])] = final
    seconds, idle, version = parts[0]["times"].tolist()
    times = {"seconds": seconds, "idle_seconds": idle, "version": version}
    return Rollout(**arrays, extras={}, final_observations=finals, **times)


class Pauses:
    """Tells after which turns of collecting and learning all workers pause, so that the run may be saved.

    They look at clocks and stop requests together, at turns that follow from what they saw together before:
    about once a second, because a look is a collective. A part of an iteration is as long as it happens to
    be: what is learned does not depend on it.

    Args:
      runtime: this worker's place among others.
      stop: this worker's.
    """

    def __init__(self, runtime: Runtime, stop: StopRequest) -> None:
        self._runtime, self._stop = runtime, stop
        self._began = self._looked = time.perf_counter()
        self.forget_pace()

    def forget_pace(self) -> None:
        """Looks after the next turn: those to come may take far longer. Call it on all workers."""
        self._stride = self._left = 1

    def begin(self) -> None:
        """Notes that a part begins."""
        self._began = self._looked = time.perf_counter()

    def after_turn(self) -> bool:
        """True if it is time to pause, or a worker was told to stop; the same on all workers."""
        self._left -= 1
        if self._left:
            return False
        now = time.perf_counter()
        mine = np.array([now - self._looked, now - self._began, *self._stop.votes()], np.float64)
        found = self._runtime.sum_over_workers(mine)
        since, part = found[:2] / self._runtime.num_workers
        # At the most twice as far as before: a turn may take longer than those that were measured.
        fits = int(self._stride * _LOOK / max(since, 1e-6))
        self._stride = self._left = max(1, min(fits, 2 * self._stride))
        self._looked = now
        return part > _PART or stop_code(found[2:]) is not None
