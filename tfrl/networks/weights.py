"""Weights by name, in files: exports, the policies of runs, and the weights with which another run begins.

Names are the same in every process and on every topology; arrays are float32. TensorFlow is imported
only when an export is written.
"""

from __future__ import annotations

import dataclasses
import json
import re
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import yaml

import resnet
from tfrl.cli.errors import UserError
from tfrl.cli.flags import flag, shown
from tfrl.cli.settings import SETTINGS_FILE, Precision, to_yaml
from tfrl.cli.streams import tell
from tfrl.config.run import DECIDE_MLP, DECIDE_WEIGHTS, NetworkSettings, RLSettings
from tfrl.envs import registry
from tfrl.envs.facts import FACTS_FILE
from tfrl.networks.distributions import distribution_for
from tfrl.ops.graph import graph, tf
from tfrl.run import files
from tfrl.run.checkpoint import CheckpointStore, decode, encode, pack_json, under, unpack_json, with_prefix
from tfrl.run.folder import BEST_FILE, read_json
from tfrl.run.metrics import PROGRESS_FILE, logged_steps

if TYPE_CHECKING:
    from tfrl.networks.actor_critic import ActorCritic
    from tfrl.run.session import Session  # which imports TensorFlow

WEIGHTS_FILE = "weights.npz"
"""The name of the file with the weights of an export."""
_ABOUT_FILE = "policy.json"  # beside it: the env steps of its training
PREFIX = "weights/"
"""The prefix of the names of weights in a checkpoint."""
AGENT_PREFIX = "agent/"
"""The prefix of the other arrays of an agent: target networks, optimizers and the like."""
_INFO = "info"  # the array of best.npz that has its score and its env steps


def weights_of(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights of a checkpoint by name."""
    return under(PREFIX, arrays)


def _read(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an npz file; empty if it is damaged."""
    try:
        return decode(path.read_bytes())
    except (OSError, ValueError, EOFError, TypeError, RuntimeError, zipfile.BadZipFile):
        return {}


def export(
    directory: Path,
    config: RLSettings,
    weights: Mapping[str, np.ndarray],
    *,
    precision: Precision,
    env_steps: int,
) -> None:
    """Writes `weights.npz` (float32, no pickle), the settings, and `policy/`, a SavedModel.

    The SavedModel maps observations [B, *shape] of the env to a dict: the most likely `action`, and other
    outputs of the network (for PPO: `logits` float32 [B, A], or `parameters` of continuous actions, and
    `value` float32 [B]). Continuous actions are float32 [B, D] in [low, high], the units of `env.step`;
    `parameters` belong to the policy over [-1, 1]. Discrete actions are integers [B] counted from the `start`
    of Gymnasium's space; the first logit belongs to `start`.

    A recurrent policy also takes and returns `state`, float32 [B, M], which is 0 at an episode's first step.
    With --memory-inputs the state ends with the encoded `action` and a 0. Replace this 0 by the action's
    reward, clipped to [-1, 1], before the next call.

    For observations of several arrays, or with action masks, the inputs have names: the keys of the Dict,
    joined by "_", or `observation` for a single array, and `action_mask`. A text is uint8 [B, 64] from
    `observations.word_flags`. Outputs for forbidden actions are -1e9.

    The SavedModel is built outside the strategy, so it loads on any machine. All files are synced to disk at
    the return.

    Raises OSError.
    """
    from resnet.operations import portable

    files.make_folder(directory)
    _write_weights(directory, weights, env_steps)
    files.write(directory / SETTINGS_FILE, to_yaml(dataclasses.replace(config, precision=precision)))
    if (text := registry.facts_text(config)) is not None:
        files.write(directory / FACTS_FILE, text)
    network = config.make_network(precision)
    vectors = network.join(weights)
    spec, action_spec = registry.specs(config)
    distribution = distribution_for(action_spec)
    module = tf.Module()
    module.weights = {name: tf.Variable(vectors[name], trainable=False) for name in network.acting}
    signature = [
        tf.TensorSpec(
            (None, *part.env_shape), part.env_dtype, spec.identifiers[part] if spec.parts else "observations"
        )
        for part in spec.arrays
    ]
    if network.memory_size:
        signature.append(tf.TensorSpec((None, network.memory_size), name="state"))

    def policy(*named: tf.Tensor) -> dict[str, tf.Tensor]:
        shown, memory = named[: len(spec.arrays)], named[len(spec.arrays) :]
        observations = network.entrance.rows(shown)
        weights = {name: variable.read_value() for name, variable in module.weights.items()}
        outputs = network.exported(network.outputs(weights, observations, *memory))
        return outputs | {"action": distribution.as_env_takes(outputs["action"])}

    module.policy = graph(policy, input_signature=signature)
    with portable(), files.replacing(directory / "policy") as staged, files.tensorflow_writes():
        tf.saved_model.save(module, str(staged), signatures=module.policy)


# The weights of a run


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


def warn_on_stderr(sentence: str) -> None:
    """Writes a warning to stderr."""
    tell(f"warning: {sentence}")


def split_checkpoint(folder: str | Path, checkpoint: str = "last") -> tuple[Path, str]:
    """The folder of a run, and the name of a checkpoint: "last", "best" or the number of an update.

    Args:
      folder: the folder of a run or an export, or RUN/checkpoints/update-N, which names the checkpoint, too.
      checkpoint: the checkpoint, if the folder names none.

    Raises UserError if there is no such name, or if both name one.
    """
    path, number = Path(folder), re.fullmatch(r"0*([0-9]{1,15})", checkpoint)
    if checkpoint not in ("last", "best") and not number:
        given = shown(checkpoint)
        raise UserError(f"--checkpoint must be last, best or the number of an update; got {given}.")
    found = re.fullmatch(r"update-0*([0-9]{1,15})", path.name)
    if found is None or path.parent.name != "checkpoints":
        return path, number[1] if number else checkpoint
    if checkpoint != "last":
        raise UserError(f"{folder} is a checkpoint: leave --checkpoint {checkpoint} out.")
    return path.parent.parent, found[1]


class SavedState(NamedTuple):
    """The state of a run's agent, or only its weights, as a file of the run has it.

    Attributes:
      arrays: the arrays of a checkpoint; of an export and of the best weights only those of the weights.
      name: the checkpoint, in words.
      env_steps: the length of the training, in env steps or images; None if it is not known.
      update: the number of a checkpoint, otherwise None.
    """

    arrays: dict[str, np.ndarray]
    name: str
    env_steps: int | None
    update: int | None = None


def read_state(run: Path, checkpoint: str, warn: Callable[[str], None] = warn_on_stderr) -> SavedState:
    """Reads a checkpoint of a run, its best weights, or an export, of any trainer.

    Args:
      run, checkpoint: of `split_checkpoint`. The export counts as "last" if there is no checkpoint.
      warn: called with a sentence for each damaged checkpoint; by default it writes to stderr.

    Raises UserError if it is missing or damaged.
    """
    if checkpoint == "best":
        return _best(run)
    store = CheckpointStore(run / "checkpoints", keep=1)
    if checkpoint == "last":
        found = store.load(warn) if store.updates() else None
    else:
        found = store.load(warn, int(checkpoint))
    if found is not None:
        return SavedState(found.learner, f"update {found.update}", found.env_steps, found.update)
    if checkpoint != "last":
        raise UserError(f"{run} has no checkpoint of update {checkpoint}.")
    return _exported(run)


def _best(run: Path) -> SavedState:
    file = run / BEST_FILE
    if not file.is_file():
        raise UserError(f"{run} has no best checkpoint yet: an evaluation (--eval-every) makes one.")
    arrays = _read(file)
    if _INFO not in arrays:
        raise UserError(f"{file} is damaged; take another --checkpoint.")
    return SavedState(arrays, "best", unpack_json(arrays.pop(_INFO))["env_steps"])


def read_evaluated(file: Path, checkpoint: str) -> SavedState:
    """Reads the weights of a file of `keep_evaluated`. Raises UserError if it is damaged."""
    if checkpoint != "last":
        raise UserError(f"{file} holds one policy, so it has no --checkpoint {checkpoint}; leave it out.")
    arrays = _read(file)
    if _INFO not in arrays:
        raise UserError(f"{file} is no policy of a run, or is damaged.")
    return SavedState(arrays, file.stem, unpack_json(arrays.pop(_INFO))["env_steps"])


def _exported(run: Path) -> SavedState:
    for file in _exports(run):
        if file.is_file():
            weights = _read(file)
            if not weights:
                raise UserError(f"{file} is damaged; export the run again.")
            steps = (read_json(file.with_name(_ABOUT_FILE)) or {}).get("env_steps")
            return SavedState(with_prefix(PREFIX, weights), "export", steps)
    raise UserError(f"{run} has no weights: no checkpoint, and no export/{WEIGHTS_FILE}.")


def has_policy(run: Path) -> bool:
    """True if a run's folder has a checkpoint or an export, even a damaged one."""
    exported = any(file.is_file() for file in _exports(run))
    return exported or bool(CheckpointStore(run / "checkpoints", keep=1).updates())


def _exports(path: Path) -> tuple[Path, Path]:
    """The files that have the weights in a run's folder, and in an export's folder."""
    return path / "export" / WEIGHTS_FILE, path / WEIGHTS_FILE


# Weights that a run saves beside its checkpoints


def keep(run: Path, place: Path, weights: Mapping[str, np.ndarray], *, env_steps: int) -> None:
    """Writes weights and the settings of their run into a folder, in which `find_policy` finds an export.

    `env_steps` is the length of their training. Raises OSError.
    """
    files.make_folder(place)
    for name in (SETTINGS_FILE, FACTS_FILE):
        if (run / name).is_file():
            files.write(place / name, (run / name).read_text(encoding="utf-8"))
    _write_weights(place, weights, env_steps)


def _write_weights(place: Path, weights: Mapping[str, np.ndarray], env_steps: int) -> None:
    files.write(place / WEIGHTS_FILE, encode(weights))
    files.write(place / _ABOUT_FILE, json.dumps({"env_steps": env_steps}) + "\n")


def keep_best(
    run: Path, weights: Mapping[str, np.ndarray], *, score: float, env_steps: int, follows: bool = False
) -> None:
    """Saves these weights as the run's best unless an earlier evaluation scored higher.

    Args:
      run: the run's folder.
      weights: float32 arrays by name.
      score: the mean return on unseen levels.
      env_steps: the env steps of the run so far.
      follows: this process follows the checkpoints of a run, which may be ahead of it.

    Raises:
      OSError: they cannot be written; the earlier best weights stay.
    """
    path = run / BEST_FILE
    info = _read(path).get(_INFO) if path.is_file() else None
    before = {} if info is None else unpack_json(info)
    # Otherwise, best weights of later env steps are from before the run resumed from an earlier checkpoint.
    counts = before and (follows or before["env_steps"] < env_steps)
    if counts and before["score"] >= score:
        return
    files.make_folder(path.parent)
    info = pack_json({"score": score, "env_steps": env_steps})
    content = encode({**with_prefix(PREFIX, weights), _INFO: info})
    files.write(path, content, "evaluator" if follows else "")


_KEPT = re.compile(r"\d+_-?\d+\.\d\d\.npz")


def keep_evaluated(
    run: Path, weights: Mapping[str, np.ndarray], *, score: float, env_steps: int, alone: bool
) -> Path:
    """Saves the policy of an evaluation as `policies/STEPS_RETURN.npz`; returns the path.

    The arguments are those of `keep_best`; `alone` removes the policies of other evaluations. Raises OSError.
    """
    path = run / "policies" / f"{env_steps}_{score:.2f}.npz"
    files.make_folder(path.parent)
    info = pack_json({"score": score, "env_steps": env_steps})
    files.write(path, encode({**with_prefix(PREFIX, weights), _INFO: info}))
    for other in path.parent.glob("*.npz") if alone else ():
        if other != path and _KEPT.fullmatch(other.name):
            other.unlink(missing_ok=True)
    return path


# --start-from: a run that starts with the weights of another run


class Start(Protocol):
    """The settings of a run that may start from another run."""

    @property
    def start_from(self) -> str | None:
        """The folder of the other run, or of one of its checkpoints."""

    @property
    def checkpoint(self) -> str:
        """The name of the checkpoint."""

    @property
    def run_dir(self) -> Path:
        """The run's folder."""


def start_folder(config: Start) -> Path:
    """The folder of the run of --start-from. Raises UserError if it is this run itself."""
    run, _ = split_checkpoint(config.start_from or "", config.checkpoint)
    if run.exists() and run.resolve() == config.run_dir.resolve():
        raise UserError(
            f"--start-from {config.start_from} is this run itself; leave it out, or give the new run another "
            "--run-name."
        )
    return run


def check_has_start(config: Start) -> None:
    """Raises UserError if the run of --start-from lacks the checkpoint; it may still be damaged."""
    run, checkpoint = split_checkpoint(config.start_from or "", config.checkpoint)
    name = f"--start-from {config.start_from}"
    updates = CheckpointStore(run / "checkpoints", keep=1).updates()
    if checkpoint == "best" and not (run / BEST_FILE).is_file():
        raise UserError(f"{name} has no best checkpoint yet: an evaluation makes one.")
    if checkpoint.isdecimal() and int(checkpoint) not in updates:
        there = f"it has {', '.join(map(str, updates))}" if updates else "it has none"
        raise UserError(f"{name} has no checkpoint {checkpoint}; {there}.")
    if checkpoint == "last" and not has_policy(run):
        raise UserError(f"{name} has no checkpoint, and no export.")


def check_same_network(name: str, config: RLSettings, there: RLSettings) -> None:
    """Raises UserError if the settings of that run show other weights or another optimizer."""
    if config.network_maker is not there.network_maker:
        raise UserError(
            f"{name} is a run of {there.algorithm}, and {config.algorithm} cannot start from its networks."
        )
    if registry.specs(config) != registry.specs(there):
        raise UserError(
            f"{name} belongs to another network: it was trained on {there.env}, whose observations or "
            f"actions differ from those of {config.env}."
        )
    names = [name for name in (*DECIDE_WEIGHTS, *DECIDE_MLP) if name not in config.ineffective]
    has_classifier = [bool(getattr(each, "order_coef", 0.0)) for each in (there, config)]
    if has_classifier == [False, True]:  # IDAAC starts from DAAC with a new classifier
        names.remove("order_hidden")
    elif has_classifier == [True, False]:
        names.append("order_coef")
    shared = [name for name in names if hasattr(there, name) and hasattr(config, name)]
    pairs = [(name, getattr(there, name), getattr(config, name)) for name in shared]
    if differing := [f"{flag(n)} {old} there, {new} here" for n, old, new in pairs if old != new]:
        raise UserError(f"{name} has another network or optimizer: {'; '.join(differing)}.")


def read_start(config: Start, session: Session) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Reads the checkpoint of --start-from, or its export, equally on all workers. A collective.

    Returns the arrays for `Agent.begin_with`, and what results.json says about their source. An export and
    the best checkpoint give only weights.

    Raises UserError if there are no weights, if all are damaged, or if the workers find different weights.
    """
    run, checkpoint = split_checkpoint(config.start_from or "", config.checkpoint)
    found = read_state(run, checkpoint, session.console.warn)
    if np.ptp(session.of_workers(_checksum(found.arrays))) != 0:
        raise UserError(
            f"the workers do not see the same weights in --start-from {config.start_from}; wait for the end "
            "of that run if it trains."
        )
    steps = found.env_steps
    if steps is None:
        steps = logged_steps(run / PROGRESS_FILE)
    return found.arrays, {"run": config.start_from, "env_steps": steps, "update": found.update}


def _checksum(arrays: Mapping[str, np.ndarray]) -> int:
    """The CRC-32 of all arrays, in the order of their names."""
    checksum = 0
    for name in sorted(arrays):
        checksum = zlib.crc32(np.ascontiguousarray(arrays[name]).data, checksum)
    return checksum


# --torso-weights


def check_torso(config: NetworkSettings) -> None:
    """Raises UserError if the run of --torso-weights does not fit --torso; needs no TensorFlow."""
    run = config.torso_weights or ""
    read_torso(run)
    try:
        settings = yaml.safe_load((Path(run) / SETTINGS_FILE).read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError):
        settings = {}
    model, width = settings.get("model"), settings.get("width", 1)
    # The run has no settings, or those of another trainer; the shapes of its weights are checked later.
    if model is not None and (model, width) != (config.torso, config.torso_width):
        raise UserError(
            f"--torso-weights {run} belongs to another network: give --torso {model} --torso-width "
            f"{width}, as in its training, instead of {config.torso} and {config.torso_width}."
        )
    normalization = settings.get("normalization", "group")
    if model is not None and normalization != "group" and resnet.entry(model).normalization:
        raise UserError(
            f"--torso-weights {run} was trained with --normalization {normalization}, but agents have group; "
            "train it with `python -m resnet.train --normalization group`."
        )
    if config.critic_torso not in (None, config.torso):
        raise UserError(
            f"--torso-weights {run} is for the torsos of both actor and critic: leave --critic-torso "
            f"{config.critic_torso} out."
        )
    if settings.get("preprocess"):
        raise UserError(
            f"--torso-weights {run} was trained with --preprocess {settings['preprocess']}, but agents see "
            "plain images; train it without --preprocess."
        )
    if settings.get("per_image_standardization"):
        raise UserError(
            f"--torso-weights {run} was trained on standardised images, but agents see plain images; train "
            "it without --per-image-standardization."
        )


def read_torso(run: str) -> dict[str, np.ndarray]:
    """The torso's weights in a run's folder, by LAYER/WEIGHT; needs no TensorFlow.

    Raises UserError if there are no weights, or if PPO cannot use the weights.
    """
    path = Path(run) / "export" / WEIGHTS_FILE
    found = _read(path)
    if not found:
        raise UserError(
            f"--torso-weights {run} holds no finished run of resnet.train: {path} cannot be read; "
            "train one with `python -m resnet.train --normalization group`."
        )
    weights = under("torso/", found)
    if any(name.endswith("/moving_mean") for name in weights):
        raise UserError(
            f"--torso-weights {run} was trained with batch normalization, which breaks PPO's probability "
            "ratio; train it with `python -m resnet.train --normalization group`."
        )
    if not weights:
        raise UserError(f"--torso-weights {run} has no torso in {path}; give a run of resnet.train.")
    return weights


def torso_vectors(network: ActorCritic, run: str) -> dict[str, np.ndarray]:
    """The vectors of the torsos by name, with the weights of a run.

    Raises UserError if the weights belong to another network.
    """
    weights = read_torso(run)
    try:
        return {name: network.functions[name].join(weights) for name in network.torsos}
    except ValueError as error:
        raise UserError(
            f"--torso-weights {run}: {error}; give that run's --model as --torso and its --width as "
            "--torso-width, and train it on images of this env's size with --normalization group."
        ) from None
