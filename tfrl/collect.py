"""python -m tfrl.collect RUN: episodes of a policy as an RLDS data set (Ramos et al. 2021, arXiv:2111.02767).

Any tensorflow-datasets reads it: `tfds.builder_from_directory(DIRECTORY).as_dataset(split="train")`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from tfrl.cli import command_line, endings
from tfrl.cli.errors import UserError
from tfrl.cli.quiet import quiet_start
from tfrl.cli.settings import COUNT, FRACTION, NATURAL
from tfrl.config.of_run import folder, settings
from tfrl.config.run import EPISODES
from tfrl.envs import registry
from tfrl.envs.spec import Box, Discrete, MultiDiscrete, Step, VecEnv
from tfrl.evaluation import policy_files
from tfrl.evaluation.episodes import Player, Watcher, check_level_set, level_spec, play
from tfrl.evaluation.uniform import EpsilonGreedyPolicy, UniformPolicy, check_no_run, task_without_run
from tfrl.run import files
from tfrl.run.rng import Use

_USAGE = "python -m tfrl.collect RUN --episodes N, or python -m tfrl.collect --random ENV --episodes N"
_ENVS = 8  # whose episodes are held in memory until they end
_PNG_CHANNELS = (1, 3, 4)


@dataclass(frozen=True)
class Options:
    """The episodes that are collected."""

    episodes: Annotated[int, EPISODES] = 100
    """Episodes; rounded up to as many in every env."""
    levels: Literal["auto", "train", "test"] = "auto"
    """The run's training levels, or unseen ones; auto: train, where the env has levels."""
    policy: Literal["run", "random"] = "run"
    """The run's policy, or one that draws all actions alike."""
    greedy: bool = False
    """Take the most likely action instead of drawing one."""
    epsilon: Annotated[float | None, FRACTION] = None
    """Take the most likely action, but for this share of steps, in which all actions are as likely."""
    seed: Annotated[int | None, NATURAL] = None
    """Decides levels and actions; None: the run's."""
    checkpoint: str = "last"
    """last, best (by the return in evaluations) or the number of an update."""
    random: str | None = None
    """An env to play with a random policy, without a run."""
    shard_episodes: Annotated[int, COUNT] = 50
    """Episodes a file."""
    out: str | None = None
    """The folder of the data set, which must not exist; None: the run's trajectories folder, or
    RANDOM-episodes here."""


def main(arguments: Sequence[str]) -> int:
    """Collects episodes; returns the exit code."""
    words, options = command_line.parse(
        Options, arguments, _USAGE, "Write episodes of a policy as an RLDS data set."
    )
    uniform = bool(options.random) or options.policy == "random"
    if uniform and (options.greedy or options.epsilon is not None):
        flag = "--greedy" if options.greedy else "--epsilon"
        raise UserError(f"{flag} would do nothing to a random policy; leave it out.")
    if options.greedy and options.epsilon is not None:
        raise UserError("--greedy is --epsilon 0; give one of them.")
    source = None
    if options.random:
        check_no_run(words)
        task = task_without_run(options.random, options.seed)
        out = Path(options.out or f"{registry.file_name(task.env)}-episodes")
    else:
        run = folder(command_line.one(words, "run", _USAGE))
        source = None if uniform else policy_files.find(run, options.checkpoint)
        config = source.config if source else settings(run)
        task = config if options.seed is None else dataclasses.replace(config, seed=options.seed)
        out = Path(options.out) if options.out else run / "trajectories"
    levels = registry.family(task.env).level_sets[0] if options.levels == "auto" else options.levels
    check_level_set(task.env, levels)
    if out.exists():
        raise UserError(f"{out} exists already; give another folder with --out.")
    num_envs = min(options.episodes, _ENVS)
    episodes_each = -(-options.episodes // num_envs)
    with quiet_start():
        player = _player(source, task, options)
        import tensorflow  # noqa: F401, ICN001 - which tfds would import later, and noisily
        import tensorflow_datasets as tfds
    try:
        files.make_folder(out.parent)
        with files.replacing(out) as staged, files.tensorflow_writes():
            staged.mkdir()
            writer = _writer(tfds, staged, task, options.shard_episodes)
            spec = level_spec(task, levels, num_envs, Use.COLLECTION)
            buffer = EpisodeBuffer(num_envs, episodes_each, writer)
            play(player, spec, range(num_envs), episodes_each=episodes_each, watcher=buffer)
            writer.close_all()
    except OSError as error:
        raise UserError(f"cannot write the data set in {out}: {files.reason(error)}.") from None
    print(out)
    return 0


def _player(source: policy_files.PolicySource | None, task: Any, options: Options) -> Player:
    """The policy of a run, or a uniform one where there is no source."""
    specs = registry.specs(task)
    if source is None:
        return UniformPolicy(*specs)
    from tfrl.evaluation import policy

    player = policy.load(source, greedy=options.greedy or options.epsilon is not None)
    return player if options.epsilon is None else EpsilonGreedyPolicy(player, *specs, options.epsilon)


class EpisodeBuffer(Watcher):
    """Holds the running episode of each env, and hands it on when it ends.

    A step holds o_t, a_t and what a_t earned: reward r_t and discount, 0 where it ended the episode for good.
    As RLDS wants it, one more step ends an episode, `is_last`, whose action and reward are zeros:

    - of one that terminated, `is_terminal`, with discount 0 and an observation of zeros: it would be the
      terminal one, which envs here do not show;
    - of one that was cut off, by a time limit say, with discount 1 and the final observation.

    An observation of several arrays is a dict of them.

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
        self._spec = env.observation_spec
        for i in np.flatnonzero(self._done < self._episodes_each):
            steps = self._steps[i]
            steps.append(_step(self._shown(observations[i]), actions[i].copy(), is_first=not steps))

    def _shown(self, observation: np.ndarray) -> np.ndarray | dict[str, np.ndarray]:
        return self._spec.named(observation) if self._spec.parts else observation.copy()

    def after(self, step: Step) -> None:
        """Completes the steps, and hands on the episodes that they ended."""
        for i in np.flatnonzero(self._done < self._episodes_each):
            steps = self._steps[i]
            steps[-1] |= {"reward": step.reward[i], "discount": np.float32(not step.terminated[i])}
            if not step.first[i]:
                continue
            terminal = not step.truncated[i]
            if terminal:
                observation = self._shown(np.zeros(self._spec.shape, self._spec.dtype))
            else:
                observation = self._shown(step.final_observation[step.truncated[:i].sum()])
            action = np.zeros_like(steps[0]["action"])
            ending = _step(observation, action, is_last=True, is_terminal=terminal)
            steps.append(ending | {"discount": np.float32(not terminal)})
            example = {"steps": steps, "episode_id": self._count, "env_index": int(i)}
            self._writer.add_examples({"train": [example]})
            self._steps[i] = []
            self._done[i] += 1
            self._count += 1


def _step(observation: np.ndarray, action: np.ndarray, **flags: bool) -> dict[str, Any]:
    step = {"observation": observation, "action": action, "reward": np.float32(0), "discount": np.float32(0)}
    return step | {"is_first": False, "is_last": False, "is_terminal": False} | flags


def _writer(tfds: Any, out: Path, task: Any, shard_episodes: int) -> Any:
    """Returns a writer of the data set: its features are those of the env's specs."""
    seen, done = registry.specs(task)
    of, description = tfds.features, f"Episodes of {task.env}."
    if isinstance(done, Box):
        low, high = list(done.low), list(done.high)
        description += f" Actions from -1 to 1 stand for the env's own from {low} to {high}."
    elif isinstance(done, Discrete) and done.start:
        description += f" Action 0 stands for the env's own {done.start}."
    elif isinstance(done, MultiDiscrete) and any(done.starts):
        description += f" Actions of zeros stand for the env's own {list(done.starts)}."

    def array(shape: tuple[int, ...], dtype: str) -> Any:
        if len(shape) == 3 and dtype == "uint8" and shape[-1] in _PNG_CHANNELS:
            return of.Image(shape=shape, encoding_format="png")
        return of.Tensor(shape=shape, dtype=np.dtype(dtype))

    if seen.parts:
        observation = {part.identifier: array(part.env_shape, part.env_dtype) for part in seen.parts}
    else:
        observation = array(seen.shape, seen.dtype)
    step = {
        "observation": observation,
        "action": of.Tensor(shape=done.shape, dtype=np.dtype(done.dtype), doc="what was done"),
        "reward": of.Scalar(np.float32, doc="what the action earned, raw"),
        "discount": of.Scalar(np.float32, doc="0 where the action ended the episode for good, else 1"),
        **{name: of.Scalar(np.bool_) for name in ("is_first", "is_last", "is_terminal")},
    }
    features = of.FeaturesDict({"steps": of.Dataset(step), "episode_id": np.int64, "env_index": np.int64})
    name = re.sub(r"\W", "_", task.env)  # of a Python class, for tfds
    identity = tfds.core.dataset_info.DatasetIdentity(
        name=f"{name}_episodes", version=tfds.core.Version("1.0.0"), data_dir=str(out), module_name="tfrl"
    )
    info = tfds.core.DatasetInfo(builder=identity, features=features, description=description)
    writer = tfds.core.SequentialWriter(info, max_examples_per_shard=shard_episodes)
    writer.initialize_splits(["train"])
    return writer


if __name__ == "__main__":
    endings.run(main)
