"""Experience from envs: rollouts, replay, their running statistics, and the episodes of evaluations."""
