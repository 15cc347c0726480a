"""A whole policy network of one's own, with its heads, such as a custom model of RLlib.

    python examples/own_heads.py

or, in this folder: tfrl ppo --env CartPole-v1 --torso own_heads:policy_and_value. The function takes the
inputs and the number of the policy's parameters: A logits for A discrete actions; for D continuous actions D
means and D numbers for the deviations, which are 1 where these are 0. It returns the parameters and the
value. PPO, DrAC, IMPALA, IMPACT and BC take such networks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import tfrl

if TYPE_CHECKING:
    import keras  # the network imports it when it is built: TensorFlow then prints nothing


def policy_and_value(
    inputs: keras.KerasTensor, parameters: int
) -> tuple[keras.KerasTensor, keras.KerasTensor]:
    """Half of the features are the policy's alone, and the value sees the policy's logits."""
    import keras

    shared = keras.layers.Dense(64, activation="tanh")(inputs)
    own = keras.layers.Dense(32, activation="tanh")(shared)
    near_zero = keras.initializers.Orthogonal(0.01)  # the first policy is close to uniform
    logits = keras.layers.Dense(parameters, kernel_initializer=near_zero)(own)
    seen = keras.layers.Concatenate()([shared, logits])
    return logits, keras.layers.Dense(1)(keras.layers.Dense(64, activation="tanh")(seen))


def main() -> None:
    """Trains PPO with this network, and plays with the policy of the export."""
    run = tfrl.train(
        "ppo",
        env="CartPole-v1",
        network=policy_and_value,
        total_steps=16_384,
        num_envs=8,
        eval_episodes=16,
        logdir="logs",
        run_name="own-heads",
    )
    returns = tfrl.evaluate(tfrl.load(run.folder), episodes=16)
    print(f"mean return {returns.mean:.0f}")


if __name__ == "__main__":
    main()
