"""python -m tfrl.collect RUN: episodes of a policy as an RLDS data set (Ramos et al. 2021, arXiv:2111.02767).

Any tensorflow-datasets reads it: `tfds.builder_from_directory(DIRECTORY).as_dataset(split="train")`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tfrl.cli import command_line, endings
from tfrl.cli.errors import UserError
from tfrl.cli.quiet import quiet_start
from tfrl.cli.settings import COUNT, NATURAL, check_ranges
from tfrl.config.run import EPISODES
from tfrl.envs.vec_env import Step, VecEnv
from tfrl.evaluation import policy_files
from tfrl.evaluation.episodes import Watcher, play
from tfrl.evaluation.levels import level_spec
from tfrl.run import files
from tfrl.run.rng import Use

_USAGE = "python -m tfrl.collect RUN --episodes N"
_ENVS = 8  # whose episodes are held in memory until they end


@dataclass(frozen=True)
class Options:
    """The episodes that are collected."""

    episodes: int = 100
    """Episodes; rounded up to as many in every env."""
    levels: Literal["train", "test"] = "train"
    """The run's training levels, or unseen ones."""
    greedy: bool = False
    """Take the most likely action instead of drawing one."""
    seed: int | None = None
    """Decides levels and actions; None: the run's."""
    checkpoint: str = "last"
    """last, best (by the return on unseen levels) or the number of an update."""
    shard_episodes: int = 50
    """Episodes a file."""
    out: str | None = None
    """The folder of the data set, which must not exist; None: the run's trajectories folder."""


def main(arguments: Sequence[str]) -> int:
    """Collects episodes; returns the exit code."""
    words, options = command_line.parse(
        Options, arguments, _USAGE, "Write episodes of a run's policy as an RLDS data set."
    )
    run = Path(command_line.one(words, "run", _USAGE))
    check_ranges(options, {"episodes": EPISODES, "shard_episodes": COUNT, "seed": NATURAL})
    out = Path(options.out) if options.out else run / "trajectories"
    source = policy_files.find(run, options.checkpoint)
    if out.exists():
        raise UserError(f"{out} exists already; give another folder with --out.")
    seed = source.config.seed if options.seed is None else options.seed
    with quiet_start():
        from tfrl.evaluation import policy

        player = policy.load(source, greedy=options.greedy)
        import tensorflow_datasets as tfds
    num_envs = min(options.episodes, _ENVS)
    config = dataclasses.replace(source.config, seed=seed)
    spec = level_spec(config, options.levels, num_envs, Use.COLLECTION)
    try:
        files.make_folder(out.parent)
        with files.replacing(out) as staged, files.tensorflow_writes():
            staged.mkdir()
            writer = _writer(tfds, staged, config.env, player.observation_spec.shape, options.shard_episodes)
            play(
                player,
                spec,
                range(num_envs),
                episodes_each=-(-options.episodes // num_envs),
                watcher=EpisodeBuffer(num_envs, -(-options.episodes // num_envs), writer),
            )
            writer.close_all()
    except OSError as error:
        raise UserError(f"cannot write the data set in {out}: {files.reason(error)}.") from None
    print(out)
    return 0


class EpisodeBuffer(Watcher):
    """Holds the running episode of each env, and hands it on when it ends.

    A step holds o_t, a_t and what a_t earned: reward r_t and discount, 0 where it ended the episode. As RLDS
    wants it, one more step ends an episode, `is_last` and `is_terminal`: its observation would be the
    terminal frame, which procgen does not show, and is all zeros, as are its action, reward and discount.

    Args:
      num_envs: how many.
      episodes_each: further episodes of an env are not handed on.
      writer: has `add_examples`, as tfds.core.SequentialWriter.
    """

    def __init__(self, num_envs: int, episodes_each: int, writer: Any) -> None:
        self._episodes_each = episodes_each
        self._writer = writer
        self._steps: list[list[dict[str, Any]]] = [[] for _ in range(num_envs)]
        self._done = np.zeros(num_envs, np.int64)
        self._count = 0

    def before(self, env: VecEnv, observations: np.ndarray, actions: np.ndarray) -> None:
        """Begins a step of each env."""
        for i in np.flatnonzero(self._done < self._episodes_each):
            steps = self._steps[i]
            steps.append(_step(observations[i].copy(), int(actions[i]), is_first=not steps))

    def after(self, step: Step) -> None:
        """Completes the steps, and hands on the episodes that they ended."""
        for i in np.flatnonzero(self._done < self._episodes_each):
            steps = self._steps[i]
            steps[-1] |= {"reward": np.float32(step.reward[i]), "discount": np.float32(not step.first[i])}
            if not step.first[i]:
                continue
            steps.append(_step(np.zeros_like(steps[0]["observation"]), 0, is_last=True, is_terminal=True))
            example = {"steps": steps, "episode_id": self._count, "env_index": int(i)}
            self._writer.add_examples({"train": [example]})
            self._steps[i] = []
            self._done[i] += 1
            self._count += 1


def _step(observation: np.ndarray, action: int, **flags: bool) -> dict[str, Any]:
    step = {"observation": observation, "action": action, "reward": np.float32(0), "discount": np.float32(0)}
    return step | {"is_first": False, "is_last": False, "is_terminal": False} | flags


def _writer(tfds: Any, out: Path, env: str, observation_shape: tuple[int, ...], shard_episodes: int) -> Any:
    scalar = tfds.features.Scalar
    step = {
        "observation": tfds.features.Image(shape=observation_shape, encoding_format="png"),
        "action": scalar(np.int32, doc="what was done on this observation"),
        "reward": scalar(np.float32, doc="what the action earned, raw"),
        "discount": scalar(np.float32, doc="0 where the action ended the episode, else 1"),
        "is_first": scalar(np.bool_),
        "is_last": scalar(np.bool_),
        "is_terminal": scalar(np.bool_),
    }
    features = tfds.features.FeaturesDict(
        {"steps": tfds.features.Dataset(step), "episode_id": np.int64, "env_index": np.int64}
    )
    identity = tfds.core.dataset_info.DatasetIdentity(
        name=f"{env}_episodes", version=tfds.core.Version("1.0.0"), data_dir=str(out), module_name="tfrl"
    )
    info = tfds.core.DatasetInfo(builder=identity, features=features, description=f"Episodes of {env}.")
    writer = tfds.core.SequentialWriter(info, max_examples_per_shard=shard_episodes)
    writer.initialize_splits(["train"])
    return writer


if __name__ == "__main__":
    endings.run(main)
