"""The envs of algorithms with replay: stepped between gradient steps, or a round ahead of them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tfrl.algorithms.replay import ReplayAgent
from tfrl.envs import registry
from tfrl.envs.spec import Step
from tfrl.experience import exploration
from tfrl.experience.collector import Collector, EnvStates
from tfrl.experience.replay import Replay
from tfrl.experience.rollout import Rollout
from tfrl.run import rng
from tfrl.run.session import Session
from tfrl.training.ahead import COLUMNS, Ahead, make_ahead_collector
from tfrl.training.iteration import join_rounds, pack_round
from tfrl.training.learner import env_spec


class Playing(Protocol):
    """This worker's slice of the global envs, as a learner with replay has it; also an `env_states.Envs`.

    Attributes:
      indices: the global indices of the envs.
      exact_state: whether a state that is put back goes on exactly.
      columns: the names of `metrics`.
    """

    indices: list[int]
    exact_state: bool
    columns: tuple[str, ...]

    def steps(
        self, iteration: int, agent: ReplayAgent, replay: Replay, *, begin: int = 0
    ) -> Iterator[tuple[np.ndarray, Step]]:
        """Actions [B, *shape] and what they led to, of one step after the other of an iteration.

        The replay is first shown where the envs stand; what follows is for the caller to put there. `begin`
        is not 0 where the run goes on within an iteration, after so many steps of it.
        """

    def metrics(self, iteration: int, seconds: float) -> dict[str, float]:
        """Shares of an iteration of `seconds`."""

    def get_state(self) -> EnvStates:
        """The envs' state after the last iteration."""

    def set_state(self, states: dict[int, bytes]) -> None:
        """Continues from states by global env index."""

    def get_rest(self) -> dict[str, np.ndarray]:
        """The steps that were played of the present iteration, if not all are given yet; this worker's."""

    def set_rest(self, parts: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Continues from what `get_rest` gave on all workers, with the `indices` of their envs."""

    def get_weights(self, iteration: int, *, within: bool) -> dict[str, np.ndarray]:
        """The older weights that steps to come are acted by, after so many iterations or within one."""

    def set_weights(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from what `get_weights` gave, among other arrays."""

    def close(self) -> None:
        """Stops the envs."""


class PlayedInTurn:
    """Envs that the agent acts in by its weights of now; follows `Playing`."""

    columns: tuple[str, ...] = ()

    def __init__(self, config: Any, session: Session) -> None:
        self._config = config
        self.indices = list(session.runtime.local_envs(config.num_envs))
        self._env = registry.make(env_spec(config), self.indices)
        self._correlated = exploration.correlated_noise(config, len(self.indices))

    def steps(
        self, iteration: int, agent: ReplayAgent, replay: Replay, *, begin: int = 0
    ) -> Iterator[tuple[np.ndarray, Step]]:
        """Actions and what they led to: each is chosen as it is asked for."""
        config = self._config
        sizes = (iteration, self.indices, config.steps_per_env)
        noise = rng.action_noise(config.seed, *sizes, agent.draw_noise)
        random = exploration.first_actions(config, iteration, self.indices)
        step = self._env.observe()
        replay.show(step)
        for t in range(begin, config.steps_per_env):
            if self._correlated is not None:
                noise[t] = self._correlated.next(noise[t], step.first)
            if exploration.is_random(config, iteration, t):
                actions = random[t]
            else:
                env_steps = exploration.env_steps(config, iteration, t)
                actions = agent.act(step.observation, noise[t], env_steps)
            self._env.act(actions)
            step = self._env.observe()
            yield actions, step

    def metrics(self, iteration: int, seconds: float) -> dict[str, float]:
        """None."""
        return {}

    @property
    def exact_state(self) -> bool:
        """True where a state that is put back goes on exactly."""
        return self._env.exact_state

    def get_state(self) -> EnvStates:
        """The envs' present state."""
        step = self._env.observe()
        states = self._env.get_state()
        if self._correlated is not None:
            states = self._correlated.add_to(states)
        return EnvStates(self.indices, states, step.observation, step.first)

    def set_state(self, states: dict[int, bytes]) -> None:
        """Continues from states by global env index."""
        mine = [states[i] for i in self.indices]
        self._env.set_state(mine if self._correlated is None else self._correlated.take_from(mine))

    def get_rest(self) -> dict[str, np.ndarray]:
        """Nothing: each step is given as it is played."""
        return {}

    def set_rest(self, parts: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Does nothing."""

    def get_weights(self, iteration: int, *, within: bool) -> dict[str, np.ndarray]:
        """None: the agent acts by its own."""
        return {}

    def set_weights(self, state: Mapping[str, np.ndarray]) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Stops the envs."""
        self._env.close()


class PlayedAhead:
    """Envs whose rounds are acted by older weights, in a thread or on Ray; follows `Playing`."""

    columns = COLUMNS

    def __init__(self, config: Any, session: Session) -> None:
        indices = session.runtime.local_envs(config.num_envs)
        sizes = {"replicas": 1, "num_steps": config.steps_per_env, "rollouts": config.rollouts_held}
        sizes["correlated"] = functools.partial(exploration.correlated_noise, config)
        self._collector = make_ahead_collector(
            config, session, replicas=1, make=lambda: Collector(env_spec(config), indices, **sizes)
        )
        self.indices = self._collector.indices
        self._ahead = Ahead(config, self._collector)
        self._rollout: Rollout | None = None

    def steps(
        self, iteration: int, agent: ReplayAgent, replay: Replay, *, begin: int = 0
    ) -> Iterator[tuple[np.ndarray, Step]]:
        """Actions and what they led to, once the round is there; later ones go on by the weights of now."""
        if begin:
            rollout = self._rollout
            replay.stand_at(rollout.observations[0, begin], rollout.first[0, begin - 1])
        else:
            self._rollout = self._ahead.take(iteration, agent.get_weights())
            at = self._collector.began
            order = [at.indices.index(i) for i in self.indices]
            replay.go_on_at(at.observations[order], at.first[order])
        yield from itertools.islice(self._rollout.steps(), begin, None)

    def metrics(self, iteration: int, seconds: float) -> dict[str, float]:
        """Shares of an iteration of `seconds` that learner and actors waited; the lag."""
        return self._ahead.metrics(iteration, self._rollout, seconds)

    @property
    def exact_state(self) -> bool:
        """True where a state that is put back goes on exactly."""
        return self._collector.exact_state

    def get_state(self) -> EnvStates:
        """The envs' state after the last round that was taken."""
        return self._collector.get_state()

    def set_state(self, states: dict[int, bytes]) -> None:
        """Continues from states by global env index."""
        self._collector.set_state(states)

    def get_rest(self) -> dict[str, np.ndarray]:
        """The round: the envs stand after it already."""
        return pack_round(self._rollout)

    def set_rest(self, parts: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Continues from what `get_rest` gave on all workers, with the `indices` of their envs."""
        self._rollout = join_rounds(parts, self.indices)

    def get_weights(self, iteration: int, *, within: bool) -> dict[str, np.ndarray]:
        """The older weights that rounds to come are acted by, after so many iterations or within one."""
        return self._ahead.get_state(iteration, within=within)

    def set_weights(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from what `get_weights` gave, among other arrays."""
        self._ahead.set_state(state)

    def close(self) -> None:
        """Stops the envs."""
        self._collector.close()
