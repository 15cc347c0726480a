"""What a run leaves for others: plain arrays and a SavedModel, both free of any strategy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfrl.cli.settings import to_yaml
from tfrl.config.ppo import Config
from tfrl.networks import actor_critic
from tfrl.run.folder import SETTINGS_FILE


def export(
    directory: Path,
    config: Config,
    weights: Mapping[str, np.ndarray],
    *,
    observation_shape: tuple[int, ...],
    num_actions: int,
    precision: str,
) -> None:
    """Writes `weights.npz` (float32, no pickle), the settings, and `policy/`, a SavedModel.

    The SavedModel maps uint8 observations [B, H, W, C] to a dict: `action` int32 [B], the most likely one,
    `logits` float32 [B, A] to sample from, and `value` float32 [B]. It is made from a network of its own,
    outside the strategy, so it loads anywhere.
    """
    directory.mkdir(parents=True, exist_ok=True)
    staged = directory / "weights.tmp.npz"
    np.savez(staged, **weights)
    staged.replace(directory / "weights.npz")
    (directory / SETTINGS_FILE).write_text(to_yaml(dataclasses.replace(config, precision=precision)))
    network = actor_critic.build(
        torso=config.torso,
        torso_options=config.torso_options,
        observation_shape=observation_shape,
        num_actions=num_actions,
        share_torso=config.share_torso,
        precision=precision,
        seed=config.seed,
    )
    network.set_weights(weights)

    def policy(observations: tf.Tensor) -> dict[str, tf.Tensor]:
        logits, value = network(observations)
        return {"action": network.distribution(logits).mode(), "logits": logits, "value": value}

    module = tf.Module()
    module.network = network
    signature = tf.TensorSpec((None, *observation_shape), tf.uint8, name="observations")
    module.policy = tf.function(policy, input_signature=[signature])
    tf.saved_model.save(module, str(directory / "policy"), signatures=module.policy)
