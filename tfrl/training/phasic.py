"""Phasic policy gradient's learner: updates of PPO, and an auxiliary phase in parts after every N of them.

A part takes no longer than an update: the old policy of one rollout, or a rollout's share of gradient steps.
After each one the trainer may save or stop, so that a kill costs no more than among the updates.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from tfrl.algorithms.ppg import AUXILIARY, Config, PPGAgent
from tfrl.cli.errors import TrainingError, UserError
from tfrl.experience.phase import PhaseFiles, check_disk
from tfrl.experience.rollout import Rollout
from tfrl.run import rng
from tfrl.run.checkpoint import CheckpointShard, num_bytes, pack_json, unpack_json
from tfrl.run.loop import Update
from tfrl.run.session import Session
from tfrl.training.on_policy import MakeAgent, OnPolicyLearner

_STATE = "phase"
_NO_SUMS = [0.0] * len(AUXILIARY)


class PhasicLearner(OnPolicyLearner):
    """Updates of PPO and auxiliary phases; the arguments are those of `OnPolicyLearner`."""

    _config: Config
    agent: PPGAgent

    def __init__(self, config: Config, session: Session, make_agent: MakeAgent) -> None:
        super().__init__(config, session, make_agent)
        self._files = PhaseFiles(config.run_dir / "phase", session.runtime.local_envs(config.num_envs))
        self._held: Update | None = None  # of the last update of a phase, until its auxiliary phase is done
        self._parts_done = 0
        self._sums = _NO_SUMS  # of the auxiliary steps' metrics

    @property
    def _updates(self) -> range:
        """The updates of the present phase, by their numbers."""
        length = self._config.policy_updates
        first = self._session.step // length * length
        return range(first, first + length)

    @property
    def _inputs(self) -> tuple[str, ...]:
        """The kinds of files that the network's inputs are in."""
        return ("observations",) if self._config.memory == "none" else ("observations", "memory")

    @property
    def _parts(self) -> int:
        """The parts of an auxiliary phase."""
        return self._config.policy_updates * (1 + self._config.aux_epochs)

    @property
    def steps_within(self) -> int:
        """Env steps of an update whose auxiliary phase is not done, all workers together."""
        return 0 if self._held is None else self._config.steps_per_update

    def update(self) -> Update | None:
        """An update, or a part of the auxiliary phase that belongs to it: then None, until it is done."""
        if self._held is None:
            update = self.take()
            if self._session.step < self._updates[-1]:
                self._session.step += 1
                return update
            self._held, self._parts_done, self._sums = update, 0, _NO_SUMS
            return None
        self._auxiliary_part(self._held)
        if self._parts_done < self._parts:
            return None
        update, self._held = self._held, None
        self._files.forget(self._updates)
        self._session.step += 1
        steps = self._parts // (1 + self._config.aux_epochs) * self._config.aux_epochs
        means = np.array(self._sums) / (steps * self._config.aux_minibatches)
        metrics = update.metrics | dict(zip(AUXILIARY, means.tolist(), strict=True))
        return dataclasses.replace(update, metrics=metrics)

    def learn(self, rollout: Rollout) -> dict[str, float]:
        """Learns as PPO does, and keeps what the auxiliary phase will learn from."""
        metrics = super().learn(rollout)
        self._tidy()
        observations = rollout.by_env(rollout.observations[:, :-1])  # [T, B, ...]
        arrays = {"observations": observations, "targets": rollout.by_env(self.agent.targets)}
        if rollout.memory is not None:
            remembered = [rollout.started_memory[:, :-1], rollout.keeps[:, :-1, :, None]]
            arrays["memory"] = rollout.by_env(np.concatenate(remembered, axis=-1))
        for kind, array in arrays.items():
            self._keep(kind, self._session.step, array.swapaxes(0, 1))
        return metrics

    def _keep(self, kind: str, update: int, array: np.ndarray) -> None:
        """Writes [B, T, ...]; where the disk is full, once more without what is not needed any longer.

        Raises TrainingError if it is full even so.
        """
        try:
            self._files.add(kind, update, array)
        except TrainingError:
            self._tidy()
            try:
                self._files.add(kind, update, array)
            except TrainingError as error:
                raise TrainingError(f"{error}; {self._session.kept()}") from error

    def _tidy(self) -> None:
        """Removes the rollouts that neither this phase nor a checkpoint needs."""
        self._keep_phases_of({self._session.step, *self._session.saved_steps()})

    def _keep_phases_of(self, steps: Collection[int]) -> None:
        """Removes all rollouts but those of the phases that runs of so many updates are in."""
        length = self._config.policy_updates
        updates = {u for step in steps for u in range(step // length * length, step + 1)}
        if self._session.runtime.is_chief:
            self._files.keep(lambda _, update: update in updates)

    def finish(self) -> None:
        """Removes the rollouts of all phases but the one that the last checkpoint is within, if it is."""
        self._keep_phases_of(self._session.saved_steps()[-1:])

    # The auxiliary phase

    def _auxiliary_part(self, held: Update) -> None:
        """The next part. A collective."""
        session, length, began = self._session, self._config.policy_updates, time.perf_counter()
        name = "keeping the policy" if self._parts_done < length else "distilling"
        session.phase(name, f", part {self._parts_done + 1} of {self._parts}")
        if self._parts_done < length:
            self._keep_policy(self._updates[self._parts_done])
        else:
            epoch, share = divmod(self._parts_done - length, length)
            self._learn_share(epoch, share)
        self._parts_done += 1
        session.console.part(self.position, {})
        seconds = time.perf_counter() - began
        session.watchdog.measured(seconds)
        session.seconds += seconds
        metrics = held.metrics
        metrics["time/update_seconds"] += seconds
        whole = metrics["time/rollout_seconds"] + metrics["time/update_seconds"]
        metrics["time/env_steps_per_second"] = self._config.steps_per_update / whole

    def _keep_policy(self, update: int) -> None:
        """Keeps the logits of the policy, as the phase finds it, for one rollout."""
        at_once = self._config.num_steps // self._config.aux_minibatches
        parts = []
        for t in range(0, self._config.num_steps, at_once):
            self._advance_to(t / self._config.num_steps)
            rows = [self._files.stretch(kind, update, t, t + at_once) for kind in self._inputs]  # [B, b, ...]
            logits = self.agent.logits(*map(self._by_replica, rows))
            parts.append(logits.reshape(*rows[0].shape[:2], -1))
        self._keep("logits", update, np.concatenate(parts, axis=1))

    def _learn_share(self, epoch: int, share: int) -> None:
        """A rollout's share of the gradient steps of a pass."""
        config, session, updates = self._config, self._session, self._updates
        each = config.num_steps // config.aux_minibatches
        envs = session.runtime.local_envs(config.num_envs)
        phase, steps = updates.start // len(updates), len(updates) * config.num_steps
        length = config.auxiliary_sequence
        orders = rng.auxiliary_orders(config.seed, phase, epoch, envs, steps // length)
        orders = orders[..., None] * length + np.arange(length)  # steps of sequences
        orders = orders.reshape(len(orders), steps)
        begin = share * config.aux_minibatches
        for k in range(begin, begin + config.aux_minibatches):
            self._advance_to((k - begin) / config.aux_minibatches)
            at = orders[:, k * each : (k + 1) * each]
            kinds = ("observations", "targets", "logits", *self._inputs[1:])
            batch = (self._by_replica(self._files.take(kind, updates, at)) for kind in kinds)
            metrics = self.agent.auxiliary_step(*batch)
            if not np.isfinite(metrics).all():
                raise TrainingError(
                    f"update {session.step + 1}: {AUXILIARY[int(np.isfinite(metrics).argmin())]} is not a "
                    f"finite number in the auxiliary phase; {session.kept()}"
                )
            self._sums = [total + float(x) for total, x in zip(self._sums, metrics, strict=True)]

    def _advance_to(self, share: float) -> None:
        """Moves the console within a part of the auxiliary phase."""
        self._session.watchdog.beat()
        self._session.console.advance_to(self._at(share))

    def _at(self, share: float) -> float:
        """The env steps to show: the auxiliary phase and the update before it share those of an update."""
        if self._session.step == self._updates[-1]:
            done = 0 if self._held is None else 1 + self._parts_done
            share = self._passes(done + share) / self._passes(1 + self._parts)
        return super()._at(share)

    def _passes(self, parts: float) -> float:
        """The passes through torsos of so many parts of a phase's end: its last update, which is one, and on.

        A gradient is worth three, and keeping the old policy passes through its torso alone.
        """
        config, torsos = self._config, 1 if self._config.share_torso else 2
        update, distilled = torsos * (1 + 3 * config.epochs), parts - 1 - config.policy_updates
        kept = min(max(parts - 1, 0), config.policy_updates)
        return update * min(parts, 1) + kept + 3 * torsos * max(distilled, 0)

    @property
    def place(self) -> str:
        """The place of the run, for people: "update 4", or in whose auxiliary phase."""
        return super().place.replace("within", "in the auxiliary phase of")

    @property
    def position(self) -> float:
        """The env steps to show as done, with the share of the last update that its auxiliary phase has."""
        return self._at(0.0)

    def work(self, env_steps: float) -> float:
        """The time that a run of so many env steps takes with its auxiliary phases, in updates."""
        config = self._config
        auxiliary = self._passes(1 + self._parts) / self._passes(1) - 1
        updates = env_steps / config.steps_per_update
        phases, updates_within = divmod(updates, config.policy_updates)
        of_last = max(0.0, updates_within - (config.policy_updates - 1))  # its time is spread over the phase
        return updates + (phases + of_last) * auxiliary

    def _by_replica(self, array: np.ndarray) -> np.ndarray:
        """[R * B, b, ...] as [R, B * b, ...]."""
        replicas = self._session.runtime.local_replicas
        return array.reshape(replicas, -1, *array.shape[2:])

    # State

    def begin(self) -> None:
        """Does as PPO's, without what a run that was killed before its first checkpoint has left."""
        super().begin()
        self._keep_phases_of(())
        self._check_disk()

    def _check_disk(self) -> None:
        """Raises UserError on all workers if there is no room for checkpoints beside the rollouts."""
        failure: UserError | None = None
        try:
            check_disk(self._config, num_bytes(self.agent.get_state()))
        except UserError as error:
            failure = error
        self._agree(failure, f"another worker finds no room on the disk of {self._config.run_dir}.")

    def _agree(self, failure: UserError | None, of_others: str) -> None:
        """Raises UserError on all workers if one of them has failed: its own, or a sentence. A collective."""
        if self._session.runtime.any_worker(failure is not None):
            raise failure or UserError(of_others)

    def get_state(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """PPO's, and how far the auxiliary phase is."""
        state, part = super().get_state()
        held = None if self._held is None else dataclasses.asdict(self._held)
        state[_STATE] = pack_json({"held": held, "parts_done": self._parts_done, "sums": self._sums})
        return state, part

    def set_state(
        self,
        state: Mapping[str, np.ndarray],
        parts: Sequence[Mapping[str, np.ndarray]],
        shards: Sequence[CheckpointShard] = (),
    ) -> None:
        """Continues from what `get_state` gave, with the rollouts of the phase, which must be there.

        Files that this checkpoint knows nothing of go: they will be written anew, by other workers perhaps.
        Raises UserError as `OnPolicyLearner.set_state`, and on all workers where rollouts are missing.
        """
        super().set_state(state, parts, shards)
        phase = unpack_json(state[_STATE])
        self._held = None if phase["held"] is None else Update(**phase["held"])
        self._parts_done, self._sums = phase["parts_done"], phase["sums"]
        first = self._updates.start
        taken = self._session.step + (self._held is not None)
        distilled = first + min(self._parts_done, len(self._updates)) if self._held else first
        ends = {**dict.fromkeys((*self._inputs, "targets"), taken), "logits": distilled}
        if not self.is_over:
            self._check_rollouts({kind: range(first, end) for kind, end in ends.items()})
        if self._session.runtime.is_chief:
            self._files.keep(lambda kind, update: update < ends.get(kind, taken))

    def _check_rollouts(self, updates: Mapping[str, range]) -> None:
        """Raises UserError on all workers if one of them lacks files of these updates, by kind."""
        failure: UserError | None = None
        try:
            for kind, wanted in updates.items():
                for update in wanted:
                    self._files.get(kind, update)
        except UserError as error:
            failure = error
        self._agree(
            failure,
            f"another worker cannot read the rollouts in {self._config.run_dir / 'phase'}, which the "
            "checkpoint needs to go on with its phase; choose another --run-name.",
        )
