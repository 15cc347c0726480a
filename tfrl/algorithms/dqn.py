"""DQN (Mnih et al. 2015, doi:10.1038/nature14236), with three options: double, dueling, prioritised."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from tfrl.algorithms.replay import ReplayAgent, ReplayLearning, ReplaySettings, Rows
from tfrl.cli.flags import FRACTION, NATURAL
from tfrl.config.distributed import DISTRIBUTED_SECTIONS
from tfrl.config.run import Task, Torso
from tfrl.envs.spec import ActionSpec, Discrete
from tfrl.ops import q_learning
from tfrl.workers.data_parallel import TARGET, GradientStep, Losses, Weights


@dataclass(frozen=True)
class DQN:
    """The hyperparameters of DQN."""

    double: bool = True
    """Double DQN: the learned network chooses the next action, and the target network gives its value."""
    dueling: bool = False
    """Dueling DQN: two heads, for the value of the observation and the advantage of each action."""
    prioritized: bool = False
    """Prioritised replay: draw transitions in proportion to their errors."""
    priority_exponent: Annotated[float, FRACTION] = 0.6
    """Exponent of the errors with --prioritized; 0: all transitions are equally likely."""
    priority_beta: Annotated[float, FRACTION] = 0.4
    """Exponent of the importance weights at the beginning of the run; it grows to 1 at the end."""
    exploration_start: Annotated[float, FRACTION] = 1.0
    """Share of random actions at the beginning."""
    exploration_end: Annotated[float, FRACTION] = 0.05
    """Share of random actions after --exploration-steps."""
    exploration_steps: Annotated[int, NATURAL] = 10_000
    """Env steps until the share of random actions is --exploration-end; with --exploration-decay exponential,
    the time constant tau."""
    exploration_decay: Literal["linear", "exponential"] = "linear"
    """Decay of the share of random actions from start to end. linear: by the same amount at each env step;
    exponential: end + (start - end) exp(-t / tau) after t env steps, with --exploration-steps as tau."""


def epsilon(kind: str, start: float, end: float, step: int, steps: int) -> float:
    """The share of random actions after `step` env steps.

    Args:
      kind: "linear": from `start` to `end` over `steps` env steps, then `end` (Mnih et al. 2015, Nature 518,
        extended data table 1, has 1, 0.1 and a million frames); "exponential": towards `end` with the time
        constant `steps`.
      start, end: shares, 0 to 1.
      step, steps: env steps.
    """
    if kind == "exponential" and steps:
        return end + (start - end) * math.exp(-step / steps)
    return end if step >= steps else start + (end - start) * (step / steps)


@dataclass(frozen=True)
class Config(DQN, ReplaySettings):
    """All settings of a DQN run. One field a flag."""

    algorithm: str = "dqn"
    sections: ClassVar[tuple[type, ...]] = (Task, ReplayLearning, DQN, Torso, *DISTRIBUTED_SECTIONS)
    presets_of_envs: ClassVar[Mapping[str, str]] = {"CartPole-v1": "cartpole", "catch": "catch"}
    action_spaces: ClassVar[tuple[type[ActionSpec], ...]] = (Discrete,)

    @property
    def prioritized_replay(self) -> bool:
        """True if transitions are drawn in proportion to their errors."""
        return self.prioritized

    @property
    def depends_on_length(self) -> bool:
        """True if the learning rate or the importance weights depend on --total-steps."""
        return super().depends_on_length or (self.prioritized and self.priority_beta < 1)

    @property
    def ineffective(self) -> dict[str, str]:
        """The settings that have no effect in this combination, each with the reason."""
        found = super().ineffective | {"critic_lr": "here: there is no actor"}
        found["critic_torso"] = "here: there is one network"
        if not self.prioritized:
            found |= dict.fromkeys(("priority_exponent", "priority_beta"), "without --prioritized")
        return found

    def exploration(self, env_steps: int) -> tuple[np.float32, ...]:
        """Epsilon, the share of random actions, after `env_steps` env steps."""
        ends = self.exploration_start, self.exploration_end
        share = epsilon(self.exploration_decay, *ends, env_steps, self.exploration_steps)
        return (np.float32(share),)

    def make_network(self, precision: str) -> Any:
        """Makes a network for the values of all actions."""
        from tfrl.networks import actors

        return actors.QNetwork(self, precision, dueling=self.dueling, epsilon=self.exploration_end)


class DQNAgent(ReplayAgent):
    """Train DQN, a network for the values of actions, on an env with discrete actions."""

    settings = Config
    _config: Config
    target_networks = ("q",)

    def make_steps(self) -> dict[str, GradientStep]:
        """One gradient step, of the Q-network."""
        rates, metrics = (self._config.lr,), ("q_loss", "q_mean")
        return {"q": self.make_step(("q",), self._loss, metrics, rates=rates)}

    def _loss(self, weights: Weights, rows: Rows) -> Losses:
        """The loss of n transitions, float32 [n] (Mnih et al. 2015; van Hasselt et al. 2016).

        `rows` has the transitions of a batch by name: `observation`, `action`, `reward`, `discount`,
        `next_observation`. Metrics: those of `td_losses`.
        """
        config, q_of = self._config, self.network.functions["q"]
        following, mask = rows["next_observation"], self.network.entrance.mask
        next_q = mask(following, q_of(weights[TARGET + "q"], following))
        if config.double:
            online = mask(following, q_of(weights["q"], following))
            target = q_learning.double_q_learning_target(rows["reward"], rows["discount"], next_q, online)
        else:
            target = q_learning.q_learning_target(rows["reward"], rows["discount"], next_q)
        q = q_learning.taken_q(q_of(weights["q"], rows["observation"]), rows["action"])
        return self.td_losses([q], target, rows)

    def progress(self, env_steps: int) -> dict[str, float]:
        """The metrics that depend only on the number of env steps: the learning rate and epsilon."""
        return super().progress(env_steps) | {"train/epsilon": float(self._config.exploration(env_steps)[0])}
