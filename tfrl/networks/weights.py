"""Weights by name, in files: checkpoints, exports for others, and the torso of a supervised run.

Names are the same in every process and on every topology; arrays are float32. TensorFlow is imported
only when an export is written.
"""

from __future__ import annotations

import dataclasses
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import yaml

from tfrl.cli.errors import UserError
from tfrl.cli.settings import SETTINGS_FILE, Precision, to_yaml
from tfrl.envs import registry
from tfrl.networks.distributions import distribution_for
from tfrl.ops.graph import graph, tf
from tfrl.run import files
from tfrl.run.checkpoint import encode

if TYPE_CHECKING:
    from tfrl.config.run import Network, RLSettings
    from tfrl.networks.actor_critic import ActorCritic

WEIGHTS_FILE = "weights.npz"
"""The name of the file with the weights of an export."""
PREFIX = "weights/"
"""The prefix of the names of weights in a checkpoint."""


def weights_of(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights of a checkpoint by name."""
    return {name.removeprefix(PREFIX): a for name, a in arrays.items() if name.startswith(PREFIX)}


def export(
    directory: Path, config: RLSettings, weights: Mapping[str, np.ndarray], *, precision: Precision
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
    files.make_folder(directory)
    files.write(directory / WEIGHTS_FILE, encode(weights))
    files.write(directory / SETTINGS_FILE, to_yaml(dataclasses.replace(config, precision=precision)))
    if (text := registry.facts_text(config)) is not None:
        files.write(directory / registry.FACTS_FILE, text)
    network = config.make_network(precision)
    vectors = network.join(weights)
    spec, action_spec = registry.specs(config)
    distribution = distribution_for(action_spec)
    module = tf.Module()
    module.weights = {name: tf.Variable(vectors[name], trainable=False) for name in network.acting}
    signature = [
        tf.TensorSpec(
            (None, *part.env_shape), part.env_dtype, name=part.identifier if spec.parts else "observations"
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
    with files.replacing(directory / "policy") as staged, files.tensorflow_writes():
        tf.saved_model.save(module, str(staged), signatures=module.policy)


_TORSO_PREFIX = "torso/"


def check_torso(config: Network) -> None:
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
    if settings.get("per_image_standardization"):
        raise UserError(
            f"--torso-weights {run} was trained on standardised images, but agents see plain images; train "
            "it without --per-image-standardization."
        )


def read_torso(run: str) -> dict[str, np.ndarray]:
    """The torso's weights in a run's folder, by LAYER/WEIGHT; needs no TensorFlow.

    Raises UserError if there are no weights, or if PPO cannot use the weights.
    """
    path = Path(run) / "export" / "weights.npz"
    try:
        with np.load(path, allow_pickle=False) as file:
            names = [name for name in file.files if name.startswith(_TORSO_PREFIX)]
            weights = {name.removeprefix(_TORSO_PREFIX): file[name] for name in names}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        raise UserError(
            f"--torso-weights {run} holds no finished run of resnet.train: {path} cannot be read; "
            "train one with `python -m resnet.train --normalization group`."
        ) from None
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
