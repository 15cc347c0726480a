"""Trains an algorithm of stable-baselines3 or of SBX; a script for a Python that has them.

`python -m benchmarks.off_policy --libraries …` starts it with --peer-python. The settings are CleanRL's, as
are those of our --preset cleanrl. It prints a line that begins with `SPS:` every 1,000 env steps.
"""

from __future__ import annotations

import argparse
import importlib
import time

_OFTEN = {"batch_size": 256, "train_freq": 1, "gradient_steps": 1, "buffer_size": 1_000_000}
_CONTINUOUS = {**_OFTEN, "learning_rate": 3e-4, "policy_kwargs": {"net_arch": [256, 256]}}
_SETTINGS = {
    "sac": _CONTINUOUS,
    "td3": _CONTINUOUS,
    "ddpg": _CONTINUOUS,
    "dqn": {
        **{"batch_size": 128, "train_freq": 10, "gradient_steps": 1, "buffer_size": 10_000},
        **{"learning_rate": 2.5e-4, "target_update_interval": 500, "exploration_fraction": 0.5},
        "policy_kwargs": {"net_arch": [120, 84]},
    },
}


def main() -> None:
    """Trains by the command line's words, which are CleanRL's, and --library and --algorithm."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", choices=("sbx", "stable_baselines3"), required=True)
    parser.add_argument("--algorithm", choices=tuple(_SETTINGS), required=True)
    parser.add_argument("--env-id", required=True)
    for name in ("--seed", "--total-timesteps", "--learning-starts"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    callbacks = importlib.import_module("stable_baselines3.common.callbacks")

    class Lines(callbacks.BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps % 1000 == 0:
                print("SPS:", round(self.num_timesteps / (time.monotonic() - began)), flush=True)
            return True

    learner = getattr(importlib.import_module(options.library), options.algorithm.upper())
    settings = {"seed": options.seed, "learning_starts": options.learning_starts, "verbose": 0}
    model = learner("MlpPolicy", options.env_id, **_SETTINGS[options.algorithm], **settings)
    began = time.monotonic()
    model.learn(options.total_timesteps, callback=Lines())


if __name__ == "__main__":
    main()
