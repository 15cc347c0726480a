"""Atari's games: the usual preprocessing, and the state of the emulator before an episode."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, TransformObservation

FRAME_SKIP, _STACK = 4, 4
OPTIONS = {"frameskip": 1, "obs_type": "grayscale"}
"""Arguments of `gymnasium.make`, because the preprocessing and not the emulator skips frames and makes them
grey.
"""


class _AtariFrames(TransformObservation):
    """The outermost wrapper of `preprocess`."""


def preprocess(env: gymnasium.Env, frame_skip: int) -> gymnasium.Env:
    """Atari's usual preprocessing (Mnih et al. 2015, Machado et al. 2018).

    An episode begins with up to 30 no-ops. An observation has the last 4 of every `frame_skip`th frame, grey:
    uint8 [84, 84, 4]. Rewards stay raw, and a lost life does not end the episode. `env` is made with OPTIONS.
    """
    stacked = FrameStackObservation(AtariPreprocessing(env, frame_skip=frame_skip), _STACK)
    space = gymnasium.spaces.Box(0, 255, (84, 84, _STACK), np.uint8)
    return _AtariFrames(stacked, lambda frames: np.moveaxis(frames, 0, -1), space)


def is_atari(env: gymnasium.Env) -> bool:
    """True if `preprocess` made this env."""
    return isinstance(env, _AtariFrames)


def get(env: Any) -> dict[str, np.ndarray]:
    """The state that the next reset without a seed depends on, about 5 kB compressed.

    It does not suffice within an episode: it lacks the last action, which the emulator may repeat.
    """
    emulator = env.unwrapped.ale.cloneState(include_rng=True).serialize()
    generator = env.unwrapped.np_random.bit_generator.state
    return {"emulator": np.frombuffer(emulator, np.uint8), "generator": np.array(json.dumps(generator))}


def put(env: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Restores a state of `get`, for a reset."""
    from ale_py import ALEState

    env.unwrapped.ale.restoreState(ALEState(arrays["emulator"].tobytes()))
    env.unwrapped.np_random.bit_generator.state = json.loads(str(arrays["generator"]))
