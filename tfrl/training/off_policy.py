"""Algorithms that learn from replay: act and learn in turn, by the count of env steps alone."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfrl.algorithms.replay import PendingSteps, ReplayAgent, ReplaySettings
from tfrl.cli.endings import Stopped
from tfrl.cli.errors import UserError
from tfrl.envs import registry
from tfrl.envs.spec import Step, Sums, added
from tfrl.experience import recorded
from tfrl.experience.replay import Batch, ReplayBuffer
from tfrl.experience.rollout import Rollout
from tfrl.experience.transitions import Transitions
from tfrl.run import rng
from tfrl.run.checkpoint import State, pack_json, under, unpack_json, with_prefix
from tfrl.run.session import Session
from tfrl.training.learner import EnvLearner, MakeAgent, make_envs, shown_envs

_COLUMNS = (
    *("replay/size", "time/env_steps_per_second", "time/updates_per_second", "time/rollout_seconds"),
    *("time/update_seconds", "time/replay_seconds"),
)


class OffPolicyLearner(EnvLearner):
    """One worker's share of the envs and of the replay.

    An update is an iteration: in its --iteration-steps env steps, env steps and gradient steps take turns.
    The arguments are those of `EnvLearner`.
    """

    _config: ReplaySettings
    agent: ReplayAgent

    def __init__(self, config: ReplaySettings, session: Session, make_agent: MakeAgent) -> None:
        super().__init__(config, session, make_agent)
        self._indices = list(session.runtime.local_envs(config.num_envs))
        observation, action = registry.specs(config)
        self.replay = ReplayBuffer(
            self._indices,
            config.replay_size // config.num_envs,
            observation=observation,
            action=action,
            gamma=config.gamma,
            n_step=config.n_step,
            priority_exponent=config.priority_exponent if config.prioritized_replay else None,
            learned_rewards=config.learned_rewards,
        )
        self._recorded = None if config.dataset is None else self._read(config.dataset)
        self._gradient_steps = 0  # of the run so far
        self._has_learned = False  # in this process
        self._pending: PendingSteps | None = None  # gradient steps under way
        self._iteration: _Iteration | None = None  # the unfinished one
        self._since_vote = 0  # turns of env steps and gradient steps since the last vote on a stop
        # Last, because nobody would close them after an error.
        self.envs, self._prefetch = make_envs(config, session, replicas=1)
        self.time_columns = (*_COLUMNS, *(self._prefetch.columns if self._prefetch else ()))

    def _read(self, dataset: str) -> Transitions:
        """Holds a recorded set. Raises UserError if it does not fit the env or the memory."""
        config, watchdog = self._config, self._session.watchdog
        self._session.phase("reading the data")
        opened = recorded.open_set(dataset)
        self.warn_of_other_env(opened)
        if self._runtime.is_chief:
            for sentence in recorded.other_settings(dataset, config):
                self._session.console.warn(sentence)
        found = Transitions(
            opened,
            recorded.Spaces(*registry.specs(config)),
            seed=config.seed,
            batch_size=config.batch_size,
            gamma=config.gamma,
            n_step=config.n_step,
            learned_rewards=config.learned_rewards,
            on_shard=lambda count: watchdog.beat(),
        )
        found.close()  # no shard is read again
        if not found.is_whole:
            raise UserError(
                f"--dataset {dataset} does not fit the memory: {found.in_words()}; give a smaller set."
            )
        return found

    def update(self) -> dict[str, float]:
        """Takes the env steps of an iteration and the gradient steps that are due. A collective.

        It ends early at the episode of --max-episodes.

        Every --train-every env steps, gradient steps from the transitions so far begin before the next
        actions are chosen. The learner waits for a single gradient step before the next one and at the end of
        the iteration, and for several at once after one env step, so that no actions follow much older
        weights.
        """
        if self._iteration is None:
            self._iteration = _Iteration(self._config, len(self._indices), self._gradient_steps)
        iteration, began = self._iteration, time.perf_counter()
        self._session.phase("training")
        try:
            step = self._take_turns(iteration)
        except Stopped:
            iteration.seconds += self._count(began)
            taken = self._gradient_steps - iteration.gradient_steps_before
            if iteration.done or taken or iteration.rollout is not None:
                self._session.changed()  # since the checkpoint before the iteration
            else:
                self._iteration = None
            raise
        number = self._session.step
        if iteration.done < self._config.steps_per_env:
            self._end_within(iteration)
        else:
            self._iteration = None
            self._count_episodes(iteration)
            if iteration.forgotten.any():
                self._forget_sums(iteration.forgotten)
            self._session.step += 1
        metrics: dict[str, float] = {}
        if self.agent.network.has_deviation:
            metrics |= self.deviation_metric(step.observation)
        metrics |= self.info_metrics(iteration.info)
        iteration.seconds += self._count(began)
        self.write_episodes()
        return self._metrics(iteration, number) | metrics

    def _end_within(self, iteration: _Iteration) -> None:
        """Ends the run within an iteration.

        A run that goes on finishes the iteration, and counts all of its episodes then.
        """
        self._before, counted = self._env_state(), iteration.counted
        self._count_episodes(iteration)
        iteration.counted = counted
        self._cut_after(iteration.done * self._config.num_envs)

    def _take_turns(self, iteration: _Iteration) -> Step:
        """Takes the rest of an iteration; returns its last step. Raises Stopped between two turns."""
        config, session, replay = self._config, self._session, self.replay
        with self.agent.learning_in_background():
            steps = self._steps(iteration)
            begin, left = iteration.done, math.inf
            if config.max_episodes is not None:
                uncounted = self._ended(iteration.first[iteration.counted : begin])
                left = config.max_episodes - self._episodes.episodes - uncounted
            for t in range(begin, config.steps_per_env):
                env_steps = self.steps_done + (t + 1) * config.num_envs  # after this step
                learns = env_steps % config.train_every < config.num_envs
                if self._pending is None and t > begin:
                    self._vote_on_stop(iteration)
                if learns:
                    self._learn(iteration, env_steps)
                actions, step = next(steps)
                iteration.rewards[t], iteration.first[t] = step.reward, step.first
                replay.act(actions)
                replay.show(step)
                iteration.done = t + 1
                if learns:
                    session.advance_to(env_steps)
                    if config.max_gradient_steps_per_call > 1:
                        self._wait(iteration)
                if left < math.inf:
                    left -= self._ended(iteration.first[t])
                    if left <= 0:
                        break
            self._wait(iteration)
        self._take_info(iteration)
        return step

    def _steps(self, iteration: _Iteration) -> Iterator[tuple[np.ndarray, Step]]:
        """Shows the present observations to the replay; returns an iterator over the steps that are left.

        The iterator chooses actions [B, *shape], takes the env step, and yields both. Prefetched steps were
        taken with older weights; the next ones are requested.
        """
        if self._prefetch is None:
            self.replay.show(self._collector.observe())
            noise = self.agent.acting.draw(self._session.step, self._indices)
            return self._collector.steps(self.agent.acting.explore, noise[iteration.done :])
        if iteration.rollout is None:
            rollout, began = self._prefetched(self._prefetch), self._prefetch.collector.began
            order = np.argsort(began.indices)
            iteration.rollout, iteration.info, iteration.begins = rollout, rollout.info, began.first[order]
            self.replay.resume_round(began.observations[order], began.first[order])
        return itertools.islice(iteration.rollout.steps(), iteration.done, None)

    def _learn(self, iteration: _Iteration, env_steps: int) -> None:
        """Starts the gradient steps that are due after so many env steps; waits for all but the last call."""
        config, clock, due = self._config, iteration.clock, self._config.gradient_steps_due(env_steps)
        while self._gradient_steps < due:
            self._vote_on_stop(iteration)
            if config.prioritized_replay:  # priorities depend on the errors
                self._wait(iteration)
            began = time.perf_counter()
            batch, noise = self._draw(env_steps)
            drawn = time.perf_counter()
            pending = self.agent.begin_gradient_steps(
                batch,
                noise,
                steps_done=self._gradient_steps,
                count=min(due - self._gradient_steps, config.max_gradient_steps_per_call),
                iteration=self._session.step,
            )
            clock["replay"] += drawn - began
            clock["learning"] += time.perf_counter() - drawn
            self._wait(iteration)  # the call before has ended
            self._pending = pending
            self._gradient_steps += pending.count

    def _draw(self, env_steps: int) -> tuple[Batch, np.ndarray]:
        """The batches of the next call of gradient steps, and noise for each row. A collective."""
        config, recorded = self._config, self._recorded
        generators = [
            rng.generator(config.seed, rng.Use.REPLAY, self._gradient_steps, i) for i in self._indices
        ]
        # Always as many batches, of which some may be left over: each number would be compiled anew.
        batches, each = config.max_gradient_steps_per_call, config.batch_size // config.num_envs
        own = each if recorded is None else each // 2
        if config.prioritized_replay:
            # The least chance of a row to be drawn for its env, of all envs. The exponent grows to 1 by the
            # run's end.
            least = float(self._session.of_workers(self.replay.min_probability()).min())
            grown = min(1.0, env_steps / config.total_steps)
            beta = config.priority_beta + (1.0 - config.priority_beta) * grown
            batch = self.replay.sample(generators, batches, own, beta=beta, least=least)
        else:
            batch = self.replay.sample(generators, batches, own)
        if recorded is not None:
            drawn = [recorded.draw(g, (batches, each - own)) for g in generators]
            others = (np.stack(arrays, axis=1) for arrays in zip(*drawn, strict=True))
            batch = Batch(*(np.concatenate(pair, axis=2) for pair in zip(batch, others, strict=True)))
        shape = (batches, each, self.agent.update_noise)
        return batch, np.stack([g.standard_normal(shape, np.float32) for g in generators], axis=1)

    def _wait(self, iteration: _Iteration) -> None:
        """Waits for the gradient steps that are under way, if any are, and takes in their results."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        began = time.perf_counter()
        learned = pending.wait()
        iteration.clock["learning"] += time.perf_counter() - began
        if self._config.prioritized_replay:
            self.replay.set_priorities(learned.rows, learned.errors)
        iteration.sums.update(learned.metrics)
        if not self._has_learned:  # after random steps, thousands a second, turns may take seconds each
            self._has_learned = True
            self._session.console.progress.forget_pace()

    def _vote_on_stop(self, iteration: _Iteration) -> None:
        """Raises Stopped on all workers if one was told to stop. Then no gradient steps are under way.

        An iteration on images may take minutes, so there are about 64 such votes in it. They depend only on
        counts, because each is a collective; a single worker obeys a signal at once. A stop changes no bit of
        the run: it is between two turns, and the checkpoint has what the iteration has so far.
        """
        config = self._config
        calls = math.ceil(
            config.iteration_steps * config.updates_per_step / config.max_gradient_steps_per_call
        )
        self._since_vote += 1
        every = max(1, (config.steps_per_env + calls) // _VOTES)
        at_once = self._runtime.num_workers == 1 and self._session.stop.signalled
        if self._since_vote < every and not at_once:
            return
        self._since_vote = 0
        self._wait(iteration)
        try:
            self._session.raise_if_stopped()
        except Stopped:
            self._take_info(iteration)
            raise

    def _metrics(self, iteration: _Iteration, number: int) -> dict[str, float]:
        """The metrics of a finished iteration and its number, from 0."""
        config, seconds, clock = self._config, iteration.seconds, iteration.clock
        gradient_steps = self._gradient_steps - iteration.gradient_steps_before
        metrics = {name: value / gradient_steps for name, value in iteration.sums.items()}
        if concern := self.agent.concern(metrics):
            self._session.console.warn(concern)
        metrics |= self.agent.progress(self.steps_done) | self.episode_metrics()
        metrics |= {
            "replay/size": len(self.replay) * config.num_envs,
            "time/env_steps_per_second": iteration.done * config.num_envs / seconds,
            "time/updates_per_second": gradient_steps / seconds,
            "time/rollout_seconds": seconds - sum(clock.values()),
            "time/update_seconds": clock["learning"],
            "time/replay_seconds": clock["replay"],
        }
        if self._prefetch is not None and iteration.rollout is not None:
            metrics |= self._prefetch.metrics(number, iteration.rollout, seconds)
        return metrics

    def _take_info(self, iteration: _Iteration) -> None:
        """Adds the envs' infos to the iteration; a prefetched rollout has its own."""
        if self._prefetch is None:
            iteration.info = added(iteration.info, self._collector.take_info())

    def _count_episodes(self, iteration: _Iteration) -> None:
        """Counts the episodes of the steps that are not counted yet. A collective."""
        new = slice(iteration.counted, iteration.done)
        rewards, first = self._runtime.gather_envs(
            np.stack([iteration.rewards[new], iteration.first[new].astype(np.float32)])
        )
        finished = self._episodes.add(rewards, first.astype(bool))
        rounds = iteration.counted + finished.rounds
        self.note_episodes(finished, self.steps_done + rounds * self._config.num_envs)
        iteration.counted = iteration.done

    def _ended(self, first: np.ndarray) -> int:
        """The number of episodes that ended, of the flags bool [..., B] of all workers. A collective."""
        return int(self._runtime.sum_over_workers(np.array([first.sum()]))[0])

    def summary(self) -> dict[str, str]:
        """The learner's own rows of the table before training."""
        if self._recorded is None:
            return super().summary()
        text = f"half of each batch: {self._config.dataset}, {self._recorded.in_words()}"
        return {**super().summary(), "data": text}

    # State

    @property
    def steps_within(self) -> int:
        """Env steps of the unfinished iteration, at least one round of them; 0 between two iterations, and
        within the last one of a run that --max-episodes ends.
        """
        if self._iteration is None or self._cut_steps:
            return 0
        return max(1, self._iteration.done) * self._config.num_envs

    def get_state(self) -> State:
        """The state of the agent, the episodes, the envs and the replay, whose transitions are shards."""
        state = super().get_state()
        state.learner["gradient_steps"] = np.array(self._gradient_steps)
        state.parts[0].update(with_prefix("replay/", self.replay.get_state()))
        if self._iteration is not None:
            state.learner[_ITERATION] = pack_json(self._iteration.numbers())
            state.parts[0].update(with_prefix(f"{_ITERATION}/", self._iteration.arrays()))
        return State(state.learner, state.parts, self.replay.shards())

    def set_state(self, state: State) -> None:
        """Restores the state of all workers. Raises UserError like `Learner.set_state`."""
        self._gradient_steps = int(state.learner["gradient_steps"])
        self._iteration = None
        if _ITERATION in state.learner:
            self._iteration = _Iteration(self._config, len(self._indices), self._gradient_steps)
            numbers = unpack_json(state.learner[_ITERATION])
            self._iteration.restore(numbers, _of_envs(_ITERATION, state), self._indices)
        super().set_state(state)
        self.replay.set_state(_of_envs("replay", state), state.shards)
        iteration = self._iteration
        if iteration is None or iteration.rollout is None:
            self.replay.set_current(*shown_envs(state.parts, self._indices))
        else:  # the envs are after the rollout, of which some steps are not in the replay yet
            at, rollout = iteration.done, iteration.rollout
            first = rollout.first[0, at - 1] if at else iteration.begins
            self.replay.set_current(rollout.observations[0, at], first)

    def _forget_sums(self, envs: np.ndarray) -> None:
        iteration = self._iteration
        if iteration is not None and iteration.rollout is not None:
            iteration.forgotten |= envs  # the envs are after the rollout already
            return
        if iteration is not None and iteration.done > iteration.counted:
            self._count_episodes(iteration)  # those of a resumed iteration, before its sums are dropped
        super()._forget_sums(envs)


_ITERATION = "iteration"  # in a checkpoint: the unfinished iteration
_VOTES = 64  # on a stop, in an iteration
_ROUND = ("observations", "actions", "rewards", "first", "truncated")  # of a rollout


class _Iteration:
    """The steps and sums of an iteration so far.

    Args:
      config: the settings.
      envs: B, of this worker.
      gradient_steps_before: gradient steps of earlier iterations.

    Attributes:
      done: rounds of env steps so far; counted: those whose episodes are counted.
      rewards: float32 [T, B]; first: bool [T, B].
      seconds: of training so far, in all processes of the run; clock: seconds of each kind of work.
      sums: of the metrics of all gradient steps so far, by name.
      info: the sums of the envs' infos, if they were taken from the envs.
      rollout: the prefetched rollout of the iteration; None without.
      begins: bool [B], True if an episode begins with the rollout.
      forgotten: bool [N], True for envs whose episodes are cut off after the rollout.
    """

    def __init__(self, config: ReplaySettings, envs: int, gradient_steps_before: int) -> None:
        self.done, self.counted, self.seconds = 0, 0, 0.0
        self.gradient_steps_before = gradient_steps_before
        self.rewards = np.zeros((config.steps_per_env, envs), np.float32)
        self.first = np.zeros((config.steps_per_env, envs), bool)
        self.clock: dict[str, float] = {"learning": 0.0, "replay": 0.0}
        self.sums: Counter[str] = Counter()
        self.info: Sums = {}
        self.rollout: Rollout | None = None
        self.begins = np.zeros(envs, bool)
        self.forgotten = np.zeros(config.num_envs, bool)

    def numbers(self) -> dict[str, Any]:
        """JSON values that are equal on all workers."""
        names = ("done", "counted", "seconds", "gradient_steps_before", "clock", "sums")
        return {name: getattr(self, name) for name in names} | {"forgotten": self.forgotten.tolist()}

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of this worker's envs."""
        found = {"rewards": self.rewards[: self.done], "first": self.first[: self.done]}
        found |= with_prefix("info/", self.info)
        if (rollout := self.rollout) is None:
            return found
        finals = sorted(rollout.final_observations.items())
        rest = {name: getattr(rollout, name)[0] for name in _ROUND} | {
            "begins": self.begins[None],
            "final_at": np.array([(t, b) for (_, t, b), _ in finals], np.int64).reshape(-1, 2),
            "finals": np.array([final for _, final in finals], rollout.observations.dtype),
            "times": np.array([rollout.seconds, rollout.idle_seconds, rollout.version]),
        }
        return found | with_prefix("rollout/", rest)

    def restore(
        self, numbers: Mapping[str, Any], parts: Sequence[Mapping[str, np.ndarray]], envs: Sequence[int]
    ) -> None:
        """Continues from `numbers`, and the `arrays` of all workers with the `indices` of their envs.

        `envs` are the global indices of this worker's envs now.
        """
        for name in ("done", "counted", "seconds", "clock"):
            setattr(self, name, numbers[name])
        self.gradient_steps_before, self.sums = numbers["gradient_steps_before"], Counter(numbers["sums"])
        self.forgotten = np.array(numbers["forgotten"], bool)
        self.rewards[: self.done] = _columns(parts, "rewards", envs)
        self.first[: self.done] = _columns(parts, "first", envs)
        names = {name for part in parts for name in part if name.startswith("info/")}
        self.info = {name.removeprefix("info/"): _columns(parts, name, envs) for name in sorted(names)}
        if "rollout/rewards" not in parts[0]:
            return
        parts = [{**under("rollout/", part), "indices": part["indices"]} for part in parts]
        arrays: dict[str, Any] = {name: _columns(parts, name, envs)[None] for name in _ROUND}
        finals, places = {}, {env: b for b, env in enumerate(envs)}
        for part in parts:
            for (t, b), final in zip(part["final_at"].tolist(), part["finals"], strict=True):
                if (env := int(part["indices"][b])) in places:
                    finals[0, t, places[env]] = final
        seconds, idle, version = parts[0]["times"].tolist()
        arrays |= {"seconds": seconds, "idle_seconds": idle, "version": version}
        self.rollout = Rollout(**arrays, extras={}, final_observations=finals)
        self.begins = _columns(parts, "begins", envs)[0]


def _of_envs(prefix: str, state: State) -> list[dict[str, np.ndarray]]:
    """The arrays of each worker's part under a prefix, with the `indices` of its envs."""
    return [{**under(f"{prefix}/", part), "indices": part["indices"]} for part in state.parts]


def _columns(parts: Sequence[Mapping[str, np.ndarray]], name: str, envs: Sequence[int]) -> np.ndarray:
    """The columns of some global envs, of the arrays [n, B, ...] of all workers; zeros where one has none."""
    saved = {int(i): (part, k) for part in parts for k, i in enumerate(part["indices"])}
    some = next(part[name] for part in parts if name in part)
    none = np.zeros((len(some), *some.shape[2:]), some.dtype)
    found = (saved[i] for i in envs)
    return np.stack([part[name][:, k] if name in part else none for part, k in found], axis=1)
