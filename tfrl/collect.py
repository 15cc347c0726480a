"""python -m tfrl.collect RUN: episodes of a policy as an RLDS data set (Ramos et al. 2021, arXiv:2111.02767).

Any tensorflow-datasets reads it: `tfds.builder_from_directory(DIRECTORY).as_dataset(split="train")`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
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
from tfrl.envs.spec import ActionSpec, ArraySpec, Box
from tfrl.envs.vec_env import Step, VecEnv
from tfrl.evaluation import policy_files
from tfrl.evaluation.episodes import Player, Watcher, play
from tfrl.evaluation.levels import check_level_set, level_spec
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
    task, out, load = _policy(words, options)
    levels = registry.family(task.env).level_sets[0] if options.levels == "auto" else options.levels
    check_level_set(task.env, levels)
    if out.exists():
        raise UserError(f"{out} exists already; give another folder with --out.")
    with quiet_start():
        player = load()
        import tensorflow  # noqa: F401, ICN001 - which tfds would import later, and noisily
        import tensorflow_datasets as tfds
    num_envs = min(options.episodes, _ENVS)
    episodes_each = -(-options.episodes // num_envs)
    try:
        files.make_folder(out.parent)
        with files.replacing(out) as staged, files.tensorflow_writes():
            staged.mkdir()
            writer = _writer(tfds, staged, task, options.shard_episodes)
            play(
                player,
                level_spec(task, levels, num_envs, Use.COLLECTION),
                range(num_envs),
                episodes_each=episodes_each,
                watcher=EpisodeBuffer(num_envs, episodes_each, writer),
            )
            writer.close_all()
    except OSError as error:
        raise UserError(f"cannot write the data set in {out}: {files.reason(error)}.") from None
    print(out)
    return 0


def _policy(words: list[str], options: Options) -> tuple[Any, Path, Callable[[], Player]]:
    """Returns the task, the data set's folder, and what loads the policy, for which TensorFlow may be needed.

    Raises:
      UserError: there is no such run, checkpoint or env, or flags contradict each other.
    """
    of_run = {"--greedy": options.greedy, "--epsilon": options.epsilon is not None}
    for flag in (name for name, given in of_run.items() if given):
        if options.random or options.policy == "random":
            raise UserError(f"{flag} would do nothing to a random policy; leave it out.")
    if all(of_run.values()):
        raise UserError("--greedy is --epsilon 0; give one of them.")
    if options.random:
        check_no_run(words)
        task = task_without_run(options.random, options.seed)
        out = Path(options.out or f"{registry.file_name(task.env)}-episodes")
        return task, out, lambda: UniformPolicy(registry.specs(task)[1])
    run = folder(command_line.one(words, "run", _USAGE))
    out = Path(options.out) if options.out else run / "trajectories"
    source = policy_files.find(run, options.checkpoint) if options.policy == "run" else None
    config = source.config if source else settings(run)
    task = config if options.seed is None else dataclasses.replace(config, seed=options.seed)
    if source is None:
        return task, out, lambda: UniformPolicy(registry.specs(task)[1])

    def load() -> Player:
        from tfrl.evaluation import policy

        if options.epsilon is None:
            return policy.load(source, greedy=options.greedy)
        best = policy.load(source, greedy=True)
        return EpsilonGreedyPolicy(best, registry.specs(task)[1], options.epsilon)

    return task, out, load


class EpisodeBuffer(Watcher):
    """Holds the running episode of each env, and hands it on when it ends.

    A step holds o_t, a_t and what a_t earned: reward r_t and discount, 0 where it ended the episode for good.
    As RLDS wants it, one more step ends an episode, `is_last`, whose action and reward are zeros:

    - of one that terminated, `is_terminal`, with discount 0 and an observation of zeros: it would be the
      terminal one, which envs here do not show;
    - of one that was cut off, by a time limit say, with discount 1 and the final observation.

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
            steps.append(_step(observations[i].copy(), actions[i].copy(), is_first=not steps))

    def after(self, step: Step) -> None:
        """Completes the steps, and hands on the episodes that they ended."""
        for i in np.flatnonzero(self._done < self._episodes_each):
            steps = self._steps[i]
            steps[-1] |= {"reward": step.reward[i], "discount": np.float32(not step.terminated[i])}
            if not step.first[i]:
                continue
            steps.append(_last(steps[0], _final_observation(step, i)))
            example = {"steps": steps, "episode_id": self._count, "env_index": int(i)}
            self._writer.add_examples({"train": [example]})
            self._steps[i] = []
            self._done[i] += 1
            self._count += 1


def _final_observation(step: Step, i: int) -> np.ndarray | None:
    """Returns the last observation of the episode of env i that was cut off; None where it was not."""
    return step.final_observation[step.truncated[:i].sum()] if step.truncated[i] else None


def _last(like: dict[str, Any], final_observation: np.ndarray | None) -> dict[str, Any]:
    terminal = final_observation is None
    observation = np.zeros_like(like["observation"]) if terminal else final_observation
    last = _step(observation, np.zeros_like(like["action"]), is_last=True, is_terminal=terminal)
    return last | {"discount": np.float32(not terminal)}


def _step(observation: np.ndarray, action: np.ndarray, **flags: bool) -> dict[str, Any]:
    step = {"observation": observation, "action": action, "reward": np.float32(0), "discount": np.float32(0)}
    return step | {"is_first": False, "is_last": False, "is_terminal": False} | flags


def _writer(tfds: Any, out: Path, task: Any, shard_episodes: int) -> Any:
    """Returns a writer of the data set: its features are those of the env's specs."""
    observation_spec, action_spec = registry.specs(task)
    scalar = tfds.features.Scalar
    step = {
        "observation": _observation_feature(tfds, observation_spec),
        "action": _action_feature(tfds, action_spec),
        "reward": scalar(np.float32, doc="what the action earned, raw"),
        "discount": scalar(np.float32, doc="0 where the action ended the episode for good, else 1"),
        "is_first": scalar(np.bool_),
        "is_last": scalar(np.bool_),
        "is_terminal": scalar(np.bool_),
    }
    features = tfds.features.FeaturesDict(
        {"steps": tfds.features.Dataset(step), "episode_id": np.int64, "env_index": np.int64}
    )
    name = re.sub(r"\W", "_", task.env)  # of a Python class, for tfds
    identity = tfds.core.dataset_info.DatasetIdentity(
        name=f"{name}_episodes", version=tfds.core.Version("1.0.0"), data_dir=str(out), module_name="tfrl"
    )
    info = tfds.core.DatasetInfo(builder=identity, features=features, description=_description(task))
    writer = tfds.core.SequentialWriter(info, max_examples_per_shard=shard_episodes)
    writer.initialize_splits(["train"])
    return writer


def _observation_feature(tfds: Any, spec: ArraySpec) -> Any:
    if len(spec.shape) == 3 and spec.shape[-1] in _PNG_CHANNELS:
        return tfds.features.Image(shape=spec.shape, encoding_format="png")
    return tfds.features.Tensor(shape=spec.shape, dtype=np.dtype(spec.dtype))


def _action_feature(tfds: Any, spec: ActionSpec) -> Any:
    doc = "what was done on this observation"
    kind = np.dtype(spec.dtype).type
    if not spec.shape:
        return tfds.features.Scalar(kind, doc=doc)
    doc += ", from -1 to 1" if isinstance(spec, Box) else ""
    return tfds.features.Tensor(shape=spec.shape, dtype=kind, doc=doc)


def _description(task: Any) -> str:
    spec = registry.specs(task)[1]
    if not isinstance(spec, Box):
        from_ = f" Action 0 stands for the env's own {spec.start}." if spec.start else ""
        return f"Episodes of {task.env}.{from_}"
    low, high = list(spec.low), list(spec.high)
    return f"Episodes of {task.env}. Actions from -1 to 1 stand for the env's own from {low} to {high}."


if __name__ == "__main__":
    endings.run(main)
