"""A loop of one's own: train a step, look, evaluate, save, and end when you like.

    python examples/own_loop.py

The same program continues a run that it has left before its end.
"""

from __future__ import annotations

import tfrl


def main() -> None:
    """Trains until an evaluation is good enough, or to the end."""
    with tfrl.trainer(
        "ppo", env="CartPole-v1", total_steps=60_000, seed=1, run_name="own-loop", eval_episodes=16
    ) as trainer:
        while not trainer.done:
            metrics = trainer.update()
            if trainer.updates % 5:
                continue
            found = trainer.evaluate()["eval_test/return"]
            print(f"{trainer.env_steps:,} env steps: return {found:.0f}, KL {metrics['train/approx_kl']:.4f}")
            if found >= 200:
                print(f"good enough: {trainer.save()}")
                break

    policy = tfrl.load(trainer.run.folder)  # of the newest checkpoint
    print(f"evaluated again: {tfrl.evaluate(policy, episodes=16).mean:.0f}")


if __name__ == "__main__":
    main()
