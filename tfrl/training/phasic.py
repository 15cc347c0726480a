"""The learner of phasic policy gradient: N updates of PPO, then an auxiliary phase in parts.

A part is the old policy's outputs for one rollout, or the gradient steps of one rollout's size, and takes no
longer than an update. The run may be saved or stopped after each part, so a kill loses no more than during
updates.
"""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np

from tfrl.algorithms.algorithm import check_finite
from tfrl.algorithms.ppg import AUXILIARY, Config, PPGAgent
from tfrl.cli.errors import TrainingError, UserError
from tfrl.experience.rollout import Rollout
from tfrl.run import files, rng
from tfrl.run.checkpoint import State, pack_json, unpack_json
from tfrl.run.session import Session
from tfrl.training.learner import MakeAgent
from tfrl.training.on_policy import OnPolicyLearner

_FILE = re.compile(r"(?P<kind>\w+)-(?P<update>\d{8})-envs-(?P<first>\d{7})-(?P<end>\d{7})\.npy")
_LEFT_BY_A_KILL = re.compile(rf"\.{_FILE.pattern}\.tmp\.npy")  # of unfinished files, see `files.replacing`
_CHECKSUM = 4  # bytes of the CRC-32 of all bytes before it
_STATE = "phase"
_NO_SUMS = dict.fromkeys(AUXILIARY, 0.0)


class PhasicLearner(OnPolicyLearner):
    """Updates of PPO and auxiliary phases; the arguments are those of `OnPolicyLearner`."""

    _config: Config
    agent: PPGAgent

    def __init__(self, config: Config, session: Session, make_agent: MakeAgent) -> None:
        super().__init__(config, session, make_agent)
        self._files = PhaseFiles(config.run_dir / "phase", session.runtime.local_envs(config.num_envs))
        # The metrics of the last update of a phase, until its auxiliary phase is done.
        self._held: dict[str, float] | None = None
        self._parts_done = 0
        self._sums = _NO_SUMS  # sums of the metrics of auxiliary steps

    @property
    def _updates(self) -> range:
        """The numbers of the updates of the present phase."""
        length = self._config.policy_updates
        first = self._session.step // length * length
        return range(first, first + length)

    @property
    def _inputs(self) -> tuple[str, ...]:
        """The kinds of files that contain the inputs of the network."""
        return ("observations",) if self._config.memory == "none" else ("observations", "memory")

    @property
    def _parts(self) -> int:
        """The number of parts of an auxiliary phase."""
        return self._config.policy_updates * (1 + self._config.aux_epochs)

    @property
    def steps_within(self) -> int:
        """Env steps of the last update while its auxiliary phase is not finished, all workers together."""
        return 0 if self._held is None else self._config.steps_per_update

    def update(self) -> dict[str, float] | None:
        """Takes an update, or a part of its auxiliary phase; None until the auxiliary phase is finished."""
        return super().update() if self._held is None else self._auxiliary_part(self._held)

    def _end_update(self, metrics: dict[str, float]) -> dict[str, float] | None:
        """Counts the update, except for the last one of a phase, which ends with the auxiliary phase."""
        if self._session.step < self._updates[-1]:
            return super()._end_update(metrics)
        self._held, self._parts_done, self._sums = metrics, 0, _NO_SUMS
        return None

    def learn(self, rollout: Rollout) -> dict[str, float]:
        """Learns like PPO, and keeps the data for the auxiliary phase."""
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
        """Writes arrays [B, T, ...]. Raises TrainingError if that fails, if the disk is full, say."""
        try:
            self._files.add(kind, update, array)
        except TrainingError as error:
            raise TrainingError(f"{error}; {self._session.kept()}") from error

    def _tidy(self) -> None:
        """Removes the rollouts that neither this phase nor a checkpoint needs."""
        self._keep_phases_of({self._session.step, *self._session.saved_steps()})

    def _keep_phases_of(self, steps: Collection[int]) -> None:
        """Removes all rollouts except those of the phases that contain these numbers of updates."""
        length = self._config.policy_updates
        updates = {u for step in steps for u in range(step // length * length, step + 1)}
        if self._session.runtime.is_chief:
            self._files.keep(lambda _, update: update in updates)

    def finish(self) -> None:
        """Removes the rollouts of all phases except an unfinished phase of the last checkpoint."""
        self._keep_phases_of(self._session.saved_steps()[-1:])

    # The auxiliary phase

    def _auxiliary_part(self, metrics: dict[str, float]) -> dict[str, float] | None:
        """Takes the next part of the auxiliary phase, and adds its time to the metrics of the update.

        Counts the update after the last part, and returns the metrics. A collective.
        """
        session, length, began = self._session, self._config.policy_updates, time.perf_counter()
        name = "keeping the policy" if self._parts_done < length else "distilling"
        session.phase(name, f", part {self._parts_done + 1} of {self._parts}")
        if self._parts_done < length:
            self._keep_policy(self._updates[self._parts_done])
        else:
            epoch, share = divmod(self._parts_done - length, length)
            self._learn_share(epoch, share)
        self._parts_done += 1
        seconds = time.perf_counter() - began
        session.watchdog.measured(seconds)
        session.seconds += seconds
        metrics["time/update_seconds"] += seconds
        whole = metrics["time/rollout_seconds"] + metrics["time/update_seconds"]
        metrics["time/env_steps_per_second"] = self._config.steps_per_update / whole
        if self._parts_done < self._parts:
            return None
        self._held = None
        self._files.close()
        count = length * self._config.aux_epochs * self._config.aux_minibatches
        means = {f"train/{name}": total / count for name, total in self._sums.items()}
        return super()._end_update(metrics | means)

    def _keep_policy(self, update: int) -> None:
        """Saves the logits of the policy at the start of the auxiliary phase for one rollout."""
        at_once = self._config.num_steps // self._config.aux_minibatches
        parts = []
        for t in range(0, self._config.num_steps, at_once):
            self._session.watchdog.beat()
            rows = [self._files.stretch(kind, update, t, t + at_once) for kind in self._inputs]  # [B, b, ...]
            logits = self.agent.logits(*map(self._by_replica, rows))
            parts.append(logits.reshape(*rows[0].shape[:2], -1))
        self._keep("logits", update, np.concatenate(parts, axis=1))

    def _learn_share(self, epoch: int, share: int) -> None:
        """Takes one rollout's share of the gradient steps of a pass."""
        config, session, updates = self._config, self._session, self._updates
        each = config.num_steps // config.aux_minibatches
        envs = session.runtime.local_envs(config.num_envs)
        phase, steps = updates.start // len(updates), len(updates) * config.num_steps
        length = config.auxiliary_sequence
        orders = rng.auxiliary_orders(config.seed, phase, epoch, envs, steps // length)
        orders = orders[..., None] * length + np.arange(length)  # the steps of the sequences
        orders = orders.reshape(len(orders), steps)
        begin = share * config.aux_minibatches
        for k in range(begin, begin + config.aux_minibatches):
            session.watchdog.beat()
            at = orders[:, k * each : (k + 1) * each]
            kinds = ("observations", "targets", "logits", *self._inputs[1:])
            batch = (self._by_replica(self._files.take(kind, updates, at)) for kind in kinds)
            metrics = self.agent.auxiliary_step(*batch)
            try:
                named = ((f"train/{name}", value) for name, value in metrics.items())
                check_finite(named, " in the auxiliary phase")
            except TrainingError as error:
                raise TrainingError(f"update {session.step + 1}: {error}; {session.kept()}") from None
            self._sums = {name: total + metrics[name] for name, total in self._sums.items()}

    @property
    def place(self) -> str:
        """The place of the run in messages: an update, such as "update 4", or its auxiliary phase."""
        return super().place.replace("within", "in the auxiliary phase of")

    def _by_replica(self, array: np.ndarray) -> np.ndarray:
        """Reshapes [R * B, b, ...] to [R, B * b, ...]."""
        replicas = self._session.runtime.local_replicas
        return array.reshape(replicas, -1, *array.shape[2:])

    # State

    def begin(self) -> None:
        """Sets the first weights. Removes the files of a run that was killed before its first checkpoint."""
        super().begin()
        self._keep_phases_of(())

    def get_state(self) -> State:
        """PPO's state, and the progress of the auxiliary phase."""
        state = super().get_state()
        progress = {"held": self._held, "parts_done": self._parts_done, "sums": self._sums}
        state.learner[_STATE] = pack_json(progress)
        return state

    def set_state(self, state: State) -> None:
        """Restores the state of all workers; the rollouts of the phase must be on disk.

        Files that are newer than the checkpoint are removed, because the run writes them again. Raises
        UserError like `OnPolicyLearner.set_state`, and on all workers if rollouts are missing.
        """
        super().set_state(state)
        phase = unpack_json(state.learner[_STATE])
        self._held, self._parts_done, self._sums = phase["held"], phase["parts_done"], phase["sums"]
        first = self._updates.start
        taken = self._session.step + (self._held is not None)
        distilled = first + min(self._parts_done, len(self._updates)) if self._held else first
        ends = {**dict.fromkeys((*self._inputs, "targets"), taken), "logits": distilled}
        if not self.is_over:
            self._check_rollouts({kind: range(first, end) for kind, end in ends.items()})
        if self._session.runtime.is_chief:
            self._files.keep(lambda kind, update: update < ends.get(kind, taken))

    def _check_rollouts(self, updates: Mapping[str, range]) -> None:
        """Raises UserError on all workers if one of them lacks files of these updates."""
        failure: UserError | None = None
        try:
            for kind, wanted in updates.items():
                for update in wanted:
                    self._files.get(kind, update)
        except UserError as error:
            failure = error
        if self._session.runtime.any_worker(failure is not None):
            raise failure or UserError(
                f"another worker cannot read the rollouts in {self._config.run_dir / 'phase'}, which are "
                "needed to resume its phase; choose another --run-name."
            )


class PhaseFiles:
    """This worker's files of a phase, with the arrays of many updates, mapped into memory.

    The operating system caches what fits into memory. A file belongs to one update and one worker, and is
    written once and atomically. A resumed run reads the files of any number of workers. The format is
    NumPy's, with a checksum after the array, which `numpy.load` ignores.

    Args:
      folder: the folder of all workers' files; created with the first file.
      envs: the global indices of this worker's envs.
    """

    def __init__(self, folder: Path, envs: range) -> None:
        self._folder = folder
        self._envs = envs
        self._open: dict[tuple[str, int], list[np.ndarray]] = {}

    def add(self, kind: str, update: int, array: np.ndarray) -> None:
        """Writes [B, T, ...], a row for each of this worker's envs. Raises TrainingError on failure."""
        name = f"{kind}-{update:08d}-envs-{self._envs.start:07d}-{self._envs.stop:07d}.npy"
        self._open.pop((kind, update), None)
        try:
            files.make_folder(self._folder)
            with files.replacing(self._folder / name) as staged:
                # Contiguous, because NumPy writes a transposed array element by element.
                np.save(staged, np.ascontiguousarray(array), allow_pickle=False)
                with staged.open("ab") as file:
                    file.write(_checksum(np.memmap(staged, np.uint8, mode="r")))
        except OSError as error:
            reason = files.reason(error)
            raise TrainingError(f"{self._folder} cannot hold the rollouts of a phase: {reason}") from error

    def get(self, kind: str, update: int) -> list[np.ndarray]:
        """The rows of this worker's envs: arrays [B_i, T, ...] from the files that contain them, in order.

        The arrays are mapped into memory, and read at their use. Raises UserError if files are missing or
        damaged.
        """
        key = kind, update
        if key not in self._open:
            self._open[key] = self._load(kind, update)
        return self._open[key]

    def stretch(self, kind: str, update: int, begin: int, end: int) -> np.ndarray:
        """Time steps `begin` ... `end` - 1 of an update, [B, end - begin, ...], in memory."""
        return np.concatenate([array[:, begin:end] for array in self.get(kind, update)])

    def take(self, kind: str, updates: range, steps: np.ndarray) -> np.ndarray:
        """Rows [B, b, ...] at `steps` int [B, b], which count the time steps of all `updates` in order."""
        files_of = [self.get(kind, update) for update in updates]
        _, length, *shape = files_of[0][0].shape
        taken = np.empty((*steps.shape, *shape), files_of[0][0].dtype)
        which, t = np.divmod(steps, length)
        for k, arrays in enumerate(files_of):
            first = 0
            for array in arrays:
                rows = slice(first, first + len(array))
                env, place = np.nonzero(which[rows] == k)
                taken[rows][env, place] = array[env, t[rows][env, place]]
                first += len(array)
        return taken

    def keep(self, is_needed: Callable[[str, int], bool]) -> None:
        """Removes files that are not needed, by kind and update, and unfinished files.

        The chief calls it while no worker writes such files.
        """
        for path in list(self._folder.glob("*.npy")):
            found = _FILE.fullmatch(path.name) or _LEFT_BY_A_KILL.fullmatch(path.name)
            if found and not is_needed(found["kind"], int(found["update"])):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes all files."""
        self._open.clear()

    def _load(self, kind: str, update: int) -> list[np.ndarray]:
        wanted, arrays = self._envs.start, []
        while wanted < self._envs.stop:
            path, first, end = self._holding(kind, update, wanted)
            try:
                array = _read(path)
            except (OSError, ValueError, EOFError):
                raise UserError(
                    f"{path} is damaged, so the run cannot resume its phase; choose another --run-name."
                ) from None
            arrays.append(array[wanted - first : self._envs.stop - first])
            wanted = end
        return arrays

    def _holding(self, kind: str, update: int, env: int) -> tuple[Path, int, int]:
        """The file that has `env`, and the range of its envs."""
        for path in self._folder.glob(f"{kind}-{update:08d}-envs-*.npy"):
            found = _FILE.fullmatch(path.name)
            if found and int(found["first"]) <= env < int(found["end"]):
                return path, int(found["first"]), int(found["end"])
        raise UserError(
            f"{self._folder} lacks rollouts of update {update + 1}, which are needed to resume its phase; "
            "choose another --run-name."
        )


def _read(path: Path) -> np.ndarray:
    """The array of a file, mapped into memory. Raises OSError, ValueError or EOFError if it is damaged."""
    content = np.memmap(path, np.uint8, mode="r")
    if _checksum(content[:-_CHECKSUM]) != content[-_CHECKSUM:].tobytes():
        raise ValueError("the checksum does not match")
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _checksum(content: np.ndarray) -> bytes:
    """The checksum of uint8 [n]."""
    return zlib.crc32(content.data).to_bytes(_CHECKSUM, "little")
