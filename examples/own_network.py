"""A network of one's own: a function from Keras inputs to features; tfrl adds the heads of the algorithm.

    python examples/own_network.py

or, in this folder: tfrl ppo --env CartPole-v1 --torso own_network:residual. Where an env shows several
arrays, the function is called with a dict of them. Layers whose output depends on other observations, or on
chance, are refused: batch normalization and dropout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import tfrl

if TYPE_CHECKING:
    import keras  # a network imports it when it is built: TensorFlow then prints nothing


def residual(inputs: keras.KerasTensor) -> keras.KerasTensor:
    """Two dense layers with a shortcut and layer normalization."""
    import keras

    x = keras.layers.Dense(64, activation="silu")(inputs)
    y = keras.layers.Dense(64, activation="silu")(keras.layers.LayerNormalization()(x))
    return x + y


def wide(inputs: keras.KerasTensor) -> keras.KerasTensor:
    """One wide layer."""
    import keras

    return keras.layers.Dense(128, activation="tanh")(inputs)


def main() -> None:
    """Trains PPO with one network for the actor, and another one for the critic."""
    run = tfrl.train(
        "ppo",
        env="CartPole-v1",
        network={"actor": residual, "critic": wide},
        total_steps=16_384,
        num_envs=8,
        eval_episodes=16,
        logdir="logs",
        run_name="own-network",
    )
    policy = tfrl.load(run.folder)
    returns = tfrl.evaluate(policy, episodes=16)
    print(f"mean return {returns.mean:.0f}, by {policy.config.torso} and {policy.config.critic_torso}")


if __name__ == "__main__":
    main()
