"""Presets that DDPG, TD3 and SAC share: one for each task, the same for all three."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfrl.config.replay import DEFAULTS

TASKS: Mapping[str, Mapping[str, Any]] = {
    "default": DEFAULTS,
    "pendulum": {
        **DEFAULTS,
        "env": "Pendulum-v1",
        "total_steps": 20_000,
        "learning_starts": 500,
        "train_every": 16,
        "batch_size": 128,
        "lr": 1e-3,
        "gamma": 0.98,
        "hidden": "64,64",
        "replay_size": 20_000,
    },
    "double-pendulum": {
        **DEFAULTS,
        "env": "InvertedDoublePendulum-v5",
        "learning_starts": 1000,
        "train_every": 8,
        "replay_size": 100_000,
    },
    "cleanrl": {
        **DEFAULTS,
        "env": "HalfCheetah-v5",
        "total_steps": 1_000_000,
        "learning_starts": 5000,
    },
}
"""The settings that each preset changes in the defaults."""

SUMMARIES: Mapping[str, str] = {
    "default": "for any env",
    "pendulum": "for Pendulum-v1, which takes it by itself",
    "double-pendulum": "for InvertedDoublePendulum-v5, which takes it by itself",
    "cleanrl": "CleanRL's settings for HalfCheetah-v5",
}

OF_ENVS: Mapping[str, str] = {
    "Pendulum-v1": "pendulum",
    "InvertedDoublePendulum-v5": "double-pendulum",
    "InvertedDoublePendulum-v4": "double-pendulum",
}
"""The presets that envs take by themselves."""
