"""Trained policies: finds their weights in the folder of a run or of an export, and acts with them.

Only `Policy` needs TensorFlow.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tfrl.algorithms.acting import Behavior
from tfrl.cli.errors import UserError
from tfrl.cli.flags import shown
from tfrl.cli.settings import SETTINGS_FILE, Precision
from tfrl.cli.streams import tell
from tfrl.config import of_run
from tfrl.config.run import RLSettings
from tfrl.envs import registry
from tfrl.experience import memory
from tfrl.experience.memory import Memory
from tfrl.networks.weights import PREFIX, WEIGHTS_FILE, weights_of
from tfrl.ops.graph import graph, tf
from tfrl.run import files
from tfrl.run.checkpoint import CheckpointStore, encode, pack_json, unpack_json
from tfrl.run.folder import BEST_FILE, read_results
from tfrl.workers import parts
from tfrl.workers.strategy import resolve_precision, set_up_tensorflow

# The weights of a run

_INFO = "info"


@dataclass(frozen=True)
class PolicySource:
    """The weights of a policy.

    Attributes:
      config: the run's settings.
      weights: float32 arrays by name.
      name: the checkpoint, in words.
      env_steps: the length of the training.
    """

    config: RLSettings
    weights: dict[str, np.ndarray]
    name: str
    env_steps: int


def _warn(sentence: str) -> None:
    tell(f"warning: {sentence}")


def find(path: Path, checkpoint: str, warn: Callable[[str], None] = _warn) -> PolicySource:
    """Finds a policy in the folder of a run or of an export.

    Args:
      path: the folder.
      checkpoint: "last", "best" or the number of an update; an export has only "last".
      warn: called with a sentence for each damaged checkpoint; by default it writes to stderr.

    Raises:
      UserError: the folder is not one of a run, or the checkpoint is missing or damaged.
    """
    number = re.fullmatch("[0-9]{1,15}", checkpoint)
    if checkpoint not in ("last", "best") and not number:
        given = shown(checkpoint)
        raise UserError(f"--checkpoint must be last, best or the number of an update; got {given}.")
    config = of_run(path)
    if checkpoint == "best":
        return _best(path, config)
    store = CheckpointStore(path / "checkpoints", keep=1)
    if number:
        found = store.load(warn, int(checkpoint))
    elif store.updates():
        found = store.load(warn)
    else:
        return _exported(path, config)
    if found is None:
        raise UserError(f"{path} has no checkpoint of update {checkpoint}.")
    return PolicySource(config, weights_of(found.learner), f"update {found.update}", found.env_steps)


def has_policy(run: Path) -> bool:
    """True if a run's folder has a checkpoint or an export, even a damaged one."""
    exported = any(file.is_file() for file in _exports(run))
    return exported or bool(CheckpointStore(run / "checkpoints", keep=1).updates())


def _exports(path: Path) -> tuple[Path, Path]:
    """The files that have the weights in a run's folder, and in an export's folder."""
    return path / "export" / WEIGHTS_FILE, path / WEIGHTS_FILE


def keep(run: Path, place: Path, weights: Mapping[str, np.ndarray]) -> None:
    """Writes weights and the settings of their run into a folder, in which `find` finds an export.

    Raises OSError.
    """
    files.make_folder(place)
    for name in (SETTINGS_FILE, registry.FACTS_FILE):
        if (run / name).is_file():
            files.write(place / name, (run / name).read_text(encoding="utf-8"))
    files.write(place / WEIGHTS_FILE, encode(weights))


def keep_best(run: Path, weights: Mapping[str, np.ndarray], *, score: float, env_steps: int) -> None:
    """Saves these weights as the run's best unless an earlier evaluation scored higher.

    Args:
      run: the run's folder.
      weights: float32 arrays by name.
      score: the mean return on unseen levels.
      env_steps: the env steps of the run so far.

    Raises:
      OSError: they cannot be written; the earlier best weights stay.
    """
    path = run / BEST_FILE
    info = _read(path).get(_INFO) if path.is_file() else None
    before = {} if info is None else unpack_json(info)
    # Best weights of later env steps are from before the run resumed from an earlier checkpoint.
    if before and before["env_steps"] < env_steps and before["score"] >= score:
        return
    files.make_folder(path.parent)
    arrays = {f"{PREFIX}{name}": value for name, value in weights.items()}
    info = pack_json({"score": score, "env_steps": env_steps})
    files.write(path, encode({**arrays, _INFO: info}))


def _best(path: Path, config: RLSettings) -> PolicySource:
    file = path / BEST_FILE
    if not file.is_file():
        raise UserError(f"{path} has no best checkpoint yet: an evaluation (--eval-every) makes one.")
    arrays = _read(file)
    if _INFO not in arrays:
        raise UserError(f"{file} is damaged; take another --checkpoint.")
    return PolicySource(config, weights_of(arrays), "best", unpack_json(arrays[_INFO])["env_steps"])


def _exported(path: Path, config: RLSettings) -> PolicySource:
    for file in _exports(path):
        if file.is_file():
            weights = _read(file)
            if not weights:
                raise UserError(f"{file} is damaged; export the run again.")
            run = path.parent if path.name == "export" else path
            steps = (read_results(run) or {}).get("env_steps")
            if not isinstance(steps, int):
                steps = config.run_steps
            return PolicySource(config, weights, "export", steps)
    raise UserError(f"{path} has no policy: no checkpoint, and no export/{WEIGHTS_FILE}.")


def _read(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an npz file; empty if it is damaged."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return {}


# Acting


class Policy(Behavior):
    """Acts with the weights of a run, for any number of envs; implements `tfrl.evaluation.episodes.Player`.

    Args:
      source: the weights and settings.
      precision: of the torso; "run": that of the run.
      greedy: take the most likely actions instead of drawing them.

    Attributes:
      precision: the same, "float32" or "bfloat16".
      probabilities: a function from observations to the probabilities of all actions, float32 [B, A]; None
        for continuous actions and recurrent policies.

    Raises UserError if the settings describe another network than the weights belong to.
    """

    def __init__(
        self, source: PolicySource, precision: Precision | Literal["run"] = "run", *, greedy: bool = False
    ) -> None:
        set_up_tensorflow()
        if not tf.config.list_physical_devices("GPU"):
            parts.one_thread_each()
        config = source.config
        wanted = config.precision if precision == "run" else precision
        self.precision = resolve_precision(wanted, small=config.small_network)
        super().__init__(config, self.precision, at_once=parts.cores())
        self.draw_noise = self.acting.network.draw_noise
        self._greedy = greedy
        self.probabilities: Callable[[np.ndarray], np.ndarray] | None = None
        if self.acting.network.has_probabilities and self.memory(1) is None:
            of_rows = graph(lambda o: self.acting.network.probabilities(self.acting.outputs(o)))
            self.probabilities = lambda observations: of_rows(tf.convert_to_tensor(observations)).numpy()
        self.set_weights(source.weights)

    def memory(self, envs: int) -> Memory | None:
        """Makes the memory of this number of envs; None if the network is not recurrent."""
        return memory.of_settings(self._config, envs)

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Acts with these weights from now on. Raises UserError if they belong to another network."""
        try:
            super().set_weights(weights)
        except ValueError as error:
            raise UserError(f"{error}, so they do not fit the settings of this run.") from None

    def act(self, observations: np.ndarray, noise: np.ndarray, *memory: np.ndarray) -> Any:
        """Actions [B, *shape] for observations [B, *shape] and noise float32 [B, K].

        A recurrent policy also takes its memory [B, M], and returns a pair: actions, and states [B, S].
        """
        with tf.device(self._device):
            return self.acting.choose(observations, None if self._greedy else noise, *memory)
