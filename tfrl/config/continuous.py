"""Presets that DDPG, TD3 and SAC share: one for each task, the same for all three."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfrl.config.replay import DEFAULTS

_CHEETAH = {**DEFAULTS, "env": "HalfCheetah-v5", "total_steps": 1_000_000}

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
    "inverted-double-pendulum": {
        **DEFAULTS,
        "env": "InvertedDoublePendulum-v5",
        "learning_starts": 1000,
        "train_every": 8,
        "replay_size": 100_000,
    },
    "mountain-car": {
        **DEFAULTS,
        "env": "MountainCarContinuous-v0",
        "total_steps": 50_000,
        "learning_starts": 1000,
        "train_every": 32,
        "gamma": 0.9999,
        "tau": 0.01,
        # A car that is pushed now left, now right, stays in its valley.
        "noise_correlation": 0.98,
        "hidden": "64,64",
    },
    "half-cheetah": {**_CHEETAH, "train_every": 8},
    "cleanrl": _CHEETAH,
}
"""The settings that each preset changes in the defaults."""

SUMMARIES: Mapping[str, str] = {
    "default": "for any env",
    "pendulum": "for Pendulum-v1, which takes it by itself",
    "inverted-double-pendulum": "for InvertedDoublePendulum-v5, which takes it by itself",
    "mountain-car": "for MountainCarContinuous-v0, which takes it by itself",
    "half-cheetah": "for HalfCheetah-v5, which takes it by itself",
    "cleanrl": "CleanRL's settings for HalfCheetah-v5",
}

OF_ENVS: Mapping[str, str] = {
    "Pendulum-v1": "pendulum",
    "InvertedDoublePendulum-v5": "inverted-double-pendulum",
    "InvertedDoublePendulum-v4": "inverted-double-pendulum",
    "MountainCarContinuous-v0": "mountain-car",
    "HalfCheetah-v5": "half-cheetah",
}
"""The presets that envs take by themselves."""
