"""TD3+BC (Fujimoto and Gu 2021, arXiv:2106.06860): TD3, whose actor also clones the recorded actions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from tfrl.algorithms import td3
from tfrl.algorithms.offline import OfflineAgent, OfflineSettings, OfflineTask, OfflineValues
from tfrl.algorithms.replay import Rows
from tfrl.algorithms.td3 import TD3, TD3Agent
from tfrl.cli.flags import POSITIVE
from tfrl.config.run import Hardware, RunSettings, Torso
from tfrl.envs.spec import ActionSpec, Box
from tfrl.ops.graph import tf
from tfrl.workers.data_parallel import Losses, Weights


@dataclass(frozen=True)
class TD3BC(TD3):
    """The hyperparameters of TD3+BC."""

    bc_alpha: Annotated[float, POSITIVE] = 2.5
    """Weight of the critic in the actor's loss; the weight of the cloning is 1."""


@dataclass(frozen=True)
class Config(TD3BC, OfflineValues, OfflineSettings):
    """All settings of a TD3+BC run. One field a flag."""

    algorithm: str = "td3_bc"
    sections: ClassVar[tuple[type, ...]] = (OfflineTask, OfflineValues, TD3BC, Torso, Hardware, RunSettings)
    action_spaces: ClassVar[tuple[type[ActionSpec], ...]] = (Box,)
    critics_see_actions: ClassVar[bool] = True
    make_network = td3.Config.make_network  # it takes these settings, too

    @property
    def ineffective(self) -> dict[str, str]:
        """The settings that have no effect in this combination, each with the reason."""
        return super().ineffective | {"noise_correlation": "on recorded data"}


class TD3BCAgent(OfflineAgent, TD3Agent):
    """Train TD3+BC, an actor and two critics, from recorded episodes with continuous actions."""

    settings = Config
    _config: Config  # type: ignore[assignment]  # TD3's settings by the same names

    def _actor_loss(self, weights: Weights, rows: Rows) -> Losses:
        """-lambda Q(o, mu(o)) + (mu(o) - a)^2, with lambda = alpha / mean |Q| (equations 4 and 5).

        The mean is that of a part of the batch, which is the same on any topology.
        """
        observations = rows["observation"]
        actions = self.actions(weights, "", observations)
        q = self.network.qs(weights, "", observations, actions)[0]
        scale = self._config.bc_alpha / tf.stop_gradient(tf.reduce_mean(tf.abs(q)))
        cloning = tf.reduce_mean(tf.square(actions - rows["action"]), axis=1)
        return Losses(cloning - scale * q, {"actor_loss": cloning - scale * q})
