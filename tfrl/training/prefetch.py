"""Rollouts that are made while the learner learns, a number of updates ahead of it.

In lockstep the rollout of update u is acted by the weights of update u - lag, whoever steps the envs and
however fast. So a run is the same on any number of actors; one that dies plays its part again, and so does a
run that goes on from a checkpoint: that has the envs as they stood before the first rollout that is not yet
learned from, and the older weights that the next rollouts are acted by. Running free, a rollout is acted by
the newest weights that there are as it begins; since it is begun no earlier, they are not older either.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from tfrl import remote
from tfrl.algorithms import acting
from tfrl.config.actors import DistributedSettings
from tfrl.config.run import RLSettings
from tfrl.envs.spec import ActionSpec, ArraySpec
from tfrl.experience.collector import Collected, Collector, EnvActor, EnvStates, Versioned
from tfrl.experience.rollout import Rollout
from tfrl.run.session import Session
from tfrl.training.callbacks import WAITS
from tfrl.training.learner import env_spec
from tfrl.workers.strategy import Runtime
from tfrl.workers.watchdog import Watchdog

_ACTED = "acting/"  # in a checkpoint: the older weights, as acting/UPDATE/NAME
_POLL_SECONDS = 0.2  # seconds between two looks at an actor that is waited for

COLUMNS = (*WAITS, "train/lag")
"""The names in `Prefetch.metrics`, in the order of progress.csv."""


class PrefetchCollector(Protocol):
    """This worker's envs, which make the rollouts that were begun one after another.

    Attributes:
      indices: the global indices of the envs.
      observation_spec, action_spec: of the envs.
      began: where these stood as the rollout that was last taken began: where the one before it ended, but
        for those of a process that was replaced and cannot go on exactly.
    """

    indices: list[int]
    observation_spec: ArraySpec
    action_spec: ActionSpec
    began: EnvStates

    @property
    def exact_state(self) -> bool:
        """True if `set_state` continues exactly; after a call of it, true if that call did."""

    def offer(self, weights: Versioned) -> None:
        """Takes the newest weights, for rollouts that are begun without any."""

    def begin(self, number: int, weights: Versioned | None) -> None:
        """Begins rollout `number`, once the one before it is done, and returns at once.

        It is acted by `weights`, or without them by the newest ones as it begins.
        """

    def take(self) -> Rollout:
        """Waits for the oldest rollout that was begun; its buffers stay until the next call at least."""

    def get_state(self) -> EnvStates:
        """The envs' state after the last rollout that was taken."""

    def set_state(self, states: Mapping[int, bytes]) -> None:
        """Continues from states by global env index. Call it before the first `begin`."""

    def close(self) -> None:
        """Stops what runs, without waiting for the end of a rollout."""


class ThreadCollector:
    """Steps the envs in a thread of this process; follows `PrefetchCollector`.

    Args:
      config: the settings.
      collector: the envs.
      runtime: whose envs these are.
      watchdog: hears of the envs' steps while they are waited for.
    """

    def __init__(
        self, config: RLSettings, collector: Collector, runtime: Runtime, watchdog: Watchdog
    ) -> None:
        self.indices, self.exact_state = collector.indices, collector.exact_state
        self.observation_spec, self.action_spec = collector.observation_spec, collector.action_spec
        at_once = runtime.parts_at_once * runtime.local_replicas
        self._actor = EnvActor(collector, acting.of_settings(config, runtime.precision, at_once=at_once))
        self._watchdog = watchdog
        self.began = self._after = self._actor.get_state()
        self._newest = Versioned(0, {})  # until the first offer
        self._steps = 0
        self._closed = False
        self._begun: queue.SimpleQueue[tuple[int, Versioned | None] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Collected | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="actor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (order := self._begun.get()) is not None:
            number, weights = order
            try:
                self._done.put(self._actor.collect(number, weights or self._newest, self._on_step))
            except BaseException as error:  # for the thread that waits for it
                self._done.put(error)
                return

    def _on_step(self, t: int) -> None:
        self._steps += 1
        if self._closed:
            raise _ClosedError

    def offer(self, weights: Versioned) -> None:
        """Takes the newest weights, for rollouts that are begun without any."""
        self._newest = weights

    def begin(self, number: int, weights: Versioned | None) -> None:
        """Begins rollout `number`, acted by `weights` or the newest, once the one before it is done."""
        self._begun.put((number, weights))

    def take(self) -> Rollout:
        """Waits for the oldest rollout that was begun."""
        seen = self._steps
        while True:
            try:
                collected = self._done.get(timeout=_POLL_SECONDS)
                break
            except queue.Empty:
                if self._steps != seen:  # an env that hangs is to be found
                    seen = self._steps
                    self._watchdog.beat()
        if isinstance(collected, BaseException):
            raise collected
        self.began, self._after = self._after, collected.after
        return collected.rollout

    def get_state(self) -> EnvStates:
        """The envs' state after the last rollout that was taken."""
        return self._after

    def set_state(self, states: Mapping[int, bytes]) -> None:
        """Continues from states by global env index."""
        self._actor.set_state(states)
        self._after = self._actor.get_state()
        self.exact_state = self._actor.exact_state

    def close(self) -> None:
        """Stops the thread at the end of a step, and the envs."""
        self._closed = True
        self._begun.put(None)
        self._thread.join()
        self._actor.close()


class _ClosedError(Exception):
    """The rollout is not wanted any more."""


def make_prefetch_collector(
    config: DistributedSettings, session: Session, *, replicas: int, make: Callable[[], Collector]
) -> PrefetchCollector:
    """This worker's envs, in a thread or, as the settings say, on Ray.

    Args:
      config: the settings, with the sections Ahead and Actors.
      session: this process's part of the run.
      replicas: among which a rollout's envs are shared out.
      make: gives the `Collector` of a thread.
    """
    if not config.actors:
        return ThreadCollector(config, make(), session.runtime, session.watchdog)
    if config.ray_address is not None:
        remote.reach_other_machines()
    from tfrl.remote.actors import RayCollector  # which imports Ray, and may not be there

    runtime, watchdog = session.runtime, session.watchdog
    return RayCollector(
        config,
        env_spec(config),
        indices=runtime.local_envs(config.num_envs),
        replicas=replicas,
        precision=runtime.precision,
        raise_if_stopped=session.raise_if_stopped_here,
        together=session.together,
        tell=session.console.warn,
        beat=watchdog.beat,
    )


class Prefetch:
    """The order of rollouts and of the weights that act them, and what of it a checkpoint needs.

    Args:
      config: the settings, with the section Ahead.
      collector: the envs.

    Attributes:
      waited: seconds that the learner waited for the last rollout.
    """

    def __init__(self, config: DistributedSettings, collector: PrefetchCollector) -> None:
        self._lag, self._free, self._updates = config.lag or 0, config.free_running, config.num_updates
        self._collector = collector
        self._weights: dict[int, dict[str, np.ndarray]] = {}  # by the number of updates behind them
        self._next: int | None = None  # the rollout that is begun next
        self.waited = 0.0

    def take(self, update: int, weights: dict[str, np.ndarray]) -> Rollout:
        """The rollout of an update, once it is there; those after it go on by the weights of now."""
        self.begin_rollouts(update, weights)
        began = time.perf_counter()
        rollout = self._collector.take()
        self.waited = time.perf_counter() - began
        # Rollouts that are begun are begun again where the run goes on from its checkpoint.
        oldest = max(0, update + 1 - self._lag)
        self._weights = {number: w for number, w in self._weights.items() if number >= oldest}
        return rollout

    def begin_rollouts(self, update: int, weights: dict[str, np.ndarray]) -> None:
        """Begins the rollouts whose weights are there, up to that of update + lag or of the last update."""
        if self._free:
            self._collector.offer(Versioned(update, weights))
        else:
            self._weights[update] = weights
        if self._next is None:
            self._next = update
        while self._next <= min(update + self._lag, self._updates - 1):
            version = max(0, self._next - self._lag)
            acted_by = None if self._free else Versioned(version, self._weights[version])
            self._collector.begin(self._next, acted_by)
            self._next += 1

    def metrics(self, update: int, rollout: Rollout, seconds: float) -> dict[str, float]:
        """Shares of an update of `seconds` that learner and actors waited; the lag."""
        idle = rollout.idle_seconds / (rollout.idle_seconds + rollout.seconds)
        return dict(zip(COLUMNS, (self.waited / seconds, idle, update - rollout.version), strict=True))

    def get_state(self, update: int, *, within: bool = False) -> dict[str, np.ndarray]:
        """The older weights, as of after so many updates, or `within` the next, when it has its rollout."""
        return {
            f"{_ACTED}{number}/{name}": array
            for number, weights in self._weights.items()
            if within or number != update  # the agent's own, of an update that was broken off
            for name, array in weights.items()
        }

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from what `get_state` gave, among other arrays."""
        self._weights, self._next = {}, None
        for key, array in state.items():
            if key.startswith(_ACTED):
                number, _, name = key.removeprefix(_ACTED).partition("/")
                self._weights.setdefault(int(number), {})[name] = array
