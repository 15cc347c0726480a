"""DQN (Mnih et al. 2015, doi:10.1038/nature14236), also double, dueling and with prioritised replay."""

from __future__ import annotations

from tfrl.agents.replay_agent import ReplayAgent, Rows
from tfrl.ops import q_learning
from tfrl.workers.data_parallel import TARGET, GradientStep, Losses, Weights


class DQNAgent(ReplayAgent):
    """One network that values actions, and its target network."""

    metric_names = ("train/q_loss", "train/q_mean", "train/learning_rate", "train/epsilon")
    charts = {
        "losses": {
            "error of Q": ("train/q_loss",),
            "Q of the actions taken": ("train/q_mean",),
            "share of random actions": ("train/epsilon",),
        }
    }
    target_networks = ("q",)

    def make_steps(self) -> dict[str, GradientStep]:
        """One."""
        rates, metrics = (self._config.lr,), ("q_loss", "q_mean")
        return {"q": self.gradient_step(("q",), self._loss, metrics, rates=rates, errors=True)}

    def _loss(self, weights: Weights, rows: Rows) -> Losses:
        config, q_of = self._config, self.network.functions["q"]
        next_q = q_of(weights[TARGET + "q"], rows["next_observation"])
        if config.double:
            online = q_of(weights["q"], rows["next_observation"])
            target = q_learning.double_q_learning_target(rows["reward"], rows["discount"], next_q, online)
        else:
            target = q_learning.q_learning_target(rows["reward"], rows["discount"], next_q)
        q = q_learning.taken_q(q_of(weights["q"], rows["observation"]), rows["action"])
        loss = q_learning.td_loss(q, target, rows["weight"], huber_delta=config.huber_delta)
        return Losses(loss, {"q_loss": loss, "q_mean": q}, target - q)

    def progress(self, env_steps: int) -> dict[str, float]:
        """Metrics that follow from the number of env steps alone: the learning rate and epsilon."""
        return super().progress(env_steps) | {"train/epsilon": float(self._config.exploration(env_steps)[0])}
