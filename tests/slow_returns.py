"""Returns computed one step at a time, in float64, to compare with."""

import numpy as np


def vtrace(config, lam, log_ratios, rewards, first, truncated, final, values):
    """Targets and advantages by the sums of the paper's equation 1, a step at a time, in float64."""
    steps, envs = rewards.shape
    rho = np.minimum(config.rho_bar, np.exp(log_ratios))
    c = lam * np.minimum(config.c_bar, np.exp(log_ratios))
    targets, advantages = np.zeros((steps + 1, envs)), np.zeros((steps, envs))
    discount = config.gamma * (1.0 - first)
    reward = rewards + np.where(truncated, config.gamma * final, 0.0)
    for b in range(envs):
        targets[steps, b] = values[steps, b]
        for s in range(steps):
            total, weight = values[s, b], 1.0
            for t in range(s, steps):
                delta = rho[t, b] * (reward[t, b] + discount[t, b] * values[t + 1, b] - values[t, b])
                total += weight * delta
                weight *= discount[t, b] * c[t, b]
            targets[s, b] = total
        for s in range(steps):
            following = lam * targets[s + 1, b] + (1 - lam) * values[s + 1, b]
            advantages[s, b] = rho[s, b] * (reward[s, b] + discount[s, b] * following - values[s, b])
    return targets[:steps], advantages
