"""Run folders with made-up numbers, for the tests of the commands that look at them."""

import csv
import dataclasses
import json
from pathlib import Path

import numpy as np

from tfrl.algorithms.ppo import Config
from tfrl.cli.settings import to_yaml
from tfrl.envs.published import normalized_return, published_curve

# Of progress.csv after env_steps, in order: what is promised to those who read PPO's runs.
_PROMISED = """
rollout/episode_return rollout/episode_length rollout/normalized_return rollout/episodes
rollout/mean_reward rollout/longest_episode
train/policy_loss train/value_loss train/entropy train/approx_kl train/clip_fraction train/explained_variance
train/grad_norm train/learning_rate train/first_ratio_error
eval_train/return eval_train/return_std eval_train/episode_length eval_train/episode_length_std
eval_train/normalized_return eval_train/mean_reward
eval_test/return eval_test/return_std eval_test/episode_length eval_test/episode_length_std
eval_test/normalized_return eval_test/mean_reward
eval/generalization_gap
time/env_steps_per_second time/rollout_seconds time/update_seconds
time/env_wait_fraction
"""
COLUMNS = _PROMISED.split()


def make_run(
    logdir: Path,
    env="fruitbot",
    seed=1,
    total_steps=1_000_000,
    finished=True,
    kind=Config,
    updates=None,
    **settings,
) -> Path:
    """A run near the published curves, or near 100, as training would have left it; its folder.

    `updates` is the number of its updates; None: all.
    """
    name = f"{env}-seed{seed}" + "".join(f"-{v}" for v in settings.values())
    config = kind(env=env, seed=seed, logdir=str(logdir), run_name=name, total_steps=total_steps)
    config = dataclasses.replace(config, **settings).complete()
    config.run_dir.mkdir(parents=True, exist_ok=True)
    (config.run_dir / "config.yaml").write_text(to_yaml(config))
    noise = np.random.default_rng([seed, len(env)])
    returns = dict.fromkeys(config.level_sets, (0.0, None))
    with (config.run_dir / "progress.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ("env_steps", *_columns(config)))
        table.writeheader()
        for update in range(1, (updates or config.num_updates) + 1):
            steps = update * config.steps_per_update
            for level_set in returns:
                value = _near(env, level_set, steps) * (1 + 0.1 * noise.standard_normal())
                returns[level_set] = value, normalized_return(env, "easy", value)
            row = {name: abs(noise.normal()) for name in COLUMNS if name.startswith(("train/", "time/"))}
            row |= {"rollout/episode_return": next(iter(returns.values()))[0], "rollout/episode_length": 100}
            row |= {"rollout/mean_reward": row["rollout/episode_return"] / 100}
            row |= {"rollout/longest_episode": 200}
            row |= {"time/env_steps_per_second": 800 + 20 * noise.normal()}
            if update % 20 == 0 or update == config.num_updates:
                row |= {f"eval_{s}/return": r[0] for s, r in returns.items()}
                row |= {f"eval_{s}/normalized_return": r[1] for s, r in returns.items()}
            table.writerow({"env_steps": steps, **row})
    if finished:
        scores = {s: {"return": r[0], "normalized_return": r[1], "episodes": 128} for s, r in returns.items()}
        content = {"env": env, "seed": seed, "env_steps": steps, "eval": scores, "seconds": 3600.0}
        (config.run_dir / "results.json").write_text(json.dumps(content | {"weights_sha256": "0" * 64}))
    return config.run_dir


def _columns(config) -> list[str]:
    if "train" in config.level_sets:
        return COLUMNS
    return [name for name in COLUMNS if not name.startswith(("eval_train/", "eval/"))]


def _near(env, level_set, steps) -> float:
    """A return after so many env steps."""
    if normalized_return(env, "easy", 0.0) is None:
        return 100.0 * steps / (steps + 50_000)
    at, runs = published_curve(env, level_set)
    return np.interp(steps, at, runs.mean(0))
