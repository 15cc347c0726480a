"""python -m tfrl.evaluate RUN, and the loop that every evaluation plays.

A fixed number of episodes is played in every env, so that short episodes do not count more often.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tfrl import cli, commands, envs, random, statistics
from tfrl.config import Config
from tfrl.envs.games import normalized_return
from tfrl.errors import UserError
from tfrl.quiet import quiet_start

LEVEL_SETS = ("train", "test")
EVALUATION_FILE = "eval.json"
_MOST_ENVS = 64
_NOISE_BLOCK = 256  # steps whose random numbers are drawn at once
_USAGE = "python -m tfrl.evaluate RUN"


@dataclass(frozen=True)
class Episodes:
    """Finished episodes [N, K]: K in each of N envs.

    Attributes:
      returns: raw, float64; lengths: in env steps, float64; solved: bool, whether the level was solved.
    """

    returns: np.ndarray
    lengths: np.ndarray
    solved: np.ndarray


class Watcher:
    """Looks on while episodes are played; this one does nothing."""

    def before(self, env: envs.VecEnv, observations: np.ndarray, actions: np.ndarray) -> None:
        """Before each step: o_t, uint8 [B, H, W, C], and a_t, int32 [B], of all envs, also of idle ones."""

    def after(self, rewards: np.ndarray, first: np.ndarray) -> None:
        """After each step: r_t, float32 [B], and whether it ended the episode, bool [B]."""


def level_spec(config: Config, level_set: str, num_envs: int) -> envs.EnvSpec:
    """The envs of an evaluation: the run's training levels ("train") or the full distribution ("test")."""
    return envs.EnvSpec(
        name=config.env,
        num_envs=num_envs,
        seed=config.seed + 1 + LEVEL_SETS.index(level_set),  # other episodes than training's
        distribution_mode=config.distribution_mode,
        num_levels=config.num_levels if level_set == "train" else 0,
        start_level=config.start_level if level_set == "train" else 0,
    )


def split_episodes(episodes: int) -> tuple[int, int]:
    """How many envs, and how many episodes in each: at least `episodes` in all, rounded up."""
    num_envs = min(episodes, _MOST_ENVS)
    return num_envs, -(-episodes // num_envs)


def play(
    act: Callable[[np.ndarray, np.ndarray], np.ndarray],
    spec: envs.EnvSpec,
    indices: Sequence[int],
    *,
    episodes_each: int,
    on_frame: Callable[[np.ndarray], None] = lambda frame: None,
    on_episode: Callable[[int], None] = lambda count: None,
    watcher: Watcher | None = None,
    max_steps: float = math.inf,
) -> Episodes:
    """Plays `episodes_each` episodes in each of the envs `indices` of `spec`.

    Args:
      act: actions int32 [B] from observations uint8 [B, H, W, C] and uniform numbers float32 [B]. Only envs
        that still have episodes to play are asked for.
      spec: the global vector of evaluation envs.
      indices: this worker's share of them.
      episodes_each: K.
      on_frame: gets the first env's observation [H, W, C] at each step of its first episode.
      on_episode: gets the number of finished episodes.
      watcher: sees every step.
      max_steps: of each env, after which what is not finished stays 0 in the result.
    """
    watcher = watcher or Watcher()
    env = envs.make(spec, indices)
    count = len(indices)
    noise = [random.generator(spec.seed, random.Use.EVALUATION, i) for i in indices]
    returns, lengths = np.zeros((count, episodes_each)), np.zeros((count, episodes_each))
    solved = np.zeros((count, episodes_each), bool)
    done = np.zeros(count, np.int64)  # finished episodes of each env
    total, length = np.zeros(count), np.zeros(count)
    actions = np.zeros(count, np.int32)
    step = 0
    while (active := np.flatnonzero(done < episodes_each)).size and step < max_steps:
        if step % _NOISE_BLOCK == 0:
            uniforms = np.stack([g.random(_NOISE_BLOCK, np.float32) for g in noise], axis=1)
        _, observations, _ = env.observe()
        if done[0] == 0:
            on_frame(observations[0])
        actions[active] = act(observations[active], uniforms[step % _NOISE_BLOCK][active])
        watcher.before(env, observations, actions)
        env.act(actions)
        rewards, _, first = env.observe()
        watcher.after(rewards, first)
        total, length, step = total + rewards, length + 1, step + 1
        ended = active[first[active]]
        if ended.size:
            at = ended, done[ended]
            returns[at], lengths[at], solved[at] = total[ended], length[ended], env.solved()[ended]
            done[ended] += 1
            on_episode(int(done.sum()))
        total[first], length[first] = 0.0, 0.0
    env.close()
    return Episodes(returns, lengths, solved)


# The command


@dataclass(frozen=True)
class Options:
    """What is played."""

    levels: Literal["train", "test", "both"] = "both"
    """The run's training levels, the full distribution of levels, or both."""
    episodes: int = 256
    """Episodes of each level set, the same number in every env."""
    greedy: bool = False
    """Take the most likely action instead of drawing one."""
    envs: str | None = None
    """Other games than the run's, with commas between."""
    seed: int | None = None
    """Decides levels and actions; None: the run's, which plays what the evaluation in training plays."""
    checkpoint: str = "last"
    """last, best (by the return on unseen levels) or the number of an update."""
    precision: Literal["run", "float32", "bfloat16"] = "run"
    """Of the torso; run: that of the run."""
    out: str | None = None
    """The JSON file that is written; None: eval.json in the run's folder."""


def main(arguments: Sequence[str]) -> int:
    """Evaluates a run's policy; the exit code."""
    words, options = cli.parse(
        Options,
        arguments,
        _USAGE,
        "Play episodes with a run's policy: a table, and RUN/eval.json. RUN is a run's folder or an export.",
    )
    from tfrl import policy_files

    run = Path(cli.one(words, "run", _USAGE))
    cli.check_least(options, episodes=1, seed=0)
    source = policy_files.find(run, options.checkpoint)
    tasks = [_task(source.config, game, options) for game in (options.envs or source.config.env).split(",")]
    with quiet_start():
        from tfrl import policy

        player = policy.load(source, options.precision)
    act = player.greedy if options.greedy else player.sample
    level_sets = LEVEL_SETS if options.levels == "both" else (options.levels,)
    found = [
        evaluate_levels(act, task, level_set, options.episodes)
        | {"actions": "greedy" if options.greedy else "sampled"}
        for task in tasks
        for level_set in level_sets
    ]
    content = {
        "checkpoint": source.name,
        "env_steps": source.env_steps,
        "seed": tasks[0].seed,
        "precision": player.precision,
        "evaluations": found,
    }
    _write(Path(options.out) if options.out else run / EVALUATION_FILE, content)
    _show(content)
    return 0


def evaluate_levels(
    act: Callable[[np.ndarray, np.ndarray], np.ndarray], config: Config, level_set: str, episodes: int
) -> dict[str, Any]:
    """Plays `episodes` episodes (rounded up to as many in every env): their statistics, for eval.json."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    num_envs, each = split_episodes(episodes)
    spec = level_spec(config, level_set, num_envs)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(f"{config.env}, {level_set} levels", total=num_envs * each)
        played = play(
            act,
            spec,
            range(num_envs),
            episodes_each=each,
            on_episode=lambda count: progress.update(bar, completed=count),
        )
    returns = played.returns.reshape(-1)
    mean = float(returns.mean())
    return {
        "env": config.env,
        "distribution_mode": config.distribution_mode,
        "levels": level_set,
        "episodes": returns.size,
        "return_mean": mean,
        # Of envs' means: episodes of one env follow each other, and may share levels.
        "return_standard_error": _known(statistics.standard_error(played.returns.mean(axis=1))),
        "return_median": float(statistics.median(returns)),
        "return_iqm": float(statistics.iqm(returns)),
        "normalized_return": normalized_return(config.env, config.distribution_mode, mean),
        "solve_rate": float(played.solved.mean()),
        "length_mean": float(played.lengths.mean()),
    }


def _task(config: Config, game: str, options: Options) -> Config:
    """The run's settings with the game and seed to evaluate.

    Raises:
      UserError: there is no such game, or not in the run's distribution mode.
    """
    from tfrl.config import check_game

    seed = config.seed if options.seed is None else options.seed
    task = dataclasses.replace(config, env=game.strip(), seed=seed)
    check_game(task)
    if (task.env in envs.TOY_ENVS) != (config.env in envs.TOY_ENVS):
        raise UserError(f"{task.env} and {config.env} have other observations: this policy cannot play both.")
    return task


def _write(path: Path, content: dict[str, Any]) -> None:
    try:
        staged = path.with_name(path.name + ".tmp")
        staged.write_text(json.dumps(content, indent=2) + "\n")
        staged.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}.") from None


def _show(content: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    actions = content["evaluations"][0]["actions"]
    title = f"{content['checkpoint']}, {content['env_steps']:,} env steps, {actions} actions"
    # Narrow, so that it fits a terminal of 80 columns.
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for name in ("game", "levels"):
        table.add_column(name, no_wrap=True)
    for name in ("episodes", "return", "median", "IQM", "normalised", "solved", "length"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in content["evaluations"]:
        error, score = row["return_standard_error"], row["normalized_return"]
        table.add_row(
            row["env"],
            row["levels"],
            str(row["episodes"]),
            f"{row['return_mean']:.2f}" + ("" if error is None else f" \u00b1 {error:.2f}"),
            f"{row['return_median']:.2f}",
            f"{row['return_iqm']:.2f}",
            "-" if score is None else f"{score:.3f}",
            f"{row['solve_rate']:.0%}",
            f"{row['length_mean']:.0f}",
        )
    Console().print(table)


def _known(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


if __name__ == "__main__":
    commands.run(main)
