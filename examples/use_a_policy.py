"""Uses a trained policy in a loop of one's own: `policy(observation)` is what `env.step` takes.

python examples/use_a_policy.py
"""

from __future__ import annotations

import gymnasium
import numpy as np

import tfrl

if __name__ == "__main__":
    # A second call finds the run complete, and trains nothing.
    run = tfrl.train("ppo", env="Pendulum-v1", total_steps=30_000, seed=1, run_name="pendulum")
    policy = tfrl.load(run.folder)  # also tfrl.load("logs/pendulum/export"), on a machine without the env

    env = gymnasium.make("Pendulum-v1")
    observation, _ = env.reset(seed=7)
    total, ended = 0.0, False
    while not ended:
        action = policy(observation)  # the most likely one; policy.sample(observation, seed=3) draws one
        observation, reward, terminated, truncated, _ = env.step(action)
        total, ended = total + float(reward), terminated or truncated
    print(f"one episode: {total:.1f}")

    batch = np.stack([observation, -observation])
    print(f"actions of a batch: {policy(batch)}")  # [2, 1]

    returns = tfrl.evaluate(policy, episodes=32, seed=1)
    print(f"32 episodes: {returns.mean:.1f}, 95 % interval {returns.interval}")
