"""VecEnv: the contract of a vector of envs, and the step that it shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from tfrl.envs.spec import ActionSpec, ArraySpec


class Step(NamedTuple):
    """A vector of B envs after its last actions; nothing in it changes when the envs go on.

    Attributes:
      reward: float32 [B]: the raw reward of the last action (0 before any).
      observation: [B, *shape]: o_t; where an episode has just ended, already the first one of the next.
      first: bool [B]: o_t begins a new episode.
      truncated: bool [B]: the episode that ended was cut off, by a time limit say, and did not terminate.
        Implies `first`. An episode that did both counts as terminated.
      final_observation: [K, *shape]: the last observations of the K truncated episodes, in the order of the
        envs; None where K = 0.
    """

    reward: np.ndarray
    observation: np.ndarray
    first: np.ndarray
    truncated: np.ndarray
    final_observation: np.ndarray | None

    @property
    def terminated(self) -> np.ndarray:
        """True where an episode has just ended for good, bool [B]. Before any action, the same as `first`."""
        return self.first & ~self.truncated


class VecEnv(Protocol):
    """A vector of B envs whose episodes restart by themselves, in the same step (Gymnasium's SAME_STEP).

    What env i does depends on (seed, i) and its actions alone, never on which other envs are in the vector.

    Attributes:
      num_envs: B.
      observation_spec: uint8 images [H, W, C] or float32 vectors [D].
      action_spec: what `act` takes of each env.
      exact_state: whether a state that is put back goes on exactly. Where it does not, `set_state` begins
        new episodes.
    """

    num_envs: int
    observation_spec: ArraySpec
    action_spec: ActionSpec
    exact_state: bool

    def observe(self) -> Step:
        """Waits for the step; called again without `act`, gives the same."""

    def act(self, actions: np.ndarray) -> None:
        """Starts one step with actions [B, *action_spec.shape]; may return while the envs still step."""

    def solved(self) -> np.ndarray:
        """True where the episode that ended last reached its goal, bool [B]."""

    def render(self) -> Sequence[np.ndarray]:
        """Frames for people, uint8 [H, W, 3] per env; needs `EnvSpec.render`."""

    def get_state(self) -> list[bytes]:
        """One state per env, without pickle: everything that decides its future, and what `observe` shows."""

    def set_state(self, states: Sequence[bytes]) -> None:
        """Puts states from `get_state` in place; `observe` then shows what it showed there."""

    def close(self) -> None:
        """Frees threads and memory."""
