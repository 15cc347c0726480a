"""What envs gave: rollouts, replay, and the running statistics of both."""
