"""Algorithms that learn from replay: act and learn in turn, by the count of env steps alone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import numpy as np

from tfrl.algorithms.replay import PendingSteps, Prepared, ReplayAgent, ReplaySettings
from tfrl.cli.errors import UserError
from tfrl.envs import registry
from tfrl.envs.spec import Step
from tfrl.experience import recorded
from tfrl.experience.collector import Collector
from tfrl.experience.replay import Batch, ReplayBuffer
from tfrl.experience.transitions import Transitions
from tfrl.run import rng
from tfrl.run.checkpoint import State, under, with_prefix
from tfrl.run.session import Session
from tfrl.training.learner import EnvLearner, MakeAgent, shown_envs
from tfrl.training.prefetch import COLUMNS, make_envs

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
        self.envs, self._prefetch = make_envs(config, session, replicas=1)
        self.time_columns = (*_COLUMNS, *(COLUMNS if self._prefetch else ()))
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
        self._pending: tuple[Prepared, PendingSteps] | None = None  # gradient steps under way
        self._sums: Counter[str] = Counter()  # of the metrics of all gradient steps of this iteration
        self._clock = dict.fromkeys(("learning", "replay"), 0.0)  # seconds of this iteration

    def _read(self, dataset: str) -> Transitions:
        """Holds a recorded set. Raises UserError if it does not fit the env or the memory."""
        config, watchdog = self._config, self._session.watchdog
        self._session.phase("reading the data")
        found = Transitions(
            recorded.open_set(dataset),
            recorded.Spaces(*registry.specs(config)),
            seed=config.seed,
            batch_size=config.batch_size,
            gamma=config.gamma,
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

        Every --train-every env steps, gradient steps from the transitions so far begin before the next
        actions are chosen. The learner waits for a single gradient step before the next one and at the end of
        the iteration, and for several at once after one env step, so that no actions follow much older
        weights.
        """
        config, session, replay, began = self._config, self._session, self.replay, time.perf_counter()
        session.phase("training")
        self._sums, self._clock = Counter(), dict.fromkeys(self._clock, 0.0)
        before, env_steps = self._gradient_steps, self.steps_done
        rewards = np.zeros((config.steps_per_env, len(self._indices)), np.float32)
        first = np.zeros(rewards.shape, bool)
        with self.agent.learning_in_background():
            steps = self._steps()
            for t in range(config.steps_per_env):
                env_steps += config.num_envs  # after this step
                learns = env_steps % config.train_every < config.num_envs
                if learns:
                    self._begin_learning(env_steps)
                actions, step = next(steps)
                rewards[t], first[t] = step.reward, step.first
                replay.act(actions)
                replay.show(step)
                if learns:
                    session.advance_to(env_steps)
                    if config.most_gradient_steps > 1:
                        self._finish_learning()
            self._finish_learning()
        played = self._runtime.gather_envs(np.stack([rewards, first.astype(np.float32)]))
        self._episodes.add(played[0], played[1].astype(bool))
        session.step += 1
        return self._metrics(self._count(began), self._gradient_steps - before)

    def _steps(self) -> Iterator[tuple[np.ndarray, Step]]:
        """Shows the present observations to the replay; returns an iterator over the iteration's env steps.

        The iterator chooses actions [B, *shape], takes the env step, and yields both. Prefetched steps were
        taken with older weights; the next ones are requested.
        """
        if self._prefetch is None:
            envs: Collector = self.envs  # type: ignore[assignment]  # without a prefetch
            self.replay.show(envs.observe())
            acting = self.agent.acting
            return envs.steps(acting.explore, acting.draw(self._session.step, self._indices))
        self._rollout = self._prefetched(self._prefetch)
        began = self._prefetch.collector.began
        order = np.argsort(began.indices)
        self.replay.resume_round(began.observations[order], began.first[order])
        return self._rollout.steps()

    def _metrics(self, seconds: float, gradient_steps: int) -> dict[str, float]:
        """The metrics of an iteration that took `seconds` and so many gradient steps."""
        config = self._config
        metrics = {name: value / gradient_steps for name, value in self._sums.items()}
        metrics |= self.agent.progress(self.steps_done) | self.episode_metrics()
        metrics |= {
            "replay/size": len(self.replay) * config.num_envs,
            "time/env_steps_per_second": config.iteration_steps / seconds,
            "time/updates_per_second": gradient_steps / seconds,
            "time/rollout_seconds": seconds - sum(self._clock.values()),
            "time/update_seconds": self._clock["learning"],
            "time/replay_seconds": self._clock["replay"],
        }
        if self._prefetch is not None:
            metrics |= self._prefetch.metrics(self._session.step - 1, self._rollout, seconds)
        return metrics

    def _begin_learning(self, env_steps: int) -> None:
        """Starts the gradient steps that are due after so many env steps; waits for all but the last call."""
        clock, due = self._clock, self._config.gradient_steps_due(env_steps)
        while self._gradient_steps < due:
            if self._config.prioritized_replay:  # priorities depend on the errors
                self._finish_learning()
            began = time.perf_counter()
            prepared = self._prepare(env_steps)
            clock["replay"] += time.perf_counter() - began
            self._finish_learning()
            began = time.perf_counter()
            self._pending = prepared, self.agent.begin_gradient_steps(prepared)
            self._gradient_steps += prepared.steps
            clock["learning"] += time.perf_counter() - began

    def _prepare(self, env_steps: int) -> Prepared:
        """The next call of gradient steps, of those that are due after so many env steps."""
        config, agent = self._config, self.agent
        generators = [
            rng.generator(config.seed, rng.Use.REPLAY, self._gradient_steps, i) for i in self._indices
        ]
        # Always as many batches, of which some may be left over: each number would be compiled anew.
        batches, each = config.most_gradient_steps, config.batch_size // config.num_envs
        beta, least = self._beta(env_steps), self._least_share()
        own = each if self._recorded is None else each // 2
        batch = self.replay.sample(generators, batches, own, beta=beta, least=least)
        if self._recorded is not None:
            drawn = [self._recorded.draw(g, (batches, each - own)) for g in generators]
            others = (np.stack(arrays, axis=1) for arrays in zip(*drawn, strict=True))
            batch = Batch(*(np.concatenate(pair, axis=2) for pair in zip(batch, others, strict=True)))
        shape = (batches, each, agent.update_noise)
        noise = np.stack([g.standard_normal(shape, np.float32) for g in generators], axis=1)
        count = min(config.gradient_steps_due(env_steps) - self._gradient_steps, batches)
        done, iteration = self._gradient_steps, self._session.step
        return agent.prepare(batch, noise, steps_done=done, count=count, iteration=iteration)

    def _finish_learning(self) -> None:
        """Waits for the gradient steps that are under way, if any are."""
        if self._pending is None:
            return
        (prepared, results), self._pending = self._pending, None
        began = time.perf_counter()
        metrics, errors = results()
        self._clock["learning"] += time.perf_counter() - began
        self.replay.set_priorities(prepared.rows[: prepared.steps], errors)
        self._sums.update(metrics)
        if not self._has_learned:  # after random steps, thousands a second, turns may take seconds each
            self._has_learned = True
            self._session.console.progress.forget_pace()

    def _least_share(self) -> float | None:
        """The least chance of a row to be drawn for its env, of all envs. A collective."""
        if not self._config.prioritized_replay:
            return None
        return float(self._session.of_workers(self.replay.least_share()).min())

    def _beta(self, env_steps: int) -> float:
        """The exponent of the importance-sampling weights: it grows to 1 by the run's end."""
        config = self._config
        if not config.prioritized_replay:
            return 1.0
        return config.priority_beta + (1.0 - config.priority_beta) * min(1.0, env_steps / config.total_steps)

    def summary(self) -> dict[str, str]:
        """The learner's own rows of the table before training."""
        if self._recorded is None:
            return super().summary()
        text = f"half of each batch: {self._config.dataset}, {self._recorded.in_words()}"
        return {**super().summary(), "data": text}

    # State

    def get_state(self) -> State:
        """The state of the agent, the episodes, the envs and the replay, whose transitions are shards."""
        state = super().get_state()
        state.learner["gradient_steps"] = np.array(self._gradient_steps)
        state.parts[0].update(with_prefix("replay/", self.replay.get_state()))
        return State(state.learner, state.parts, self.replay.shards())

    def set_state(self, state: State) -> None:
        """Restores the state of all workers. Raises UserError like `Learner.set_state`."""
        self._gradient_steps = int(state.learner["gradient_steps"])
        super().set_state(state)
        of_replay = [{**under("replay/", part), "indices": part["indices"]} for part in state.parts]
        self.replay.set_state(of_replay, state.shards)
        self.replay.set_current(*shown_envs(state.parts, self._indices))
