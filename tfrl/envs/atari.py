"""Atari's usual preprocessing (Mnih et al. 2015, Machado et al. 2018), and its state."""

from __future__ import annotations

import json

import gymnasium
import numpy as np
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, TransformObservation

FRAME_SKIP, STACK = 4, 4
NO_SKIP = {"frameskip": 1, "obs_type": "grayscale"}
"""Arguments for `gymnasium.make`: the preprocessing, not the emulator, skips frames and makes them grey."""


def preprocess(env: gymnasium.Env, frame_skip: int = FRAME_SKIP) -> gymnasium.Env:
    """Up to 30 no-ops, every `frame_skip`th frame, grey, 84 x 84, the last 4 of them: uint8 [84, 84, 4].

    Rewards stay raw, and a life lost ends no episode. `env` is made with NO_SKIP.
    """
    stacked = FrameStackObservation(AtariPreprocessing(env, frame_skip=frame_skip), STACK)
    space = gymnasium.spaces.Box(0, 255, (84, 84, STACK), np.uint8)
    return TransformObservation(stacked, lambda frames: np.moveaxis(frames, 0, -1), space)


def is_atari(env: gymnasium.Env) -> bool:
    """True if `preprocess` made this env."""
    return isinstance(env, TransformObservation) and hasattr(env.unwrapped, "ale")


def _layers(env: gymnasium.Env) -> tuple[FrameStackObservation, AtariPreprocessing]:
    return env.env, env.env.env


def get_state(env: gymnasium.Env) -> dict[str, np.ndarray]:
    """The emulator's state with its random numbers, and the preprocessing's: some 10 kB once compressed."""
    stack, frames = _layers(env)
    about = {
        "lives": int(frames.lives),
        "game_over": bool(frames.game_over),
        "generator": env.unwrapped.np_random.bit_generator.state,
    }
    emulator = env.unwrapped.ale.cloneState(include_rng=True).serialize()
    return {
        "atari": np.array(json.dumps(about)),
        "emulator": np.frombuffer(emulator, np.uint8),
        "screens": np.stack(frames.obs_buffer),
        "stack": np.stack(stack.obs_queue),
    }


def set_state(env: gymnasium.Env, arrays: dict[str, np.ndarray]) -> None:
    """Continues exactly from `get_state`."""
    from ale_py import ALEState

    stack, frames = _layers(env)
    about = json.loads(str(arrays["atari"]))
    env.unwrapped.ale.restoreState(ALEState(arrays["emulator"].tobytes()))
    env.unwrapped.np_random.bit_generator.state = about["generator"]
    frames.lives, frames.game_over = about["lives"], about["game_over"]
    for buffer, screen in zip(frames.obs_buffer, arrays["screens"], strict=True):
        buffer[:] = screen
    stack.obs_queue.extend(arrays["stack"])
