"""Rollouts that are collected while the learner learns, some updates ahead of it.

In lockstep, the weights of update u - lag collect the rollout of update u, for any number and speed of
actors. So the run does not depend on the actors. A replaced actor repeats its part of the rollout. A
checkpoint has the states of the envs before the first rollout that is not yet learned from, and the older
weights for the next rollouts, so a resumed run repeats these rollouts. With --free-running, each rollout is
collected with the weights that are the newest at its start; they are at most `lag` updates old.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import numpy as np

from tfrl.algorithms.policies import RolloutActor
from tfrl.config.distributed import DistributedSettings
from tfrl.config.run import RLSettings
from tfrl.experience.collector import Collected, Collector, EnvStates, Versioned
from tfrl.experience.rollout import Rollout
from tfrl.run.session import Session
from tfrl.training.callbacks import WAITS

if TYPE_CHECKING:
    from tfrl.remote.actors import RayCollector

_ACTED = "acting/"  # in a checkpoint: the older weights, as acting/UPDATE/NAME
_LEVELS = "levels"  # beside them: the probabilities of the levels; names of weights have a slash
_POLL_SECONDS = 0.2  # seconds between two checks of an actor that the learner waits for


class ThreadCollector:
    """This worker's envs, which a thread of this process steps. It collects the requested rollouts in order.

    `set_state` is called before the first `begin`, and `close` does not wait for the end of a rollout.

    Args:
      config: the settings.
      collector: the envs.
      session: that of this learner. Its watchdog gets a sign of life for each env step while it waits.

    Attributes:
      indices: the global indices of the envs.
      began: the states of the envs at the start of the last taken rollout. They equal those at the end of the
        rollout before it, except for envs without exact state in a replaced process of a `RayCollector`.
    """

    def __init__(self, config: RLSettings, collector: Collector, session: Session) -> None:
        self.indices, self.exact_state = collector.indices, collector.exact_state
        runtime = session.runtime
        at_once = runtime.parts_at_once * runtime.local_replicas
        self._actor = RolloutActor(config, collector, runtime.precision, at_once=at_once)
        self._watchdog = session.watchdog
        self.began = self._after = collector.get_state()
        self._newest = Versioned(0, {})  # until the first offer
        self._steps = 0
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="actor")
        self._begun: deque[Future[Collected]] = deque()

    def _collect(self, number: int, weights: Versioned | None) -> Collected:
        return self._actor.collect(number, weights or self._newest, self._on_step)

    def _on_step(self, t: int) -> None:
        self._steps += 1
        if self._closed:
            raise CancelledError

    def offer(self, weights: Versioned) -> None:
        """Takes the newest weights, for rollouts that are begun without any."""
        self._newest = weights

    def begin(self, number: int, weights: Versioned | None) -> None:
        """Requests rollout `number`, and returns at once. It begins at the end of the previous rollout.

        It is collected with `weights`; None: with the newest weights at its start.
        """
        self._begun.append(self._thread.submit(self._collect, number, weights))

    def take(self) -> Rollout:
        """Waits for the oldest requested rollout. Its buffers are valid until the next call."""
        seen, oldest = self._steps, self._begun.popleft()
        while wait([oldest], _POLL_SECONDS).not_done:
            if self._steps != seen:  # so that the watchdog finds an env that hangs
                seen = self._steps
                self._watchdog.beat()
        collected = oldest.result()
        self.began, self._after = self._after, collected.after
        return collected.rollout

    def get_state(self) -> EnvStates:
        """The envs' state after the last rollout that was taken."""
        return self._after

    def set_state(self, states: Mapping[int, bytes]) -> None:
        """Continues from states by global env index."""
        envs = self._actor.collector
        envs.set_state(states)
        self._after, self.exact_state = envs.get_state(), envs.exact_state

    def close(self) -> None:
        """Stops the thread at the end of a step, and the envs."""
        self._closed = True
        self._thread.shutdown(cancel_futures=True)
        self._actor.collector.close()


class Prefetch:
    """Decides which weights collect which rollout, and keeps what a checkpoint needs for it.

    Args:
      config: the settings, with the section Lag.
      collector: the envs.

    Attributes:
      columns: the names in `metrics`, in the order of progress.csv.
      collector: the envs.
      waited: the seconds for which the learner waited for the last rollout.
    """

    columns = (*WAITS, "train/lag")

    def __init__(self, config: DistributedSettings, collector: ThreadCollector | RayCollector) -> None:
        self._lag, self._free, self._updates = config.lag or 0, config.free_running, config.num_updates
        self.collector = collector
        self._weights: dict[int, Versioned] = {}  # by the number of updates that made them
        self._next: int | None = None  # the next rollout to request
        self.waited = 0.0

    def take(
        self, update: int, weights: dict[str, np.ndarray], probabilities: np.ndarray | None = None
    ) -> Rollout:
        """Waits for the rollout of an update, and requests later rollouts with the present weights.

        `probabilities` are those of the levels, with level replay.
        """
        self.begin_rollouts(update, weights, probabilities)
        began = time.perf_counter()
        rollout = self.collector.take()
        self.waited = time.perf_counter() - began
        # A resumed run requests these rollouts again.
        oldest = max(0, update + 1 - self._lag)
        self._weights = {number: w for number, w in self._weights.items() if number >= oldest}
        return rollout

    def begin_rollouts(
        self, update: int, weights: dict[str, np.ndarray], probabilities: np.ndarray | None = None
    ) -> None:
        """Requests the rollouts whose weights exist, up to that of update + lag or of the last update."""
        newest = Versioned(update, weights, probabilities)
        if self._free:
            self.collector.offer(newest)
        else:
            self._weights[update] = newest
        if self._next is None:
            self._next = update
        while self._next <= min(update + self._lag, self._updates - 1):
            version = max(0, self._next - self._lag)
            acted_by = None if self._free else self._weights[version]
            self.collector.begin(self._next, acted_by)
            self._next += 1

    def metrics(self, update: int, rollout: Rollout, seconds: float) -> dict[str, float]:
        """The shares of an update of `seconds` for which learner and actors waited, and the lag."""
        idle = rollout.idle_seconds / (rollout.idle_seconds + rollout.seconds)
        return dict(zip(self.columns, (self.waited / seconds, idle, update - rollout.version), strict=True))

    def get_state(self, update: int, *, within: bool = False) -> dict[str, np.ndarray]:
        """The older weights and probabilities of levels that a run needs after `update` updates.

        `within`: within the update after those.
        """
        found: dict[str, np.ndarray] = {}
        for number, acted in self._weights.items():
            if within or number != update:  # those are the weights of the agent between two updates
                found |= {f"{_ACTED}{number}/{name}": array for name, array in acted.weights.items()}
                if acted.probabilities is not None:
                    found[f"{_ACTED}{number}/{_LEVELS}"] = acted.probabilities
        return found

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Restores the result of `get_state`, and ignores other arrays."""
        self._weights, self._next = {}, None
        for key, array in state.items():
            if key.startswith(_ACTED):
                number, _, name = key.removeprefix(_ACTED).partition("/")
                acted = self._weights.get(int(number), Versioned(int(number), {}))
                if name == _LEVELS:
                    acted = acted._replace(probabilities=array)
                else:
                    acted = acted._replace(weights={**acted.weights, name: array})
                self._weights[int(number)] = acted
