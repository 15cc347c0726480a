"""Algorithms that learn from replay: act and learn in turn, by the count of env steps alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfrl.envs import registry
from tfrl.envs.spec import Step
from tfrl.experience.replay import Replay
from tfrl.run import rng
from tfrl.run.pieces import Piece
from tfrl.run.session import Session
from tfrl.training import env_states
from tfrl.training.iteration import Iteration, Pauses, is_in
from tfrl.training.learner import LearnerBase, MakeAgent, under, with_prefix
from tfrl.training.playing import PlayedAhead, PlayedInTurn, Playing
from tfrl.training.trainer import Update

_COLUMNS = (
    *("replay/size", "time/env_steps_per_second", "time/updates_per_second", "time/rollout_seconds"),
    *("time/update_seconds", "time/replay_seconds", "time/allreduce_seconds"),
)


_ITERATION, _REST = "iteration/", "rest/"  # prefixes in a worker's part of a checkpoint


class OffPolicyLearner(LearnerBase):
    """One worker's share of the envs and of the replay; follows `tfrl.training.trainer.Learner`.

    An update is an iteration of --iteration-steps env steps, in which actions and gradient steps take turns.
    It may pause between two turns, to be saved or stopped, and goes on from there, bit for bit.

    Args:
      config: the settings, with the section `tfrl.algorithms.replay.Replay`.
      session: this process's part of the run; `session.step` is the number of finished iterations.
      make_agent: makes the agent from the settings and the runtime.
    """

    def __init__(self, config: Any, session: Session, make_agent: MakeAgent) -> None:
        super().__init__(config, session, make_agent)
        self.envs: Playing = (PlayedAhead if config.is_ahead else PlayedInTurn)(config, session)
        self.columns = (*_COLUMNS, *self.envs.columns)
        observation, action = registry.specs(config)
        self.replay = Replay(
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
        self._steps: Iterator[tuple[np.ndarray, Step]] | None = None  # of it, once this process has begun
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
        """Acts and learns in turn to the iteration's end, or until it is to pause: then False."""
        config, session, replay = self._config, self._session, self.replay
        session.phase("training")
        self._pauses.begin()
        if self._steps is None:
            self._steps = self.envs.steps(session.step, self.agent, replay, begin=iteration.done)
        for actions, step in self._steps:
            iteration.add(actions, step)
            replay.act(actions)
            replay.show(step)
            env_steps = self._steps_so_far()
            if env_steps % config.train_every < config.num_envs:
                self._learn(env_steps, iteration)
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
        metrics |= self.agent.progress(self.env_steps) | self.episode_metrics()
        if steps:
            metrics |= session.runtime.communication(session.step, self.agent.allreduce_floats, steps)
        learning = clock["learning"] + clock["replay"]
        metrics |= {
            "replay/size": len(self.replay) * config.num_envs,
            "time/env_steps_per_second": config.iteration_steps / seconds,
            "time/updates_per_second": steps / clock["learning"] if steps else 0.0,
            "time/rollout_seconds": seconds - learning,
            "time/update_seconds": clock["learning"],
            "time/replay_seconds": clock["replay"],
        }
        metrics |= self.envs.metrics(session.step - 1, seconds)
        return Update(metrics, self.action_counts(iteration.actions))

    def _learn(self, env_steps: int, iteration: Iteration) -> None:
        """Takes the gradient steps that are due after so many env steps."""
        config, session, clock = self._config, self._session, iteration.clock
        due = config.updates_due(env_steps)
        while self._taken < due:
            began = time.perf_counter()
            generators = [
                rng.generator(config.seed, rng.Use.REPLAY, self._taken, i) for i in self.envs.indices
            ]
            # Always as many batches, of which some may be left over: each number would be compiled anew.
            batches, each = config.most_updates, config.batch_size // config.num_envs
            beta = self._beta(env_steps)
            batch = self.replay.sample(generators, batches, each, beta=beta, least=self._least_share())
            shape = (batches, each, self.agent.update_noise)
            noise = np.stack([g.standard_normal(shape, np.float32) for g in generators], axis=1)
            sampled = time.perf_counter()
            count = min(due - self._taken, batches)
            metrics, errors = self.agent.update(
                batch, noise, first=self._taken, count=count, iteration=session.step
            )
            learned = time.perf_counter()
            self.replay.set_priorities(batch.rows[:count], errors)
            iteration.sums.update(metrics)
            self._taken += count
            clock["learning"] += learned - sampled
            clock["replay"] += sampled - began + time.perf_counter() - learned
            self._note_first_learning(env_steps)
        session.watchdog.beat()
        session.console.advance_to(env_steps)

    def _note_first_learning(self, env_steps: int) -> None:
        """After random steps, of which there may be thousands a second, turns may take seconds each."""
        if not self._has_learned:
            self._has_learned = True
            self._pauses.forget_pace()
            self._session.console.forget_pace(env_steps)

    def _least_share(self) -> float | None:
        """The least chance of a row to be drawn for its env, of all envs. A collective."""
        if not self._config.prioritized_replay:
            return None
        bits = np.float64(self.replay.least_share()).view(np.int64)  # which order as what is positive does
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
        """The arrays that are the same on all workers; this worker's envs and replay, without the pieces."""
        state = self.agent.get_state() | with_prefix("episodes/", self._episodes.get_state())
        iteration, step = self._iteration, self._session.step
        if not self.steps_within:  # broken off while its first steps were waited for
            iteration = None
        state |= self.envs.get_weights(step, within=iteration is not None) | {"taken": np.array(self._taken)}
        part = env_states.pack(self.envs) | with_prefix("replay/", self.replay.get_state())
        if iteration is not None:
            state |= iteration.get_state()
            part |= with_prefix(_ITERATION, iteration.get_part())
            part |= with_prefix(_REST, self.envs.get_rest())
        return state, part

    def pieces(self) -> Sequence[Piece]:
        """The replay's transitions."""
        return self.replay.pieces()

    def set_state(
        self,
        state: Mapping[str, np.ndarray],
        parts: Sequence[Mapping[str, np.ndarray]],
        pieces: Sequence[Piece] = (),
    ) -> None:
        """Continues from what `get_state` and `pieces` gave on all workers, be they more or fewer now.

        Raises UserError on all workers if the network is another one, or if envs then show something else
        than they did.
        """
        self._set_agent(state)
        self._episodes.set_state(under("episodes/", state))
        self._taken = int(state["taken"])
        self.envs.set_weights(state)
        begun = env_states.restore(self.envs, parts, self._config, self._session)
        self.replay.set_state(_of_envs("replay/", parts), pieces)
        self._iteration = self._steps = self._cut_at_end = None
        if is_in(state):  # else the checkpoint was made between two
            self._iteration = self._new_iteration()
            self._iteration.set_state(state, _of_envs(_ITERATION, parts), self.envs.indices)
            self.envs.set_rest(_of_envs(_REST, parts))
        else:
            self.replay.stand_at(*env_states.shown(parts, self.envs.indices))
        if begun is not None:
            self._cut_off(begun)

    def _cut_off(self, envs: np.ndarray) -> None:
        """Counts what was played, and forgets what was summed up of some envs' episodes, bool [N]."""
        if self._iteration is not None:
            if self.envs.get_rest():  # the envs stand after it already
                self._cut_at_end = envs
                return
            self._count_episodes(self._iteration)
        self._forget(envs)

    def close(self) -> None:
        """Stops the envs."""
        self.envs.close()


def _of_envs(prefix: str, parts: Sequence[Mapping[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """The arrays of each worker's part that are under a prefix, with the `indices` of its envs."""
    return [{**under(prefix, part), "indices": part["indices"]} for part in parts]
