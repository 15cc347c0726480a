"""Algorithms that learn from replay: act and learn in turn, by the count of env steps alone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfrl.envs import registry
from tfrl.experience.replay import Replay
from tfrl.run import rng
from tfrl.run.pieces import Piece
from tfrl.run.session import Session
from tfrl.training import env_states
from tfrl.training.learner import LearnerBase, MakeAgent, under, with_prefix
from tfrl.training.playing import PlayedAhead, PlayedInTurn, Playing
from tfrl.training.trainer import Update

_COLUMNS = (
    *("replay/size", "time/env_steps_per_second", "time/updates_per_second", "time/rollout_seconds"),
    *("time/update_seconds", "time/replay_seconds", "time/allreduce_seconds"),
)


class OffPolicyLearner(LearnerBase):
    """One worker's share of the envs and of the replay; follows `tfrl.training.trainer.Learner`.

    An update is an iteration of --iteration-steps env steps, in which actions and gradient steps take turns.

    Args:
      config: the settings, with the section `tfrl.config.replay.Replay`.
      session: this process's part of the run; `session.step` is the number of finished iterations.
      make_agent: makes the agent from the settings and the runtime.
    """

    def __init__(self, config: Any, session: Session, make_agent: MakeAgent) -> None:
        super().__init__(config, session, make_agent)
        self.envs: Playing = (PlayedAhead if config.is_ahead else PlayedInTurn)(config, session)
        self.columns = (*_COLUMNS, *self.envs.columns)
        observation, action = registry.specs(config.env)
        self.replay = Replay(
            self.envs.indices,
            config.replay_size // config.num_envs,
            observation=observation,
            action=action,
            gamma=config.gamma,
            n_step=config.n_step,
            priority_exponent=config.priority_exponent if config.prioritized_replay else None,
        )
        self._taken = 0  # gradient steps

    def update(self) -> Update:
        """Takes an iteration's env steps and the gradient steps that are due. A collective."""
        config, session, began = self._config, self._session, time.perf_counter()
        before = self._taken
        clock, sums = Counter(), Counter()
        rewards, first, actions = self._iterate(clock, sums)
        self._count_episodes(rewards, first)
        seconds, steps = time.perf_counter() - began, self._taken - before
        session.watchdog.measured(seconds)
        session.step, session.seconds = session.step + 1, session.seconds + seconds
        env_steps = session.step * config.iteration_steps
        metrics = {name: value / steps for name, value in sums.items()}
        metrics |= self.agent.progress(env_steps) | self.episode_metrics()
        if steps:
            metrics |= session.runtime.communication(session.step, self.agent.floats_per_sum, steps)
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
        return Update(metrics, self.action_counts(actions))

    def _iterate(self, clock: Counter, sums: Counter) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rewards and `first`, [T, B], and actions [T, B, *shape] of this worker's envs.

        Adds the seconds of each kind of work to `clock`, and the metrics of each gradient step to `sums`.
        """
        config, session, replay = self._config, self._session, self.replay
        num_steps, start = config.steps_per_env, session.step * config.iteration_steps
        session.phase("training")
        action = registry.specs(config.env)[1]
        rewards = np.zeros((num_steps, len(self.envs.indices)), np.float32)
        first = np.zeros(rewards.shape, bool)
        taken = np.zeros((*rewards.shape, *action.shape), action.dtype)
        for t, (actions, step) in enumerate(self.envs.steps(session.step, self.agent, replay)):
            taken[t], rewards[t], first[t] = actions, step.reward, step.first
            replay.act(actions)
            replay.show(step)
            env_steps = start + (t + 1) * config.num_envs
            if env_steps % config.train_every < config.num_envs:
                self._learn(env_steps, clock, sums)
        return rewards, first, taken

    def _learn(self, env_steps: int, clock: Counter, sums: Counter) -> None:
        """Takes the gradient steps that are due after so many env steps."""
        config, session = self._config, self._session
        due = int((env_steps - config.learning_starts) * config.updates_per_step)
        while self._taken < due:
            began = time.perf_counter()
            generators = [
                rng.generator(config.seed, rng.Use.REPLAY, self._taken, i) for i in self.envs.indices
            ]
            # Always as many batches, of which some may be left over: each number would be compiled anew.
            batches, each = config.most_updates, config.batch_size // config.num_envs
            beta = self._beta(env_steps)
            batch = self.replay.sample(generators, batches, each, beta=beta)
            shape = (batches, each, self.agent.update_noise)
            noise = np.stack([g.standard_normal(shape, np.float32) for g in generators], axis=1)
            sampled = time.perf_counter()
            count = min(due - self._taken, batches)
            metrics, errors = self.agent.update(
                batch, noise, first=self._taken, count=count, iteration=session.step
            )
            learned = time.perf_counter()
            self.replay.set_priorities(batch.rows[:count], errors)
            sums.update(metrics)
            self._taken += count
            clock["learning"] += learned - sampled
            clock["replay"] += sampled - began + time.perf_counter() - learned
        session.watchdog.beat()
        session.console.advance_to(env_steps)

    def _beta(self, env_steps: int) -> float:
        """The exponent of the importance-sampling weights: it grows to 1 by the run's end."""
        config = self._config
        if not config.prioritized_replay:
            return 1.0
        return config.priority_beta + (1.0 - config.priority_beta) * min(1.0, env_steps / config.total_steps)

    def _count_episodes(self, rewards: np.ndarray, first: np.ndarray) -> None:
        everyone = self._runtime.gather_envs(np.stack([rewards, first.astype(np.float32)]))
        self._episodes.add(everyone[0], everyone[1].astype(bool))

    # State

    def get_state(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The arrays that are the same on all workers; this worker's envs and replay, without the pieces."""
        state = self.agent.get_state() | with_prefix("episodes/", self._episodes.get_state())
        state |= self.envs.get_weights(self._session.step) | {"taken": np.array(self._taken)}
        return state, env_states.pack(self.envs) | with_prefix("replay/", self.replay.get_state())

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
        env_states.restore(self.envs, parts, self._config, self._session)
        self.replay.set_state([under("replay/", p) | {"indices": p["indices"]} for p in parts], pieces)

    def close(self) -> None:
        """Stops the envs."""
        self.envs.close()
