"""Algorithms whose envs are stepped while they learn: actors run a fixed number of updates ahead.

The rollout of update u is acted by the weights of update u - lag, whoever steps the envs and however fast. So
a run is the same on any number of actors; one that dies plays its part again, and so does a run that goes on
from a checkpoint: that has the envs as they stood before the first rollout that is not yet learned from, and
the older weights that the next rollouts are acted by.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tfrl.agents.behavior import ActorCriticBehavior
from tfrl.envs.spec import ActionSpec, ArraySpec
from tfrl.experience.actor import Collected, EnvActor, EnvStates
from tfrl.experience.rollout import Rollout
from tfrl.run.pieces import Piece
from tfrl.run.session import Session
from tfrl.training.on_policy import MakeAgent, OnPolicyLearner, env_spec, make_collector
from tfrl.workers.strategy import Runtime
from tfrl.workers.watchdog import Watchdog

_ACTED = "acting/"  # in a checkpoint: the older weights, as acting/UPDATE/NAME
_LOOK_EVERY = 0.2  # seconds between two looks at an actor that is waited for

Weights = Mapping[str, np.ndarray]


class AheadCollector(Protocol):
    """This worker's envs, which make the rollouts that were begun one after another.

    Attributes:
      indices: the global indices of the envs.
      observation_spec, action_spec, exact_state: of the envs.
    """

    indices: list[int]
    observation_spec: ArraySpec
    action_spec: ActionSpec
    exact_state: bool

    def begin(self, number: int, weights: Weights) -> None:
        """Begins rollout `number`, acted by `weights`, once the one before it is done. Returns at once."""

    def take(self) -> Rollout:
        """Waits for the oldest rollout that was begun; its buffers stay until `rollouts_held` later ones."""

    def get_state(self) -> EnvStates:
        """The envs' state after the last rollout that was taken."""

    def set_state(self, states: Mapping[int, bytes]) -> None:
        """Continues from states by global env index. Call it before the first `begin`."""

    def close(self) -> None:
        """Stops what runs, without waiting for the end of a rollout."""


class ThreadCollector:
    """Steps the envs in a thread of this process; follows `AheadCollector`.

    Args:
      config: the settings.
      runtime: whose envs these are.
      watchdog: hears of the envs' steps while they are waited for.
    """

    def __init__(self, config: Any, runtime: Runtime, watchdog: Watchdog) -> None:
        collector = make_collector(config, runtime)
        self.indices, self.exact_state = collector.indices, collector.exact_state
        self.observation_spec, self.action_spec = collector.observation_spec, collector.action_spec
        at_once = runtime.parts_at_once * runtime.local_replicas
        policy = ActorCriticBehavior(config, runtime.precision, at_once=at_once)
        self._actor = EnvActor(collector, policy, seed=config.seed, num_steps=config.num_steps)
        self._watchdog = watchdog
        self._after = self._actor.get_state()
        self._steps = 0
        self._closed = False
        self._begun: queue.SimpleQueue[tuple[int, Weights] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Collected | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="actor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (order := self._begun.get()) is not None:
            try:
                self._done.put(self._actor.collect(*order, self._on_step))
            except BaseException as error:  # for the thread that waits for it
                self._done.put(error)
                return

    def _on_step(self, t: int) -> None:
        self._steps += 1
        if self._closed:
            raise _ClosedError

    def begin(self, number: int, weights: Weights) -> None:
        """Begins rollout `number`, acted by `weights`, once the one before it is done."""
        self._begun.put((number, weights))

    def take(self) -> Rollout:
        """Waits for the oldest rollout that was begun."""
        seen = self._steps
        while True:
            try:
                collected = self._done.get(timeout=_LOOK_EVERY)
                break
            except queue.Empty:
                if self._steps != seen:  # an env that hangs is to be found
                    seen = self._steps
                    self._watchdog.beat()
        if isinstance(collected, BaseException):
            raise collected
        self._after = collected.after
        return collected.rollout

    def get_state(self) -> EnvStates:
        """The envs' state after the last rollout that was taken."""
        return self._after

    def set_state(self, states: Mapping[int, bytes]) -> None:
        """Continues from states by global env index."""
        self._actor.set_state(states)
        self._after = self._actor.get_state()

    def close(self) -> None:
        """Stops the thread at the end of a step, and the envs."""
        self._closed = True
        self._begun.put(None)
        self._thread.join()
        self._actor.close()


class _ClosedError(Exception):
    """The rollout is not wanted any more."""


class ActorLearner(OnPolicyLearner):
    """Learns from rollouts that are `lag` updates behind; follows `tfrl.training.trainer.Learner`.

    Args:
      config: the settings, which have `lag`, `rollouts_held` and the section Actors.
      session: this process's part of the run.
      make_agent: makes the agent from the settings and the runtime.
    """

    columns = (
        *OnPolicyLearner.columns,
        *("time/learner_wait_fraction", "time/actor_wait_fraction", "train/lag"),
    )
    collector: AheadCollector

    def __init__(self, config: Any, session: Session, make_agent: MakeAgent) -> None:
        super().__init__(config, session, make_agent)
        self._weights: dict[int, Weights] = {}  # by the number of updates behind them
        self._next: int | None = None  # the rollout that is begun next
        self._waited = 0.0

    def _make_collector(self) -> AheadCollector:
        config, session, runtime = self._config, self._session, self._runtime
        if not config.actors:
            return ThreadCollector(config, runtime, session.watchdog)
        from tfrl.remote.actors import RayCollector  # which imports Ray, and may not be there

        sizes = {"replicas": runtime.local_replicas, "precision": runtime.precision}
        hooks = {"obey": session.obey, "tell": session.console.warn}
        return RayCollector(config, env_spec(config), **sizes, **hooks)

    def collect(self) -> Rollout:
        """The rollout of this update, with normalised rewards; the actors go on by the weights of now."""
        session = self._session
        session.phase("collecting")
        self._let_go_on(session.step)
        began = time.perf_counter()
        rollout = self.collector.take()
        self._waited = time.perf_counter() - began
        self._forget_weights(session.step + 1)
        self._take_in_rewards(rollout)
        return rollout

    def _let_go_on(self, update: int) -> None:
        """Begins the rollouts whose weights are there, up to that of update + lag or of the last update."""
        lag = self._config.lag
        self._weights[update] = self.agent.get_weights()
        if self._next is None:
            self._next = update
        while self._next <= min(update + lag, self._config.num_updates - 1):
            self.collector.begin(self._next, self._weights[max(0, self._next - lag)])
            self._next += 1

    def _forget_weights(self, update: int) -> None:
        """Keeps the weights that the rollouts from `update` on are acted by.

        Those that are begun are begun again where the run goes on from its checkpoint.
        """
        oldest = max(0, update - self._config.lag)
        self._weights = {number: w for number, w in self._weights.items() if number >= oldest}

    def _shares(self, rollout: Rollout, seconds: float) -> dict[str, float]:
        """How learner and actors, side by side, spent an update that took the learner `seconds`."""
        update = self._session.step
        return {
            "time/update_seconds": seconds - self._waited,
            "time/learner_wait_fraction": self._waited / seconds,
            "time/actor_wait_fraction": rollout.idle_seconds / (rollout.idle_seconds + rollout.seconds),
            "train/lag": float(min(update, self._config.lag)),
        }

    # State

    def get_state(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The arrays that are the same on all workers, older weights among them, and this worker's envs."""
        state, part = super().get_state()
        for number, weights in self._weights.items():
            if number == self._session.step:  # the agent's own, of an update that was broken off
                continue
            state |= {f"{_ACTED}{number}/{name}": array for name, array in weights.items()}
        return state, part

    def set_state(
        self,
        state: Mapping[str, np.ndarray],
        parts: Sequence[Mapping[str, np.ndarray]],
        pieces: Sequence[Piece] = (),
    ) -> None:
        """Continues from what `get_state` gave. Raises UserError as `OnPolicyLearner`'s does."""
        super().set_state(state, parts, pieces)
        self._weights, self._next = {}, None
        for key, array in state.items():
            if key.startswith(_ACTED):
                number, _, name = key.removeprefix(_ACTED).partition("/")
                self._weights.setdefault(int(number), {})[name] = array
