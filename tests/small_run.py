"""Settings of a run of PPO that takes seconds."""

from tfrl.algorithms.ppo import Config

SMALL = Config(
    env="catch",
    run_name="small",
    torso="cookbook",
    precision="float32",
    num_levels=0,
    num_envs=8,
    num_steps=16,
    num_minibatches=4,
    epochs=2,
    total_steps=1024,
    gamma=0.99,
    env_threads=1,
)
