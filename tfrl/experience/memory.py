"""The memory of recurrent policies between the steps of an env: states, last actions, rewards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfrl.config.network import Network
from tfrl.config.run import RLSettings
from tfrl.envs import registry
from tfrl.envs.spec import ActionSpec


class Memory:
    """The memory of B envs. It is zero at an episode's first step.

    A row holds the network's recurrent state and, with --memory-inputs, the last action and its reward.

    Args:
      envs: B.
      state_size: S, the size of the network's recurrent state.
      action_spec: the spec of the remembered actions; None: the memory has no actions and rewards.

    Attributes:
      values: float32 [B, M].
    """

    def __init__(self, envs: int, state_size: int, action_spec: ActionSpec | None = None) -> None:
        self._state_size, self._action_spec = state_size, action_spec
        inputs = 0 if action_spec is None else action_spec.encoded_size + 1
        self.values = np.zeros((envs, state_size + inputs), np.float32)

    def acted(self, states: np.ndarray, actions: np.ndarray, rows: np.ndarray | slice = slice(None)) -> None:
        """Stores the states [b, S] of some envs after a step, and their actions [b, *shape]."""
        self.values[rows, : self._state_size] = states
        if self._action_spec is not None:
            self.values[rows, self._state_size : -1] = self._action_spec.encoded(actions)

    def rewarded(self, rewards: np.ndarray) -> None:
        """Stores the rewards [B] of the last actions, clipped to [-1, 1]."""
        if self._action_spec is not None:
            self.values[:, -1] = np.clip(rewards, -1.0, 1.0)

    def begin(self, first: np.ndarray) -> None:
        """Clears the memory of the envs where an episode begins, bool [B]."""
        self.values = np.where(first[:, None], np.float32(0), self.values)

    def add_to(self, states: Sequence[bytes]) -> list[bytes]:
        """The states of the envs, each with its memory."""
        return [row.tobytes() + state for row, state in zip(self.values, states, strict=True)]

    def take_from(self, states: Sequence[bytes]) -> list[bytes]:
        """Restores the memory from states of `add_to`, and returns the states of the envs without it."""
        size = self.values[0].nbytes
        self.values = np.stack([np.frombuffer(state[:size], np.float32) for state in states])
        return [state[size:] for state in states]


def of_settings(config: RLSettings, envs: int) -> Memory | None:
    """The memory of `envs` envs for these settings; None without --memory."""
    if not isinstance(config, Network) or config.memory == "none":
        return None
    return Memory(envs, config.state_size, registry.specs(config)[1] if config.memory_inputs else None)
