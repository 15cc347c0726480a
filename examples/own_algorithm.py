"""A2C (Mnih et al. 2016, arXiv:1602.01783) as an algorithm of one's own: one gradient step on each rollout.

    python examples/own_algorithm.py

or, in this folder, with any flag of PPO: tfrl own_algorithm:A2C --env Acrobot-v1. Replicas, workers, actors
on Ray and exact resume come with the class that it extends.
"""

from __future__ import annotations

import tfrl
from tfrl.algorithms.ppo import Config, PPOAgent, Samples
from tfrl.ops.graph import tf
from tfrl.workers.data_parallel import Losses, Weights


class A2C(PPOAgent):
    """Train advantage actor-critic (A2C)."""

    settings = Config  # a dataclass that extends it may add settings: fields with their help
    defaults = {
        "num_envs": 16,
        "num_steps": 8,
        "epochs": 1,
        "num_minibatches": 1,
        "lr": 2e-3,
        "optimizer": "rmsprop",
        "adam_epsilon": 1e-5,
        "normalize_rewards": False,
    }
    means = ("policy_loss", "value_loss", "entropy")

    def _losses(self, weights: Weights, samples: Samples, index: tf.Tensor) -> Losses:
        """The loss of each sample, its metrics, and its |ratio - 1| as `errors`; float32 [b] each."""
        config = self._config
        parameters, values, *_ = self.network.outputs(weights, samples.observations, samples.memory)
        policy = self.network.distribution(parameters)
        log_probs, entropy = policy.log_prob(samples.actions), policy.entropy()
        policy_loss = -log_probs * samples.advantages
        value_loss = 0.5 * tf.square(values - samples.targets)
        loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
        metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        return Losses(loss, metrics, tf.abs(tf.exp(log_probs - samples.log_probs) - 1.0))


if __name__ == "__main__":
    run = tfrl.train(A2C, env="CartPole-v1", total_steps=50_000, seed=1, run_name="own-algorithm")
    print(f"{run.folder}: mean return {run.results['eval']['test']['return']:.1f}")
