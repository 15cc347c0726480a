"""Exports: plain arrays and a SavedModel for others to use, both free of any strategy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfrl import networks
from tfrl.cli.settings import to_yaml
from tfrl.envs import registry
from tfrl.envs.spec import ActionSpec, Box
from tfrl.networks.weights import WEIGHTS_FILE
from tfrl.ops.graph import graph
from tfrl.run import files
from tfrl.run.arrays import encode
from tfrl.run.folder import SETTINGS_FILE


def export(directory: Path, config: Any, weights: Mapping[str, np.ndarray], *, precision: str) -> None:
    """Writes `weights.npz` (float32, no pickle), the settings, and `policy/`, a SavedModel.

    The SavedModel maps observations [B, *shape], as the env shows them, to a dict: `action`, the most likely
    one, and what else the algorithm's network tells (PPO's: `logits` float32 [B, A], or `parameters` of
    continuous actions, and `value` float32 [B]). Continuous actions are in the env's own units, float32
    [B, D] in [low, high], so that `env.step` takes a row as it is; `parameters` are of the policy over
    [-1, 1]. Discrete ones are integers [B] from the `start` of Gymnasium's space; `logits` begin with it.

    It is made from a network of its own, outside the strategy, so it loads anywhere. All of it is on the disk
    on return.

    Raises OSError.
    """
    files.make_folder(directory)
    files.write(directory / WEIGHTS_FILE, encode(weights))
    files.write(directory / SETTINGS_FILE, to_yaml(dataclasses.replace(config, precision=precision)))
    network = networks.of_settings(config, precision)
    vectors = network.join(weights)
    spec, action_spec = registry.specs(config)
    module = tf.Module()
    module.weights = {name: tf.Variable(vectors[name], trainable=False) for name in network.acting}
    signature = tf.TensorSpec((None, *spec.env_shape), spec.dtype, name="observations")

    def policy(observations: tf.Tensor) -> dict[str, tf.Tensor]:
        if spec.channels_first:
            observations = tf.transpose(observations, (0, 2, 3, 1))
        weights = {name: variable.read_value() for name, variable in module.weights.items()}
        outputs = network.exported(network.outputs(weights, observations))
        return outputs | {"action": _as_env_takes(outputs["action"], action_spec)}

    module.policy = graph(policy, input_signature=[signature])
    with files.replacing(directory / "policy") as staged, files.tensorflow_writes():
        tf.saved_model.save(module, str(staged), signatures=module.policy)


def _as_env_takes(actions: tf.Tensor, spec: ActionSpec) -> tf.Tensor:
    """Actions of a network in the env's own units: [-1, 1] becomes [low, high], and 0 becomes `start`."""
    if not isinstance(spec, Box):
        return actions + spec.start if spec.start else actions
    low, high = (np.asarray(bound, np.float32) for bound in (spec.low, spec.high))
    # Rounding may not take a bound out of an env's of float64.
    low = np.where(low < spec.low, np.nextafter(low, np.float32(np.inf)), low)
    high = np.where(high > spec.high, np.nextafter(high, np.float32(-np.inf)), high)
    return tf.clip_by_value(actions * ((high - low) / 2) + (low + high) / 2, low, high)
