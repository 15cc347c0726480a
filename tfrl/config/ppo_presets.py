"""The presets of PPO, some of which DrAC and PPG have, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Gymnasium envs: rollouts as short as they learn from, a small network for each of policy and value.
_GYMNASIUM = {
    "total_steps": 1_000_000,
    "num_envs": 8,
    "num_steps": 128,
    "epochs": 10,
    "num_minibatches": 8,
    "lr": 3e-4,
    "lr_schedule": "linear",
    "gamma": 0.99,
    "clip_value": False,
    "normalize_observations": True,
    "free_deviation": True,
    "torso": "auto",
    "share_torso": False,
    "eval_greedy": True,
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "openai-easy": {},
    "openai-hard": {
        "distribution_mode": "hard",
        "num_levels": 500,
        "total_steps": 200_000_000,
        "num_envs": 256,
    },
    "cookbook": {
        "num_envs": 8,
        "num_steps": 16,
        "num_minibatches": 1,
        "lr": 1e-4,
        "clip_ratio": 0.1,
        "clip_value": False,
        "gamma": 0.99,
        "normalize_rewards": False,
        "torso": "cookbook",
        "share_torso": False,
    },
    "gymnasium": _GYMNASIUM,
    "pendulum": {
        **_GYMNASIUM,
        "env": "Pendulum-v1",
        "total_steps": 300_000,
        "num_envs": 16,
        "num_steps": 64,
        "lr": 1e-3,
        "gamma": 0.9,
        "entropy_coef": 0.0,
    },
    "torchrl": {
        "env": "InvertedDoublePendulum-v5",
        "total_steps": 50_000,
        "num_envs": 1,
        "num_steps": 1000,
        "epochs": 10,
        "minibatch_size": 64,
        "lr": 3e-4,
        "lr_schedule": "cosine",
        "clip_value": False,
        "value_loss": "huber",
        "gamma": 0.99,
        "normalize_advantages": "batch",
        "renew_advantages": True,
        "entropy_coef": 1e-4,
        "value_coef": 1.0,
        "max_grad_norm": 1.0,
        "adam_epsilon": 1e-8,
        "normalize_rewards": False,
        "normalize_observations": True,
        "normalize_random_steps": 1000,
        "torso": "mlp",
        "hidden": "256,256,256",
        "share_torso": False,
        "eval_every": 10,
        "eval_episodes": 1,
        "eval_greedy": True,
    },
    "cleanrl": {
        "env": "InvertedDoublePendulum-v5",
        **_GYMNASIUM,
        "num_envs": 1,
        "num_steps": 2048,
        "num_minibatches": 32,
        "entropy_coef": 0.0,
        "clip_value": True,
    },
}
"""The settings that each preset changes in Config's defaults."""

SUMMARIES: Mapping[str, str] = {
    "openai-easy": "train-procgen's settings for easy levels; what no other preset changes",
    "openai-hard": "train-procgen's settings for hard levels, of its four workers together",
    "cookbook": "the rollout, learning rate, clip ratio and discount of the TensorFlow 2 cookbook's procgen "
    "recipe, for a comparison. The recipe itself has one env, Nadam, the rewards (r + 8) / 8 and a network "
    "with dropout",
    "gymnasium": "for Gymnasium envs; those that show vectors take it by themselves",
    "pendulum": "for Pendulum-v1, which takes it by itself",
    "torchrl": "the run of TorchRL's PPO tutorial",
    "cleanrl": "CleanRL's settings for continuous control",
}

OF_ENVS: Mapping[str, str] = {"Pendulum-v1": "pendulum"}
"""The presets that envs take by themselves: their rewards need other settings than those of their family."""
