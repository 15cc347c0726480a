"""Experience from envs: rollouts, replay, and the running statistics of both."""
