"""python -m tfrl.record RUN: write a video of the policy."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from tfrl.algorithms.policies import SavedPolicy
from tfrl.algorithms.runs import find_policy, folder_of, run_folder
from tfrl.cli import endings, flags
from tfrl.cli.errors import UserError
from tfrl.cli.flags import NATURAL
from tfrl.cli.streams import quiet_start
from tfrl.config.run import Task, check_task
from tfrl.envs import registry
from tfrl.envs.observations import ArraySpec
from tfrl.envs.spec import ActionSpec
from tfrl.experience.episodes import check_level_set, check_plays
from tfrl.networks.weights import split_checkpoint
from tfrl.reporting import video
from tfrl.reporting.video import Recording, Window
from tfrl.run import files

_USAGE = "python -m tfrl.record RUN, or python -m tfrl.record --random ENV"


@dataclass(frozen=True)
class Options(Recording):
    """The video."""

    format: Literal["mp4", "gif"] | None = None
    """The format of the file; a gif is shown in half the size. None: the ending of --out, or mp4."""
    window: bool = False
    """Show the policy in a window instead of writing a file. Escape, q or its close button ends it."""
    greedy: bool | None = None
    """Take the most likely action; --no-greedy draws actions; None: as in the run's own evaluations."""
    seed: Annotated[int | None, NATURAL] = None
    """Seed of levels and actions; None: the run's."""
    checkpoint: str = "last"
    """Checkpoint to show: last, best (by the return in evaluations) or the number of an update."""
    random: str | None = None
    """An env to show with a random policy, without a run."""
    out: str | None = None
    """The file, .mp4 or .gif. None: in the run's videos folder; with --random ENV.mp4."""

    @property
    def ineffective(self) -> dict[str, str]:
        """The flags that have no effect in this combination, each with the reason."""
        found = dict.fromkeys(("greedy", "checkpoint") if self.random else (), "with --random")
        if self.window:
            found["format"] = "with --window"
        elif self.out and not self.out.endswith(f".{self.format}"):
            found["format"] = "with --out, whose ending is the format"
        return found


def main(arguments: Sequence[str]) -> int:
    """Records a video, or shows a window; returns the exit code."""
    words, options = flags.parse(Options, arguments, _USAGE, "Show a policy at play.")
    if options.out and Path(options.out).suffix not in (".mp4", ".gif"):
        raise UserError(f"--out must be a file that ends in .mp4 or .gif; got {options.out!r}.")
    if options.window and options.out:
        raise UserError("--window writes no file; leave --out out, or --window.")
    ending = options.format or "mp4"
    if options.random:
        if words:
            raise UserError(f"--random takes no run; got {words[0]}.")
        task, source = task_without_run(options.random, options.seed), None
        path = Path(options.out or f"{registry.file_name(task.env)}.{ending}")
    else:
        run, checkpoint = split_checkpoint(run_folder(flags.one(words, "run", _USAGE)), options.checkpoint)
        source = find_policy(run, checkpoint)
        seed = source.config.seed if options.seed is None else options.seed
        task = dataclasses.replace(source.config, seed=seed)
        check_plays(source.config, task)
        name = f"{registry.file_name(task.env)}-{options.levels}-{source.env_steps}"
        if options.seed is not None:
            name += f"-seed{seed}"
        if options.greedy is not None:
            name += "-greedy" if options.greedy else "-no-greedy"
        path = Path(options.out or folder_of(run) / "videos" / f"{name}.{ending}")
    check_level_set(task.env, options.levels)
    with contextlib.ExitStack() as opened:
        if options.window:  # a missing display is found first
            window = opened.enter_context(Window(task.env, fps=registry.frames_per_second(task)))
        policy: Any = UniformPolicy(*registry.specs(task))
        probabilities = None
        if source is not None:
            greedy = source.config.eval_greedy if options.greedy is None else options.greedy
            with quiet_start():
                policy = SavedPolicy(source, greedy=greedy)
            probabilities = policy.probabilities
        if options.window:
            video.show(policy, task, window, options, probabilities)
            return 0
    try:
        video.save(policy, task, path, options, probabilities)
    except OSError as error:
        raise UserError(f"cannot write {path}: {files.reason(error)}.") from None
    print(path)
    return 0


class UniformPolicy:
    """Uniform actions among the allowed ones; follows `ActingPolicy`."""

    def __init__(self, observation_spec: ArraySpec, action_spec: ActionSpec) -> None:
        self._seen, self._spec = observation_spec, action_spec

    def draw_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """Numbers from [0, 1), one for each number of an action, float32 [steps, K]."""
        return generator.random((steps, *(self._spec.shape or (1,))), np.float32)

    def act(self, observations: np.ndarray, noise: np.ndarray, *memory: np.ndarray) -> np.ndarray:
        """Actions [B, *shape] by noise float32 [B, K]."""
        return self._spec.from_uniform(noise, self._seen.allowed(observations))

    def memory(self, envs: int) -> None:
        """Remembers nothing."""


def task_without_run(env: str, seed: int | None) -> Task:
    """The task of playing an env on all its levels. Raises UserError if there is no such env."""
    task = Task(env=registry.own_name(env), seed=1 if seed is None else seed)
    check_task(task)
    return dataclasses.replace(task, num_levels=0) if task.has_unseen_levels else task


if __name__ == "__main__":
    endings.run(main)
