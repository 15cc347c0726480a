"""Algorithms that learn from recorded data: gradient steps on a set, and evaluations in an env."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import math
import time
import zlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfrl.algorithms.offline import OfflineAgent, OfflineSettings
from tfrl.cli.errors import TrainingError, UserError
from tfrl.envs import registry
from tfrl.experience import recorded
from tfrl.experience.episodes import evaluation_columns, evaluation_results
from tfrl.experience.normalize import ObservationNormalizer
from tfrl.experience.recorded import NO_ENV, Spaces
from tfrl.experience.transitions import Transitions
from tfrl.run import files
from tfrl.run.callbacks import Callback, RunOfCallback
from tfrl.run.checkpoint import State, under, with_prefix
from tfrl.run.folder import DATA_FILE
from tfrl.run.loop import Conclusion
from tfrl.run.session import Session
from tfrl.training.learner import EnvLearner, MakeAgent, next_commands, results_table

_COLUMNS = ("time/updates_per_second", "time/update_seconds", "time/data_seconds")


class OfflineLearner(EnvLearner):
    """One worker's share of the batches. An update is an iteration of --iteration-steps gradient steps.

    The arguments are those of `EnvLearner`. It has no training envs.
    """

    _config: OfflineSettings
    agent: OfflineAgent
    unit = OfflineSettings.counts
    time_columns = _COLUMNS

    def __init__(self, config: OfflineSettings, session: Session, make_agent: MakeAgent) -> None:
        super().__init__(config, session, make_agent)
        self._spaces = Spaces(*registry.specs(config))
        self.transitions = self._read(config.held_shards)
        self._agree_on_the_set()
        self._observations = self.transitions.scaling  # with --start-from, that of the other run
        data = {"name": config.dataset, **self.transitions.summary.results}
        self.callbacks = (*self.callbacks, DataFacts(data))
        share, worker = config.batch_size // session.runtime.num_workers, session.runtime.worker
        self._rows = slice(worker * share, (worker + 1) * share)
        self._sampler = concurrent.futures.ThreadPoolExecutor(1, "batches")
        self._best, self._since = math.inf, 0  # the lowest loss of validation, and iterations since then

    def _read(self, window: int | None) -> Transitions:
        """Reads the whole set once. Raises UserError on all workers if it does not fit the env."""
        config, session = self._config, self._session
        session.phase("reading the data")
        found = recorded.open_set(config.dataset, config.split)
        self.warn_of_other_env(found)
        transitions = Transitions(
            found,
            self._spaces,
            seed=config.seed,
            batch_size=config.batch_size,
            gamma=config.gamma,
            learned_rewards=config.learned_rewards,
            validation=config.validation,
            window=window,
            on_shard=lambda count: session.watchdog.beat(),
        )
        if config.patience and not len(transitions.validation[1]):
            raise UserError(
                f"--patience {config.patience} needs validation episodes, and --validation "
                f"{config.validation:g} of {len(transitions.summary.lengths)} episodes is none; give more."
            )
        return transitions

    def _agree_on_the_set(self) -> None:
        """Holds as much as the worker with the least memory, because batches depend on it. A collective.

        Raises UserError on all workers if their sets differ.
        """
        mine, of_workers = self.transitions, self._session.of_workers
        lengths, sums = mine.summary.lengths, of_workers(math.fsum(mine.summary.returns))
        if np.ptp(of_workers(zlib.crc32(np.array(lengths).tobytes()))) or not np.allclose(sums, sums[0]):
            raise UserError(
                f"--dataset {self._config.dataset} is another set on another worker; give all the same one."
            )
        held = math.inf if mine.is_whole else float(mine.window)
        least = of_workers(held).min()
        if least < held:
            mine.close()
            self.transitions = self._read(int(least))

    def begin(self) -> None:
        """Sets the first weights and the constants of the observations. A collective."""
        super().begin()
        self.agent.set_observation_scaling(self._observations.mean, self._observations.scale)

    def _begin_with(self, state: Mapping[str, np.ndarray]) -> None:
        """Loads the state of another run, with its moments of observations: its weights fit only these."""
        super()._begin_with(state)
        if "observations" in self.agent.network.functions:
            self._observations = ObservationNormalizer(len(self._observations.mean))
            self._load_moments(self._observations, state)

    # Learning

    def update(self) -> dict[str, float]:
        """Takes the gradient steps of an iteration. A collective."""
        config, session, began = self._config, self._session, time.perf_counter()
        session.phase("training")
        each, sums, waited = config.max_gradient_steps_per_call, Counter[str](), 0.0
        first = session.step * config.iteration_steps
        waiting = self._sampler.submit(self._sample, first, each)
        for done in range(first, first + config.iteration_steps, each):
            since = time.perf_counter()
            batch, noise = waiting.result()
            waited += time.perf_counter() - since
            if done + each < first + config.iteration_steps:
                waiting = self._sampler.submit(self._sample, done + each, each)
            try:
                pending = self.agent.begin_gradient_steps(
                    batch, noise, steps_done=done, count=each, iteration=session.step
                )
                sums.update(pending.wait().metrics)
            except TrainingError as error:
                raise TrainingError(f"{error}; {session.kept()}") from None
            session.advance_to(done + each)
        metrics = {name: value / config.iteration_steps for name, value in sums.items()}
        metrics |= self.agent.progress(first + config.iteration_steps)
        session.step += 1
        if self.agent.validation_names:
            metrics |= self._validated()
        seconds = self._count(began)
        return metrics | {
            "time/updates_per_second": config.iteration_steps / seconds,
            "time/update_seconds": seconds,
            "time/data_seconds": waited,
        }

    def _sample(self, first: int, count: int) -> Any:
        return self.transitions.sample(first, count, self.agent.update_noise, self._rows)

    def _validated(self) -> dict[str, float]:
        """The metrics of the validation episodes; notes whether their loss fell."""
        found = self.agent.validate(*self.transitions.validation)
        loss = float(self._session.of_workers(found["validation/loss"])[0])  # all end at the same iteration
        if loss < self._best:
            self._best, self._since = loss, 0
        else:
            self._since += 1
        return found

    @property
    def is_over(self) -> bool:
        """True on all workers at --total-steps, or if --patience is at its end."""
        return self.steps_done >= self._config.run_steps or self._is_patient_no_more

    @property
    def _is_patient_no_more(self) -> bool:
        return 0 < self._config.patience <= self._since

    # Evaluation

    def is_evaluation_due(self, before: tuple[int, int]) -> bool:
        """True if --eval-every or --eval-every-steps has been passed since `before`; never without an env."""
        return self._config.env != NO_ENV and super().is_evaluation_due(before)

    def evaluate(self) -> dict[str, float]:
        """Plays all level sets; nothing without an env."""
        return {} if self._config.env == NO_ENV else super().evaluate()

    # Output for the user

    def episode_metrics(self) -> dict[str, float]:
        """Nothing: there are no training episodes."""
        return {}

    @staticmethod
    def highlights(metrics: Mapping[str, float]) -> list[str]:
        """Speed and the first loss."""
        losses = {name: value for name, value in metrics.items() if name.startswith("train/")}
        if not losses:
            return []
        name, loss = next(iter(losses.items()))
        speed = f"{metrics['time/updates_per_second']:,.0f} gradient steps/s"
        return [speed, f"{name.removeprefix('train/').replace('_', ' ')} {loss:.4g}"]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of progress.csv after the first one, which counts gradient steps."""
        of_evaluations = evaluation_columns(self._config.level_sets)
        return *self.agent.metric_names, *self.agent.validation_names, *of_evaluations, *self.time_columns

    def summary(self) -> dict[str, str]:
        """The learner's own rows of the table before training."""
        config, found = self._config, self.transitions.summary.results
        lines = super().summary()
        text = f"{config.dataset}, {found['episodes']:,} episodes; "
        text += f"to learn from: {self.transitions.in_words()}"
        returns = f"{found['return_mean']:.2f} \u00b1 {found['return_std']:.2f} an episode"
        steps = f"{config.run_steps:,} gradient steps ({config.num_updates:,} iterations)"
        return {"data": text, "its return": returns, **lines, "length": steps}

    def completed(self, stopped: str | None) -> str:
        """The sentence that says that the run is complete, and how to extend it."""
        if stopped is None and self._is_patient_no_more:
            return f"{self._config.run_dir} is complete; with a higher --patience, it would continue."
        return super().completed(stopped)

    # State

    def get_state(self) -> State:
        """The state of the agent, and what tells the set from another one."""
        found = self.transitions.summary
        state = self.agent.get_state()
        state |= with_prefix("observations/", self._observations.get_state())
        state |= {
            "recorded/set": np.array([len(found.lengths), found.steps, sum(found.returns)]),
            "recorded/window": np.array(self.transitions.window),
            "recorded/validated": np.array([self._best, self._since]),
        }
        return State(state, [{}])

    def set_state(self, state: State) -> None:
        """Restores the state of all workers. Raises UserError like `Learner.set_state`."""
        try:
            self.agent.set_state(state.learner)
        except (ValueError, KeyError):
            raise UserError(
                f"the checkpoints in {self._config.run_dir} belong to another network; choose another "
                "--run-name."
            ) from None
        there, found = under("recorded/", state.learner), self.transitions.summary
        if not np.array_equal(there["set"], [len(found.lengths), found.steps, sum(found.returns)]):
            raise UserError(
                f"the set {self._config.dataset} has changed since {self._config.run_dir} began: it has "
                f"{len(found.lengths):,} episodes now, and had {int(there['set'][0]):,}; give the same set, "
                "or choose another --run-name."
            )
        if int(there["window"]) != self.transitions.window:  # this machine has another memory
            self.transitions.close()
            self.transitions = self._read(int(there["window"]))
        self._best, self._since = float(there["validated"][0]), int(there["validated"][1])
        self._observations.set_state(under("observations/", state.learner))

    # The end

    def close(self) -> None:
        """Ends the threads that read and draw."""
        self._sampler.shutdown(cancel_futures=True)
        self.transitions.close()

    def results(self, metrics: Mapping[str, float], evaluation: Mapping[str, float]) -> dict[str, Any]:
        """The entries of results.json about the settings and the results of the training."""
        config, session = self._config, self._session
        names = self.agent.validation_names
        return {
            "algorithm": config.algorithm,
            "env": config.env,
            "seed": config.seed,
            "env_steps": self.steps_done,
            "gradient_steps": self.steps_done,
            "updates": session.step,
            "seconds": session.seconds,
            "gradient_steps_per_second": self.steps_done / max(session.seconds, 1e-9),
            "dataset": {"name": config.dataset, **self.transitions.summary.results},
            "validation": {n.removeprefix("validation/"): metrics[n] for n in names if n in metrics},
            "eval": evaluation_results(config, evaluation),
            "started_from": session.started_from,
            **self.agent.results,
        }

    def conclusion(self, outcome: Mapping[str, Any], stopped: str | None) -> Conclusion:
        """The reason for the end of the run, the returns, and commands that show them."""
        sentences = []
        if stopped is not None:
            sentences.append(f"Ended after {self.steps_done:,} gradient steps: {stopped}.")
        elif self._is_patient_no_more:
            sentences.append(
                f"Ended after {self.steps_done:,} gradient steps: the loss of validation has not fallen for "
                f"--patience {self._config.patience} iterations."
            )
        data = outcome["dataset"]
        shown = {"return": data["return_mean"], "episodes": data["episodes"], "normalized_return": None}
        return Conclusion(
            sentences, *results_table(outcome, {"the data": shown}), next_commands(self._config)
        )


class DataFacts(Callback):
    """Writes the facts about the set into the run's folder, on the chief, for reports."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._facts = facts

    def on_start(self, run: RunOfCallback) -> None:
        """Writes the file. If the disk is full, reports do not show the set."""
        if run.is_chief:
            with contextlib.suppress(OSError):
                files.write(run.folder / DATA_FILE, json.dumps(self._facts, indent=2) + "\n")
