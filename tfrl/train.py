"""The outer loop: collect, update, log, evaluate, save; and exact resume from what was saved."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from tfrl import agreement, distribute, envs, random, results, summary
from tfrl.actor_critic import weights_sha256
from tfrl.agents.ppo import PPOAgent
from tfrl.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    pack_bytes,
    pack_json,
    unpack_bytes,
    unpack_json,
)
from tfrl.config import Config, check_topology
from tfrl.console import Console
from tfrl.distribute import Runtime, StopRequest
from tfrl.envs.games import normalized_return
from tfrl.errors import TrainingError, UserError
from tfrl.export import export
from tfrl.metrics import COLUMNS, MetricsWriter, NullMetricsWriter
from tfrl.normalize import EpisodeStatistics, RewardNormalizer
from tfrl.periodic import Periodic
from tfrl.quiet import quiet_start
from tfrl.rendezvous import rendezvous
from tfrl.rollout import Collector, Rollout
from tfrl.run_folder import SETTINGS_FILE
from tfrl.settings import to_yaml
from tfrl.tf_config import TFConfig
from tfrl.watchdog import Watchdog


def train(config: Config, cluster: TFConfig | None) -> int:
    """Runs or continues the run that `config` describes; the process's exit code.

    Raises:
      UserError: the settings do not fit this machine or cluster, or the checkpoints cannot be read.
      TrainingError: the run failed: a NaN, say.
    """
    console = Console(enabled=cluster is None or cluster.is_chief)
    if cluster is not None:
        with quiet_start():
            mine = agreement.fingerprint(config)
        rendezvous(cluster, mine, config.cluster_timeout, console.message)
        if cluster.cluster.get("evaluator"):
            config = dataclasses.replace(config, eval_every=0)
    with quiet_start():
        runtime = distribute.make(config, cluster)
    check_topology(config, runtime.num_workers, runtime.local_replicas)
    stop = StopRequest(
        config.run_dir / "stop",
        lambda name: console.message(
            f"{name}: saving at the end of this update, then ending; once more ends at once"
        ),
    )
    watchdog = Watchdog(
        config.run_dir / "heartbeats",
        cluster.workers if cluster else ("here",),
        runtime.worker,
        stall_timeout=config.stall_timeout,
    )
    watchdog.start()
    try:
        return Trainer(config, runtime, console, stop, watchdog).run()
    except tf.errors.OpError as error:
        raise distribute.failure(error, runtime.num_workers, watchdog.missing) from error
    finally:
        console.stop()
        stop.restore()


class Trainer:
    """One process's part of a run. All workers go through the same calls in the same order."""

    def __init__(
        self, config: Config, runtime: Runtime, console: Console, stop: StopRequest, watchdog: Watchdog
    ) -> None:
        self._config = config
        self._runtime = runtime
        self._console = console
        self._stop = stop
        self._watchdog = watchdog
        spec = envs.EnvSpec(
            name=config.env,
            num_envs=config.num_envs,
            seed=config.seed,
            distribution_mode=config.distribution_mode,
            num_levels=config.num_levels,
            start_level=config.start_level,
            num_threads=config.env_threads or max(1, min(4, (os.cpu_count() or 1) // 2)),
        )
        self._collector = Collector(
            spec,
            runtime.local_envs(config.num_envs),
            replicas=runtime.local_replicas,
            num_steps=config.num_steps,
        )
        self._agent = _make_agent(config, runtime, self._collector)
        self._normalizer = RewardNormalizer(config.num_envs)
        self._episodes = EpisodeStatistics(config.num_envs)
        self._store = CheckpointStore(
            config.run_dir / "checkpoints",
            keep=config.keep_checkpoints,
            worker=runtime.worker,
            num_workers=runtime.num_workers,
            agree=runtime.all_agree,
        )
        self._update = 0  # finished updates
        self._seconds = 0.0  # of training, in all processes of the run
        self._resumed_at: list[int] = []  # env steps
        self._saved_at = -1
        self._pending: dict[str, float] | None = None  # metrics of an update whose evaluation is not done
        self._evaluation: dict[str, float] = {}

    @property
    def _env_steps(self) -> int:
        return self._update * self._config.batch_size

    def run(self) -> int:
        """Trains to the end or until told to stop; the exit code."""
        config = self._config
        found = self._restore()
        if self._is_complete():
            self._console.message(f"{config.run_dir} is complete; more --total-steps would go on with it.")
            return self._leave(0)
        logged = summary.logged_steps(config.run_dir / "progress.csv")
        self._writer = self._make_writer(found)
        self._periodic = Periodic(
            config, self._runtime, writer=self._writer, phase=self._phase, warn=self._console.warn
        )
        self._console.summary(summary.rows(config, self._runtime, self._agent.num_parameters, found, logged))
        self._console.start(config.num_updates * config.batch_size, self._env_steps)
        if self._pending is not None:  # killed while it evaluated
            self._conclude(self._pending)
        while self._update < config.num_updates:
            self._conclude(self._train_once())
            code = self._stop_code()
            if code is not None or self._update % config.checkpoint_every == 0:
                self._save()
            if code is not None and self._update < config.num_updates:
                return self._end_early(code)
        if not self._evaluation:  # an earlier process was stopped where --total-steps now ends
            self._evaluation = self._evaluate()
        return self._finish()

    def _phase(self, name: str) -> None:
        self._console.phase(name)
        self._watchdog.beat(name, self._update)

    # One update

    def _train_once(self) -> dict[str, float]:
        """Collects, learns, and returns the update's metrics."""
        began = time.perf_counter()
        rollout = self._collect()
        metrics = self._learn(rollout)
        seconds = time.perf_counter() - began
        self._watchdog.measured(seconds)
        self._update, self._seconds = self._update + 1, self._seconds + seconds
        self._writer.histogram("rollout/actions", rollout.actions, self._env_steps)
        sums = self._config.epochs * self._config.num_minibatches
        metrics |= self._runtime.communication(self._update, self._agent.floats_per_minibatch, sums)
        return metrics | {
            "time/env_steps_per_second": self._config.batch_size / seconds,
            "time/rollout_seconds": rollout.seconds,
            "time/update_seconds": seconds - rollout.seconds,
            "time/env_wait_fraction": rollout.env_wait_seconds / rollout.seconds,
        }

    def _conclude(self, metrics: dict[str, float]) -> None:
        """Evaluates if it is time, and writes the update's metrics, once each."""
        config = self._config
        last = self._update == config.num_updates
        if last or (config.eval_every and self._update % config.eval_every == 0):
            # An evaluation takes long, so what it needs is saved first: a kill during it costs nothing else.
            self._pending = metrics
            self._save()
            self._pending = None
            self._evaluation = self._evaluate()
            metrics = metrics | self._evaluation
        if config.record_every and self._update % config.record_every == 0:
            self._periodic.record(self._sample, self._env_steps)
        self._writer.write(self._env_steps, metrics)
        self._console.update(self._env_steps, metrics)

    def _collect(self) -> Rollout:
        """A rollout, with normalised rewards. The console moves with the env steps."""
        config = self._config
        self._phase("collecting")
        start = self._env_steps

        def on_step(t: int) -> None:
            self._watchdog.beat()
            # Collecting is the smaller part of an update's time, about a fifth of it.
            self._console.advance_to(start + 0.2 * config.num_envs * t)

        uniforms = random.action_uniforms(
            config.seed, self._update, self._collector.indices, config.num_steps
        )
        rollout = self._collector.collect(self._agent, uniforms, on_step)
        local = np.stack([_by_env(rollout.rewards), _by_env(rollout.first).astype(np.float32)])
        rewards, first = self._runtime.gather_envs(local)  # [T, N] of all workers
        first = first.astype(bool)
        self._episodes.add(rewards, first)
        if config.normalize_rewards:
            mine = self._normalizer(rewards, first)[:, self._collector.indices]
            rollout.rewards[:] = mine.reshape(config.num_steps, self._runtime.local_replicas, -1).swapaxes(
                0, 1
            )
        return rollout

    def _learn(self, rollout: Rollout) -> dict[str, float]:
        config = self._config
        self._phase("updating")
        steps = random.minibatch_steps(
            config.seed,
            self._update,
            self._collector.indices,
            num_steps=config.num_steps,
            epochs=config.epochs,
            num_minibatches=config.num_minibatches,
        )  # [E, M, B, T / M]
        replicas = self._runtime.local_replicas
        steps = np.moveaxis(steps.reshape(*steps.shape[:2], replicas, -1, steps.shape[-1]), 2, 0)
        rate = config.lr * (1.0 - self._update / config.num_updates if config.anneal_lr else 1.0)
        try:
            metrics = self._agent.update(rollout, steps, rate)
        except TrainingError as error:
            saved = self._store.updates()
            kept = f"the checkpoint of update {saved[-1]} is kept" if saved else "there is no checkpoint yet"
            raise TrainingError(f"update {self._update + 1}: {error}; {kept}") from None
        episode_return = self._episodes.mean_return
        return metrics | {
            "rollout/episode_return": episode_return,
            "rollout/episode_length": self._episodes.mean_length,
            "rollout/normalized_return": self._normalized(episode_return),
            "rollout/episodes": self._episodes.episodes,
        }

    def _normalized(self, episode_return: float) -> float:
        score = normalized_return(self._config.env, self._config.distribution_mode, episode_return)
        return float("nan") if score is None else score

    # Evaluation

    def _evaluate(self) -> dict[str, float]:
        """Returns on training and unseen levels; keeps the weights if they are the best so far."""
        metrics = self._periodic.evaluate(self._sample, self._env_steps)
        weights = self._agent.network.get_weights()
        self._periodic.keep_best(weights, metrics["eval_test/return"], self._env_steps)
        return metrics

    def _sample(self, observations: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
        self._watchdog.beat()
        return self._agent.sample(observations, uniforms)

    # Checkpoints

    def _save(self) -> None:
        """Saves; a disk that is full costs this checkpoint, not the run."""
        if self._saved_at == self._update:
            return
        self._phase("saving")
        self._writer.flush()
        indices, states, observations, first = self._collector.get_state()
        data, lengths = pack_bytes(states)
        progress = {"seconds": self._seconds, "resumed_at": self._resumed_at, "pending": self._pending}
        learner = self._agent.get_state() | {"progress": pack_json(progress)}
        learner |= {f"normalizer/{k}": v for k, v in self._normalizer.get_state().items()}
        learner |= {f"episodes/{k}": v for k, v in self._episodes.get_state().items()}
        part = {"indices": np.array(indices), "states": data, "lengths": lengths}
        part |= {"observations": observations, "first": first}
        try:
            self._store.save(self._update, learner=learner, worker_part=part, env_steps=self._env_steps)
            self._saved_at = self._update
        except CheckpointError as error:
            self._console.warn(f"{error} Training goes on.")

    def _restore(self) -> Checkpoint | None:
        """Continues from the newest valid checkpoint, if there is one; all workers from the same."""
        found = self._store.load(self._console.warn)
        mine = -1 if found is None else found.update
        chosen = -int(-self._oldest_over_workers(mine))
        if chosen != mine:
            found = self._store.load(self._console.warn, chosen) if chosen >= 0 else None
        if found is None:
            return None
        state = found.learner
        self._agent.set_state(state)
        self._normalizer.set_state(_under("normalizer/", state))
        self._episodes.set_state(_under("episodes/", state))
        progress = unpack_json(state["progress"])
        self._update = self._saved_at = found.update
        self._seconds, self._pending = progress["seconds"], progress["pending"]
        self._resumed_at = [*progress["resumed_at"], found.env_steps]
        states = {}
        for part in found.parts:
            packed = unpack_bytes(part["states"], part["lengths"])
            states |= dict(zip(part["indices"].tolist(), packed, strict=True))
        self._collector.set_state(states)
        return found

    def _oldest_over_workers(self, update: int) -> int:
        mine = np.zeros(self._runtime.num_workers, np.int64)
        mine[self._runtime.worker] = update
        return int(self._runtime.sum_over_workers(mine).min())

    # Beginning and end

    def _make_writer(self, found: Checkpoint | None) -> MetricsWriter | NullMetricsWriter:
        if not self._runtime.is_chief:
            return NullMetricsWriter()
        run = self._config.run_dir
        try:
            run.mkdir(parents=True, exist_ok=True)
            # The resolved precision: `auto` may mean another one where the run goes on.
            settings = to_yaml(dataclasses.replace(self._config, precision=self._runtime.precision))
            staged = run / f"{SETTINGS_FILE}.tmp"
            staged.write_text(settings)
            staged.replace(run / SETTINGS_FILE)
        except OSError as error:
            raise UserError(f"cannot write in {run}: {error.strerror}") from None
        resume_at = None if found is None else found.env_steps - (self._pending is not None)
        writer = MetricsWriter(run, COLUMNS, resume_at=resume_at, warn=self._console.warn)
        if found is None:
            command = " ".join(sys.argv)
            writer.text("settings", f"```\n{settings}\n```\n\ncommand: `{command}`", 0)
            writer.layout(dataclasses.asdict(self._config))
        return writer

    def _stop_code(self) -> int | None:
        """The exit code that all workers leave with, if any of them was asked to stop."""
        codes = (143, 130, 0)
        mine = np.array([self._stop.exit_code == c and self._stop.requested() for c in codes], np.int32)
        said = self._runtime.sum_over_workers(mine)
        return next((code for code, votes in zip(codes, said, strict=True) if votes), None)

    def _end_early(self, code: int) -> int:
        self._writer.close()
        self._console.stop()
        saved = self._saved_at == self._update
        where = f"saved at {self._env_steps:,} env steps" if saved else "but it could not be saved"
        self._console.message(f"Stopped, {where}; the same command goes on from its last checkpoint.")
        return self._leave(code if saved else 1)

    def _is_complete(self) -> bool:
        """Whether an earlier process has done all of it, down to results.json."""
        if self._update < self._config.num_updates:
            return False
        written = results.read(self._config.run_dir)
        return written is not None and written.get("weights_sha256") == self._fingerprint()

    def _fingerprint(self) -> str:
        return weights_sha256(self._agent.network.get_weights())

    def _finish(self) -> int:
        """Exports, and writes and shows the results."""
        config, run = self._config, self._config.run_dir
        self._writer.close()
        self._phase("exporting")
        if self._runtime.is_chief:
            outcome = {
                "env": config.env,
                "seed": config.seed,
                "env_steps": self._env_steps,
                "updates": self._update,
                "seconds": self._seconds,
                "env_steps_per_second": self._env_steps / self._seconds,
                "episode_return": self._episodes.mean_return,
                "normalized_return": self._normalized(self._episodes.mean_return),
                "eval": results.evaluation(self._evaluation, config.eval_episodes),
                "workers": self._runtime.num_workers,
                "replicas": self._runtime.replicas,
                "precision": self._runtime.precision,
                "weights_sha256": self._fingerprint(),
                "resumed_at": self._resumed_at,
            }
            try:
                export(
                    run / "export",
                    config,
                    self._agent.network.get_weights(),
                    observation_shape=self._collector.observation_shape,
                    num_actions=self._collector.num_actions,
                    precision=self._runtime.precision,
                )
                results.write(run, outcome)
            except OSError as error:
                raise TrainingError(f"cannot write the results in {run}: {error.strerror}") from None
            self._console.results(*results.table(outcome), [f"tensorboard --logdir {config.logdir}"])
        return self._leave(0)

    def _leave(self, code: int) -> int:
        self._collector.close()
        self._phase("leaving")
        self._runtime.all_agree(True)  # a barrier: whoever leaves first would look like a failure
        self._watchdog.close()
        if (
            self._runtime.is_chief
        ):  # after the barrier, so that all have seen it; it must not end the next run
            (self._config.run_dir / "stop").unlink(missing_ok=True)
        return code


def _make_agent(config: Config, runtime: Runtime, collector: Collector) -> PPOAgent:
    try:
        return PPOAgent(
            config,
            runtime,
            observation_shape=collector.observation_shape,
            num_actions=collector.num_actions,
        )
    except ValueError as error:  # the zoo: an image too small for the network, say
        message = str(error).splitlines()[0]
        raise UserError(f"--torso {config.torso} cannot be built for {config.env}: {message}") from None


def _by_env(array: np.ndarray) -> np.ndarray:
    """[R, T, B] to [T, R * B]: this worker's envs in the order of their global indices."""
    return array.swapaxes(0, 1).reshape(array.shape[1], -1)


def _under(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {k[len(prefix) :]: v for k, v in arrays.items() if k.startswith(prefix)}
