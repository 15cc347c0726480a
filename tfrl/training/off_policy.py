"""Algorithms that learn from replay: act and learn in turn, by the count of env steps alone."""

from __future__ import annotations

import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfrl.algorithms.replay import PendingUpdate, ReplayAgent, ReplaySettings
from tfrl.envs import registry
from tfrl.envs.spec import ActionSpec, Step, VecEnv
from tfrl.experience import exploration
from tfrl.experience.collector import Collector, EnvStates
from tfrl.experience.replay import Batch, ReplayBuffer
from tfrl.experience.rollout import Rollout
from tfrl.run import rng
from tfrl.run.checkpoint import CheckpointShard, pack_json, unpack_json
from tfrl.run.loop import Update
from tfrl.run.session import Session
from tfrl.run.stop import StopRequest, stop_code
from tfrl.training.learner import (
    EnvLearner,
    MakeAgent,
    env_spec,
    pack_envs,
    shown_envs,
    under,
    with_prefix,
)
from tfrl.training.prefetch import COLUMNS, Prefetch, PrefetchCollector, make_prefetch_collector
from tfrl.workers.strategy import Runtime

_COLUMNS = (
    *("replay/size", "time/env_steps_per_second", "time/updates_per_second", "time/rollout_seconds"),
    *("time/update_seconds", "time/replay_seconds"),
)


TakeStep = Callable[[], Step]
"""Takes a step of the envs, by actions that were chosen; what they led to."""
_ITERATION, _REST = "iteration/", "rest/"  # prefixes in a worker's part of a checkpoint


class OffPolicyLearner(EnvLearner):
    """One worker's share of the envs and of the replay.

    An update is an iteration of --iteration-steps env steps, in which actions and gradient steps take turns.
    It may pause between two turns, to be saved or stopped, and goes on from there, bit for bit.

    Args:
      config: the settings, with the section `tfrl.algorithms.replay.Replay`.
      session: this process's part of the run; `session.step` is the number of finished iterations.
      make_agent: makes the agent from the settings and the runtime.
    """

    _config: ReplaySettings
    agent: ReplayAgent

    def __init__(self, config: ReplaySettings, session: Session, make_agent: MakeAgent) -> None:
        super().__init__(config, session, make_agent)
        self.envs: EnvSource = (PrefetchedEnvs if config.is_ahead else SyncEnvs)(config, session)
        self.time_columns = (*_COLUMNS, *self.envs.columns)
        observation, action = registry.specs(config)
        self.replay = ReplayBuffer(
            self.envs.indices,
            config.replay_size // config.num_envs,
            observation=observation,
            action=action,
            gamma=config.gamma,
            n_step=config.n_step,
            priority_exponent=config.priority_exponent if config.prioritized_replay else None,
            learned_rewards=config.learned_rewards,
        )
        self._taken = 0  # gradient steps
        self._has_learned = False  # in this process
        self._iteration: Iteration | None = None  # that is under way
        self._steps: Iterator[tuple[np.ndarray, TakeStep]] | None = None  # of it, once this process has begun
        self._drawn: _Drawn | None = None  # ahead of the gradient steps that are under way
        self._pending: tuple[np.ndarray, PendingUpdate] | None = None  # rows of gradient steps under way
        self._cut_at_end: np.ndarray | None = None  # envs whose episodes end with the iteration, bool [N]
        self._pauses = Pauses(session.runtime, session.stop)

    def update(self) -> Update | None:
        """Takes an iteration's env steps and the gradient steps due; None where it pauses. A collective."""
        config, session, began = self._config, self._session, time.perf_counter()
        if self._iteration is None:
            self._iteration = self._new_iteration()
        iteration, before = self._iteration, self._iteration.done
        is_done = self._go_on(iteration)
        seconds = time.perf_counter() - began
        iteration.seconds, session.seconds = iteration.seconds + seconds, session.seconds + seconds
        if not is_done:
            speed = (iteration.done - before) * config.num_envs / seconds
            session.console.part(self._steps_so_far(), {"time/env_steps_per_second": speed})
            return None
        return self._conclude(iteration)

    def _new_iteration(self) -> Iteration:
        action = registry.specs(self._config)[1]
        return Iteration(self._config.steps_per_env, len(self.envs.indices), action, self._taken)

    @property
    def steps_within(self) -> int:
        """Env steps of the iteration that is under way, all workers together; 0 between two of them."""
        return 0 if self._iteration is None else self._iteration.done * self._config.num_envs

    def _steps_so_far(self) -> int:
        """Env steps, all workers together."""
        return self._session.step * self._config.iteration_steps + self.steps_within

    def _go_on(self, iteration: Iteration) -> bool:
        """Acts and learns in turns to the iteration's end, or until it is to pause: then False.

        A turn chooses the actions, takes the env step and stores it. Every --train-every env steps, it also
        starts the gradient steps that are due before the env step, and waits for them after it. So they learn
        from what the replay had before the env step, which does not wait for them.
        """
        config, session, replay = self._config, self._session, self.replay
        session.phase("training")
        self._pauses.begin()
        self._drawn = None  # a new round may change the last row, and a resumed run has nothing drawn either
        if self._steps is None:
            self._steps = self.envs.steps(session.step, self.agent, replay, begin=iteration.done)
        with self.agent.learning_in_background():
            for actions, take in self._steps:
                env_steps = self._steps_so_far() + config.num_envs  # after this one
                learns = env_steps % config.train_every < config.num_envs
                if learns:
                    self._begin_learning(env_steps, iteration)
                step = take()
                iteration.add(actions, step)
                replay.act(actions)
                replay.show(step)
                if learns:
                    self._end_learning(env_steps, iteration)
                    if iteration.done < config.steps_per_env and self._pauses.after_turn():
                        return False
        self._steps = None
        return True

    def _conclude(self, iteration: Iteration) -> Update:
        """Counts the iteration as done; its results."""
        config, session = self._config, self._session
        self._count_episodes(iteration)
        if self._cut_at_end is not None:
            self._forget(self._cut_at_end)
        self._iteration = self._cut_at_end = None
        clock, seconds, steps = iteration.clock, iteration.seconds, self._taken - iteration.taken
        session.watchdog.measured(seconds)
        session.step += 1
        metrics = {name: value / steps for name, value in iteration.sums.items()}
        metrics |= self.agent.progress(self.steps_done) | self.episode_metrics()
        learning = clock["learning"] + clock["replay"]
        metrics |= {
            "replay/size": len(self.replay) * config.num_envs,
            "time/env_steps_per_second": config.iteration_steps / seconds,
            "time/updates_per_second": steps / seconds,
            "time/rollout_seconds": seconds - learning,
            "time/update_seconds": clock["learning"],
            "time/replay_seconds": clock["replay"],
        }
        metrics |= self.envs.metrics(session.step - 1, seconds)
        return Update(metrics)

    def _begin_learning(self, env_steps: int, iteration: Iteration) -> None:
        """Starts the gradient steps that are due after so many env steps; waits for all but the last call."""
        config, clock = self._config, iteration.clock
        due = config.updates_due(env_steps)
        while self._taken < due:
            self._finish_learning(env_steps, iteration)
            began = time.perf_counter()
            drawn = self._drawn or self._draw(env_steps)
            self._drawn = None
            started = time.perf_counter()
            count = min(due - self._taken, config.most_updates)
            results = self.agent.begin_update(
                drawn.batch, drawn.noise, first=self._taken, count=count, iteration=self._session.step
            )
            self._pending = drawn.batch.rows[:count], results
            self._taken += count
            clock["learning"] += time.perf_counter() - started
            clock["replay"] += started - began

    def _draw(self, env_steps: int) -> _Drawn:
        """The batches of the next call of gradient steps, and their noise."""
        config, agent = self._config, self.agent
        generators = [rng.generator(config.seed, rng.Use.REPLAY, self._taken, i) for i in self.envs.indices]
        # Always as many batches, of which some may be left over: each number would be compiled anew.
        batches, each = config.most_updates, config.batch_size // config.num_envs
        beta, least = self._beta(env_steps), self._least_share()
        batch = self.replay.sample(generators, batches, each, beta=beta, least=least)
        shape = (batches, each, agent.update_noise)
        return _Drawn(batch, np.stack([g.standard_normal(shape, np.float32) for g in generators], axis=1))

    def _finish_learning(self, env_steps: int, iteration: Iteration) -> None:
        """Waits for the gradient steps that are under way, if any are."""
        if self._pending is None:
            return
        (rows, results), self._pending = self._pending, None
        began = time.perf_counter()
        metrics, errors = results()
        iteration.clock["learning"] += time.perf_counter() - began
        self.replay.set_priorities(rows, errors)
        iteration.sums.update(metrics)
        if not self._has_learned:  # after random steps, thousands a second, turns may take seconds each
            self._has_learned = True
            self._pauses.forget_pace()
            self._session.console.forget_pace(env_steps)

    def _end_learning(self, env_steps: int, iteration: Iteration) -> None:
        """Draws the batches of the next turn while gradient steps are under way; then waits for these."""
        config = self._config
        # Not if more env steps come first, or if priorities depend on the errors of these gradient steps.
        is_next = config.train_every <= config.num_envs and not config.prioritized_replay
        if self._pending and is_next and self._taken < config.updates_due(env_steps + config.num_envs):
            began = time.perf_counter()
            self._drawn = self._draw(env_steps)
            iteration.clock["replay"] += time.perf_counter() - began
        self._finish_learning(env_steps, iteration)
        self._session.watchdog.beat()
        self._session.console.advance_to(env_steps)

    def _least_share(self) -> float | None:
        """The least chance of a row to be drawn for its env, of all envs. A collective."""
        if not self._config.prioritized_replay:
            return None
        bits = np.float64(self.replay.least_share()).view(
            np.int64
        )  # which sort like positive floats; `of_workers` takes integers
        return float(self._session.of_workers(int(bits)).min().view(np.float64))

    def _beta(self, env_steps: int) -> float:
        """The exponent of the importance-sampling weights: it grows to 1 by the run's end."""
        config = self._config
        if not config.prioritized_replay:
            return 1.0
        return config.priority_beta + (1.0 - config.priority_beta) * min(1.0, env_steps / config.total_steps)

    def _count_episodes(self, iteration: Iteration) -> None:
        """Counts what is not counted of an iteration. A collective."""
        new, iteration.counted = slice(iteration.counted, iteration.done), iteration.done
        played = np.stack([iteration.rewards[new], iteration.first[new].astype(np.float32)])
        everyone = self._runtime.gather_envs(played)
        self._episodes.add(everyone[0], everyone[1].astype(bool))

    # State

    def get_state(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The arrays that are the same on all workers; this worker's envs and replay, without the shards."""
        state = self.agent.get_state() | with_prefix("episodes/", self._episodes.get_state())
        iteration, step = self._iteration, self._session.step
        if not self.steps_within:  # broken off while its first steps were waited for
            iteration = None
        state |= self.envs.get_weights(step, within=iteration is not None) | {"taken": np.array(self._taken)}
        part = pack_envs(self.envs) | with_prefix("replay/", self.replay.get_state())
        if iteration is not None:
            state |= iteration.get_state()
            part |= with_prefix(_ITERATION, iteration.get_part())
            part |= with_prefix(_REST, self.envs.get_rest())
        if self._cut_at_end is not None:
            state["cut_at_end"] = self._cut_at_end
        return state, part

    def shards(self) -> Sequence[CheckpointShard]:
        """The replay's transitions."""
        return self.replay.shards()

    def set_state(
        self,
        state: Mapping[str, np.ndarray],
        parts: Sequence[Mapping[str, np.ndarray]],
        shards: Sequence[CheckpointShard] = (),
    ) -> None:
        """Continues from what `get_state` and `shards` gave on all workers, be they more or fewer now.

        Raises UserError on all workers if the network is another one, or if envs then show something else
        than they did.
        """
        self._set_agent(state)
        self._episodes.set_state(under("episodes/", state))
        self._taken = int(state["taken"])
        self.envs.set_weights(state)
        begun = self._restore_envs(self.envs, parts)
        self.replay.set_state(_of_envs("replay/", parts), shards)
        self._iteration = self._steps = self._pending = None
        self._cut_at_end = state.get("cut_at_end")
        if is_in(state):  # else the checkpoint was made between two
            self._iteration = self._new_iteration()
            self._iteration.set_state(state, _of_envs(_ITERATION, parts), self.envs.indices)
            self.envs.set_rest(_of_envs(_REST, parts))
        else:
            self.replay.set_current(*shown_envs(parts, self.envs.indices))
        if begun is not None:
            self._cut_off(begun)

    def _cut_off(self, envs: np.ndarray) -> None:
        """Counts what was played, and forgets what was summed up of some envs' episodes, bool [N]."""
        if self._iteration is not None:
            if self.envs.get_rest():  # the envs stand after it already
                self._cut_at_end = envs if self._cut_at_end is None else self._cut_at_end | envs
                return
            self._count_episodes(self._iteration)
        self._forget(envs)

    def close(self) -> None:
        """Stops the envs."""
        self.envs.close()


class _Drawn(NamedTuple):
    """Batches of a call of gradient steps, and their noise, float32 [K, B, b, noise]."""

    batch: Batch
    noise: np.ndarray


def _of_envs(prefix: str, parts: Sequence[Mapping[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """The arrays of each worker's part that are under a prefix, with the `indices` of its envs."""
    return [{**under(prefix, part), "indices": part["indices"]} for part in parts]


_STATE = "iteration"
_BY_ENV = ("rewards", "first", "actions")
_NUMBERS = ("done", "counted", "taken", "seconds", "clock", "sums")
POLL_SECONDS = 1.0  # seconds between two looks at the clock and at whether to stop, of all workers together
PAUSE_AFTER = 30.0  # seconds after which an iteration pauses


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
        self.clock: dict[str, float] = {"learning": 0.0, "replay": 0.0}
        self.sums: Counter[str] = Counter()

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
        for name in ("done", "counted", "taken", "seconds"):
            setattr(self, name, numbers[name])
        self.clock, self.sums = self.clock | numbers["clock"], Counter(numbers["sums"])
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
    arrays: dict[str, Any] = {name: columns(parts, name, envs)[None] for name in _ROUND}
    finals = {}
    for part in parts:
        for (_, t, b), final in zip(part["final_at"].tolist(), part["finals"], strict=True):
            if part["indices"][b] in envs:
                finals[0, t, list(envs).index(part["indices"][b])] = final
    seconds, idle, version = parts[0]["times"].tolist()
    arrays |= {"seconds": seconds, "idle_seconds": idle, "version": version}
    return Rollout(**arrays, extras={}, final_observations=finals)


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
        fits = int(self._stride * POLL_SECONDS / max(since, 1e-6))
        self._stride = self._left = max(1, min(fits, 2 * self._stride))
        self._looked = now
        return part > PAUSE_AFTER or stop_code(found[2:]) is not None


class EnvSource:
    """This worker's slice of the global envs, as a learner with replay has it; also a `learner.Envs`.

    This is the part of envs that are stepped one step at a time, by the agent's weights of now.

    Attributes:
      indices: the global indices of the envs.
      columns: the names of `metrics`.
    """

    indices: list[int]
    columns: tuple[str, ...] = ()
    _envs: VecEnv | PrefetchCollector

    def steps(
        self, iteration: int, agent: ReplayAgent, replay: ReplayBuffer, *, begin: int = 0
    ) -> Iterator[tuple[np.ndarray, TakeStep]]:
        """Actions [B, *shape] and how to take them, of one step after the other of an iteration.

        The caller takes each step before it asks for the next actions. The replay is first shown where the
        envs stand; what follows is for the caller to put there. `begin` is not 0 where the run goes on within
        an iteration, after so many steps of it.
        """
        raise NotImplementedError

    def metrics(self, iteration: int, seconds: float) -> dict[str, float]:
        """Shares of an iteration of `seconds`."""
        return {}

    @property
    def exact_state(self) -> bool:
        """True where a state that is put back goes on exactly."""
        return self._envs.exact_state

    def get_state(self) -> EnvStates:
        """The envs' state after the last step that was played."""
        raise NotImplementedError

    def set_state(self, states: Mapping[int, bytes]) -> None:
        """Continues from states by global env index."""
        raise NotImplementedError

    def get_rest(self) -> dict[str, np.ndarray]:
        """The steps that were played of the present iteration, if not all are given yet; this worker's."""
        return {}

    def set_rest(self, parts: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Continues from what `get_rest` gave on all workers, with the `indices` of their envs."""

    def get_weights(self, iteration: int, *, within: bool) -> dict[str, np.ndarray]:
        """The older weights that steps to come are acted by, after so many iterations or within one."""
        return {}

    def set_weights(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from what `get_weights` gave, among other arrays."""

    def close(self) -> None:
        """Stops the envs."""
        self._envs.close()


class SyncEnvs(EnvSource):
    """Envs that the agent acts in by its weights of now."""

    _envs: VecEnv

    def __init__(self, config: ReplaySettings, session: Session) -> None:
        self._config = config
        self.indices = list(session.runtime.local_envs(config.num_envs))
        self._envs = registry.make(env_spec(config), self.indices)
        self._correlated = exploration.correlated_noise(config, len(self.indices))

    def steps(
        self, iteration: int, agent: ReplayAgent, replay: ReplayBuffer, *, begin: int = 0
    ) -> Iterator[tuple[np.ndarray, TakeStep]]:
        """Actions and how to take them: each is chosen as it is asked for."""
        config = self._config
        sizes = (iteration, self.indices, config.steps_per_env)
        noise = rng.action_noise(config.seed, *sizes, agent.draw_noise)
        random = exploration.first_actions(config, iteration, self.indices)
        step = self._envs.observe()
        replay.show(step)
        for t in range(begin, config.steps_per_env):
            if self._correlated is not None:
                noise[t] = self._correlated.next(noise[t], step.first)
            if random is not None and exploration.is_random(config, iteration, t):
                actions = exploration.allowed_actions(config, random[t], step.observation)
            else:
                env_steps = exploration.env_steps(config, iteration, t)
                actions = agent.act(step.observation, noise[t], env_steps)
            yield actions, functools.partial(self._take, actions)
            step = self._envs.observe()

    def _take(self, actions: np.ndarray) -> Step:
        self._envs.act(actions)
        return self._envs.observe()

    def get_state(self) -> EnvStates:
        """The envs' present state."""
        step = self._envs.observe()
        states = self._envs.get_state()
        if self._correlated is not None:
            states = self._correlated.add_to(states)
        return EnvStates(self.indices, states, step.observation, step.first)

    def set_state(self, states: Mapping[int, bytes]) -> None:
        """Continues from states by global env index."""
        mine = [states[i] for i in self.indices]
        self._envs.set_state(mine if self._correlated is None else self._correlated.take_from(mine))


class PrefetchedEnvs(EnvSource):
    """Envs whose rounds are acted by older weights, in a thread or on Ray."""

    columns = COLUMNS
    _envs: PrefetchCollector
    _rollout: Rollout  # the present round

    def __init__(self, config: ReplaySettings, session: Session) -> None:
        make = functools.partial(
            Collector,
            env_spec(config),
            session.runtime.local_envs(config.num_envs),
            replicas=1,
            num_steps=config.steps_per_env,
            rollouts=config.rollouts_held,
            correlated=functools.partial(exploration.correlated_noise, config),
        )
        self._envs = make_prefetch_collector(config, session, replicas=1, make=make)
        self.indices = self._envs.indices
        self._prefetch = Prefetch(config, self._envs)

    def steps(
        self, iteration: int, agent: ReplayAgent, replay: ReplayBuffer, *, begin: int = 0
    ) -> Iterator[tuple[np.ndarray, TakeStep]]:
        """Actions and what they led to, once the round is there; later ones go on by the weights of now."""
        if begin:
            rollout = self._rollout
            replay.set_current(rollout.observations[0, begin], rollout.first[0, begin - 1])
        else:
            self._rollout = self._prefetch.take(iteration, agent.get_weights())
            at = self._envs.began
            order = [at.indices.index(i) for i in self.indices]
            replay.resume_round(at.observations[order], at.first[order])
        for actions, step in itertools.islice(self._rollout.steps(), begin, None):
            yield actions, functools.partial(lambda taken: taken, step)

    def metrics(self, iteration: int, seconds: float) -> dict[str, float]:
        """Shares of an iteration of `seconds` that learner and actors waited; the lag."""
        return self._prefetch.metrics(iteration, self._rollout, seconds)

    def get_state(self) -> EnvStates:
        """The envs' state after the last round that was taken."""
        return self._envs.get_state()

    def set_state(self, states: Mapping[int, bytes]) -> None:
        """Continues from states by global env index."""
        self._envs.set_state(states)

    def get_rest(self) -> dict[str, np.ndarray]:
        """The round: the envs stand after it already."""
        return pack_round(self._rollout)

    def set_rest(self, parts: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Continues from what `get_rest` gave on all workers, with the `indices` of their envs."""
        self._rollout = join_rounds(parts, self.indices)

    def get_weights(self, iteration: int, *, within: bool) -> dict[str, np.ndarray]:
        """The older weights that rounds to come are acted by, after so many iterations or within one."""
        return self._prefetch.get_state(iteration, within=within)

    def set_weights(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from what `get_weights` gave, among other arrays."""
        self._prefetch.set_state(state)
