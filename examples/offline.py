"""From a scripted controller to a policy: record episodes, clone them, and go on with PPO."""

import numpy as np

import tfrl


def balance(observation: np.ndarray) -> int:
    """Pushes the cart to the side to which the pole falls."""
    _, velocity, angle, falling = observation
    return int(angle + 0.5 * falling + 0.02 * velocity > 0)


if __name__ == "__main__":
    data = tfrl.collect(balance, env="CartPole-v1", episodes=20, out="data/balance")

    cloned = tfrl.train(
        "bc", dataset=data, total_steps=2000, eval_episodes=16, logdir="logs", run_name="cloned"
    )
    recorded = cloned.results["dataset"]["return_mean"]
    print(f"recorded {recorded:.0f}, cloned {cloned.results['eval']['test']['return']:.0f}")

    better = tfrl.train(
        "ppo",
        env="CartPole-v1",
        start_from=cloned.folder,
        total_steps=4096,
        eval_episodes=16,
        run_name="better",
    )
    print(f"after PPO {better.results['eval']['test']['return']:.0f}")
