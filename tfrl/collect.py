"""python -m tfrl.collect RUN: record episodes of a policy as an RLDS set, for imitation and offline RL.

Every tensorflow-datasets reads it: `tfds.builder_from_directory(FOLDER).as_dataset(split="train")`. Shard k
depends only on the policy, the seed and k. So a set that was interrupted goes on with its next shard, and has
the same bits as one that was not, with any number of processes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from tfrl import Function
from tfrl.algorithms.runs import find_policy, folder_of, run_folder
from tfrl.cli import endings, flags
from tfrl.cli.errors import TrainingError, UserError
from tfrl.cli.flags import COUNT, FRACTION, NATURAL, Range
from tfrl.cli.streams import quiet_start, tell
from tfrl.config.run import Task
from tfrl.envs import facts as env_facts
from tfrl.envs import registry
from tfrl.envs.facts import Facts
from tfrl.envs.spec import Step, VecEnv
from tfrl.experience import recorded
from tfrl.experience.episodes import (
    LONGEST_EPISODE,
    ActingPolicy,
    Watcher,
    check_level_set,
    check_plays,
    level_spec,
    play,
)
from tfrl.experience.recorded import Episode, Manifest, Spaces
from tfrl.networks.weights import PolicySource, split_checkpoint
from tfrl.record import UniformPolicy, task_without_run
from tfrl.run import files, rng
from tfrl.run.folder import locked, weights_sha256

_USAGE = "python -m tfrl.collect RUN --episodes N, --random ENV --episodes N, or --describe SET"
_NUM_ENVS = 16  # of a shard; they decide its episodes
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Options:
    """The episodes to record."""

    episodes: Annotated[int | None, COUNT] = None
    """Number of episodes; None: 100, unless --steps is given."""
    steps: Annotated[int | None, COUNT] = None
    """Record whole files of --shard-episodes episodes until there are this many env steps."""
    sample: bool = False
    """Draw the actions. This is the default, unless the run's own evaluations are greedy."""
    greedy: bool = False
    """Take the most likely actions."""
    epsilon: Annotated[float | None, FRACTION] = None
    """Take the most likely actions, but uniform ones in this share of steps."""
    levels: Literal["auto", "train", "test"] = "auto"
    """The run's training levels, or the levels of the whole game. auto: train, for envs with levels."""
    seed: Annotated[int | None, NATURAL] = None
    """Seed of the episodes and the actions; None: the run's."""
    checkpoint: str = "last"
    """Checkpoint to play: last, best (by the return in evaluations) or the number of an update."""
    random: str | None = None
    """An env to play with uniform actions, without a run."""
    shard_episodes: Annotated[int, COUNT] = 64
    """Episodes of a file."""
    actors: Annotated[int, Range(0, 256)] = 0
    """Processes that play, each a shard at a time; 0: this process. The set does not depend on them."""
    env_processes: Annotated[int, Range(0, 1024)] = 0
    """Processes that step the envs of a shard, for envs whose steps take about 1 ms or more."""
    out: str | None = None
    """The folder of the set. If it has a part of the same set, that is continued. None: RUN/episodes; with
    --random ENV-episodes here."""
    describe: str | None = None
    """Describe a set instead: its episodes, steps and returns, and a picture of the returns. A folder, a name
    of tensorflow-datasets, or minari:ID."""
    split: str = "train"
    """The split that --describe reads."""
    picture: str | None = None
    """The picture of --describe; None: NAME-returns.png here."""
    facts: bool = False
    """Print only the spaces of the set of --describe, as JSON."""

    @property
    def ineffective(self) -> dict[str, str]:
        """The flags that have no effect in this combination, each with the reason."""
        of_description, of_run = ("split", "picture", "facts"), ("sample", "greedy", "epsilon", "checkpoint")
        if self.describe is None:
            found = dict.fromkeys(of_description, "without --describe")
            return found | (dict.fromkeys(of_run, "with --random") if self.random else {})
        others = [name for name in vars(self) if name not in ("describe", *of_description)]
        found = dict.fromkeys(others, "with --describe")
        return found | ({"picture": "with --facts"} if self.facts else {})


def main(arguments: Sequence[str]) -> int:
    """Records episodes, or describes a set; returns the exit code."""
    words, options = flags.parse(
        Options, arguments, _USAGE, "Record episodes as an RLDS set, or describe a set."
    )
    if options.describe is not None:
        if words:
            raise UserError(f"--describe takes no run; got {words[0]}.")
        return _describe(options)
    if options.sample + options.greedy + (options.epsilon is not None) > 1:
        raise UserError("--sample, --greedy and --epsilon exclude each other: give one of them.")
    if options.random:
        if words:
            raise UserError(f"--random takes no run; got {words[0]}.")
        task, source = task_without_run(options.random, options.seed), None
        out = Path(options.out or f"{registry.file_name(task.env)}-episodes")
    else:
        run, checkpoint = split_checkpoint(run_folder(flags.one(words, "run", _USAGE)), options.checkpoint)
        source = find_policy(run, checkpoint)
        seed = source.config.seed if options.seed is None else options.seed
        task = dataclasses.replace(source.config, seed=seed)
        check_plays(source.config, task)
        out = Path(options.out) if options.out else folder_of(run) / "episodes"
    task = _with_processes(task, options.env_processes)
    greedy = options.greedy or (options.epsilon is None and not options.sample and _plays_greedily(source))
    about = {
        "policy": "uniform" if source is None else f"{source.config.algorithm}, {source.name}",
        "weights": None if source is None else weights_sha256(source.weights),
        "actions": "uniform" if source is None else recorded.actions_in_words(greedy, options.epsilon),
        "epsilon": options.epsilon,
    }
    manifest = record(
        _Saved(source, task, greedy, options.epsilon), task, about, out,
        episodes=options.episodes, steps=options.steps, levels=options.levels,
        shard_episodes=options.shard_episodes, actors=options.actors,
    )  # fmt: skip
    tell(f"The set has {manifest.episodes:,} episodes and {manifest.steps:,} env steps.")
    print(out)
    return 0


def _plays_greedily(source: PolicySource | None) -> bool:
    return source is not None and source.config.eval_greedy


def _with_processes(task: Any, processes: int) -> Any:
    if hasattr(task, "env_processes"):
        return dataclasses.replace(task, env_processes=processes)
    return _RandomTask(**vars(task), env_processes=processes)


@dataclass(frozen=True)
class _RandomTask(Task):
    """The env of --random."""

    env_processes: int = 0


# Recording


def record(
    make_policy: Callable[[], ActingPolicy],
    task: Any,
    about: dict[str, Any],
    out: Path,
    *,
    episodes: int | None = None,
    steps: int | None = None,
    levels: str = "auto",
    shard_episodes: int = 64,
    actors: int = 0,
) -> Manifest:
    """Records episodes in a folder, and returns what it has.

    Args:
      make_policy: makes the policy, in each process that plays; for `actors` it must be picklable.
      task: the settings of the env, and the seed.
      about: JSON values that tell this policy from others.
      out: the folder of the set; a part of the same set in it is continued.
      episodes, steps: record so many, env steps rounded up to whole shards; None and None: 100 episodes.
      levels: "train", "test", or "auto".
      shard_episodes: episodes of a file.
      actors: the number of processes that play; 0: this one.

    Raises UserError for wrong settings or a full disk; the complete shards stay.
    """
    if episodes is not None and steps is not None:
        raise UserError("--episodes and --steps exclude each other: give one of them.")
    episodes = 100 if episodes is None and steps is None else episodes
    level_set = registry.family(task.env).level_sets[0] if levels == "auto" else levels
    check_level_set(task.env, level_set)
    spaces = Spaces(*registry.specs(task))
    settings = {name: getattr(task, name) for name in _OF_THE_TASK}
    full = {**settings, "levels": level_set, "shard_episodes": shard_episodes, **about}
    manifest = Manifest.of(out, task.env, full)
    facts = facts_text(task)
    job = _Job(make_policy, task, level_set, spaces, out, manifest.name)

    def missing() -> Iterator[tuple[int, int]]:
        """The numbers of further shards, and their episodes."""
        number = len(manifest.shards)
        while True:
            left = math.inf if episodes is None else episodes - number * shard_episodes
            if left <= 0:
                return
            yield number, int(min(shard_episodes, left))
            number += 1

    def enough() -> bool:
        return manifest.steps >= steps if steps is not None else manifest.episodes >= (episodes or 0)

    try:
        files.make_folder(out)
        with locked(out, does="writes", instead="--out"), _progress(episodes, steps, manifest) as show:
            if enough():
                return manifest
            if manifest.shards and len(manifest.shards[-1].lengths) < shard_episodes:
                manifest.shards.pop()  # the last one of a shorter set; it is played again, whole
            with contextlib.closing(_played(job, missing(), actors, shard_episodes)) as shards:
                for shard in shards:
                    manifest.shards.append(shard)
                    manifest.save(spaces, facts)
                    show()
                    if enough():
                        break
    except OSError as error:
        kept = Manifest.of(out, task.env, full).episodes
        more = f"; {out} keeps its {kept} episodes" if kept else ""
        raise UserError(f"cannot write the set in {out}: {files.reason(error)}{more}.") from None
    except SystemExit:  # a signal
        kept = Manifest.of(out, task.env, full).episodes
        tell(f"Stopped; {out} has {kept:,} episodes, and the same command continues.")
        raise
    return manifest


_OF_THE_TASK = (
    *("env", "env_kwargs", "frame_skip", "max_episode_steps", "distribution_mode", "num_levels"),
    *("start_level", "action_masks", "seed"),
)


@dataclass(frozen=True)
class _Job:
    """Plays and writes shards; a process makes its policy at its first shard."""

    make_policy: Callable[[], ActingPolicy]
    task: Any
    level_set: str
    spaces: Spaces
    out: Path
    name: str

    def __call__(self, number: int, episodes: int, shard_episodes: int) -> recorded.Recorded:
        """Plays shard `number` with so many episodes, and writes it."""
        with quiet_start():
            policy = _policy_of(self)  # first, because it decides the threads of TensorFlow
            recorded.import_tfds()
        # A function may remember what it saw last, as a controller does.
        num_envs = 1 if isinstance(policy, CallablePolicy) else min(shard_episodes, _NUM_ENVS)
        spec = level_spec(self.task, self.level_set, num_envs, rng.Use.COLLECTION)
        spec = dataclasses.replace(spec, seed=rng.env_seed(spec.seed, rng.Use.COLLECTION, number))
        each = -(-episodes // num_envs)
        recorder = Recorder(num_envs, each)
        play(policy, spec, range(num_envs), episodes_each=each, watcher=recorder)
        path = Manifest(self.out, self.name, {}).shard(number)
        found = [episode for one in zip(*recorder.episodes, strict=True) for episode in one][:episodes]
        return recorded.write_shard(path, self.spaces, found, number * shard_episodes)


_policies: dict[int, tuple[_Job, ActingPolicy]] = {}


def _policy_of(job: _Job) -> ActingPolicy:
    if 0 not in _policies or _policies[0][0] is not job:
        _policies[0] = job, job.make_policy()
    return _policies[0][1]


def _played(
    job: _Job, shards: Iterator[tuple[int, int]], actors: int, shard_episodes: int
) -> Generator[recorded.Recorded]:
    """Plays these shards, and yields the facts about each, in order."""
    if not actors:
        for number, episodes in shards:
            yield job(number, episodes, shard_episodes)
        return
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(actors, context, _begin_actor, (job, os.getpid()))
    waiting: list[concurrent.futures.Future[recorded.Recorded]] = []
    try:
        while True:
            while len(waiting) < actors and (one := next(shards, None)) is not None:
                waiting.append(pool.submit(_in_actor, *one, shard_episodes))
            if not waiting:
                return
            yield waiting.pop(0).result()
    except concurrent.futures.process.BrokenProcessPool:
        raise TrainingError("a process that plays has died; the same command continues the set") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin_actor(job: _Job, parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one
    if os.getppid() != parent:
        os._exit(1)
    globals()["_job"] = job


def _in_actor(number: int, episodes: int, shard_episodes: int) -> recorded.Recorded:
    return globals()["_job"](number, episodes, shard_episodes)


class Recorder(Watcher):
    """Collects the episodes that are played; `episodes` has a list for each env."""

    def __init__(self, num_envs: int, each: int) -> None:
        self.episodes: list[list[Episode]] = [[] for _ in range(num_envs)]
        self._each = each
        self._shown: list[list[np.ndarray]] = [[] for _ in range(num_envs)]
        self._taken: list[list[np.ndarray]] = [[] for _ in range(num_envs)]
        self._rewards: list[list[float]] = [[] for _ in range(num_envs)]

    def before(self, env: VecEnv, observations: np.ndarray, actions: np.ndarray) -> None:
        """Adds o_t and a_t of the envs that still have episodes to play."""
        for i, done in enumerate(self.episodes):
            if len(done) < self._each:
                self._shown[i].append(observations[i].copy())
                self._taken[i].append(actions[i].copy())

    def after(self, step: Step) -> None:
        """Adds rewards, and completes episodes."""
        for i, done in enumerate(self.episodes):
            if len(done) >= self._each:
                continue
            self._rewards[i].append(step.reward[i])
            if not step.first[i]:
                continue
            cut_off = len(self._rewards[i]) >= LONGEST_EPISODE  # by `play`, not by the env
            last = self._shown[i][-1]  # a terminated episode does not show its last observation
            if step.truncated[i]:
                assert step.final_observation is not None
                last = step.final_observation[step.truncated[:i].sum()]
            elif cut_off:
                last = step.observation[i]  # the env goes on
            parts = (
                np.stack([*self._shown[i], last]),
                np.stack(self._taken[i]),
                np.array(self._rewards[i], np.float32),
            )
            done.append(Episode(*parts, terminated=not (step.truncated[i] or cut_off)))
            self._shown[i], self._taken[i], self._rewards[i] = [], [], []


@contextlib.contextmanager
def _progress(episodes: int | None, steps: int | None, manifest: Manifest) -> Iterator[Callable[[], None]]:
    """A bar on a terminal; yields a function that shows what the manifest has."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("env steps" if steps else "episodes", total=steps or episodes)

        def show() -> None:
            progress.update(bar, completed=manifest.steps if steps else manifest.episodes)

        show()
        yield show


def facts_text(task: Any) -> str:
    """The facts about the env of a task, for the folder of a set."""
    if (text := registry.facts_text(task)) is not None:
        return text
    facts = Facts(*registry.specs(task), "", registry.frames_per_second(task), False, False)
    return env_facts.text_of(task.env, {}, facts)


# Policies


@dataclass(frozen=True)
class _Saved:
    """Makes the policy of a run; without a source, a uniform one."""

    source: PolicySource | None
    task: Any
    greedy: bool
    epsilon: float | None

    def __call__(self) -> ActingPolicy:
        uniform = UniformPolicy(*registry.specs(self.task))
        if self.source is None:
            return uniform
        from tfrl.algorithms.policies import SavedPolicy

        policy = SavedPolicy(self.source, greedy=self.greedy or self.epsilon is not None)
        return policy if self.epsilon is None else EpsilonGreedy(policy, uniform, self.epsilon)


class EpsilonGreedy:
    """Acts like a greedy policy, but uniformly in a share of the steps; follows `ActingPolicy`."""

    def __init__(self, policy: Any, uniform: Any, epsilon: float) -> None:
        self._policy, self._uniform, self._epsilon = policy, uniform, np.float32(epsilon)
        self.memory = policy.memory

    def draw_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """The chance of a uniform action, and the numbers of both policies, float32 [steps, 1 + K + K']."""
        chance = generator.random((steps, 1), np.float32)
        own = self._policy.draw_noise(generator, steps)
        self._width = own.shape[1]
        return np.concatenate([chance, own, self._uniform.draw_noise(generator, steps)], axis=1)

    def act(self, observations: np.ndarray, noise: np.ndarray, *memory: np.ndarray) -> Any:
        """Actions [B, *shape] by noise float32 [B, 1 + K + K']; with a memory, also states [B, S]."""
        chosen = self._policy.act(observations, noise[:, 1 : 1 + self._width], *memory)
        actions, states = chosen if memory else (chosen, None)
        at_random = self._uniform.act(observations, noise[:, 1 + self._width :])
        mixed = noise[:, 0].reshape(-1, *(1,) * (actions.ndim - 1)) < self._epsilon
        actions = np.where(mixed, at_random, actions)
        return (actions, states) if memory else actions


class CallablePolicy:
    """Acts in one env by a function from an observation to an action of `env.step`; an `ActingPolicy`."""

    def __init__(self, function: Callable[[Any], Any], spaces: Spaces) -> None:
        self._function, self._spaces = function, spaces

    def draw_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """Nothing, float32 [steps, 0]."""
        return np.zeros((steps, 0), np.float32)

    def act(self, observations: np.ndarray, noise: np.ndarray, *memory: np.ndarray) -> np.ndarray:
        """Actions [B, *shape] by one call, for the observation of the env, which `play` repeats."""
        taken = np.asarray(self._function(_one(self._spaces.shown(observations[:1]), 0)))
        return self._spaces.actions(taken[None], "the policy").repeat(len(observations), axis=0)

    def memory(self, envs: int) -> None:
        """Remembers nothing."""


def _one(shown: Any, i: int) -> Any:
    """Observation i of a batch; the arrays of a Tuple become a tuple."""
    if not isinstance(shown, dict):
        return shown[i]
    parts = {name: _one(inner, i) for name, inner in shown.items()}
    if all(name.isdecimal() for name in parts):
        return tuple(parts[name] for name in sorted(parts, key=int))
    return parts


# Describing


def _describe(options: Options) -> int:
    """Prints the facts about a set, and draws the histogram of its returns."""
    name = str(options.describe)
    with quiet_start():
        recorded.import_tfds()
    if options.facts:
        print(recorded.facts_of(name, options.split))
        return 0
    found = recorded.open_set(name, options.split, called="--describe")
    returns, lengths, terminated, size = [], [], 0, 0
    for shard in found.shards:
        size += shard.num_bytes
        for raw in shard.raw():
            if not np.isfinite(np.asarray(raw.rewards, np.float64)).all():
                raise UserError(f"{shard.name} has rewards that are NaN or infinite.")
            returns.append(float(np.sum(raw.rewards, dtype=np.float64)))
            lengths.append(len(raw.rewards))
            terminated += raw.terminated
    if not lengths:
        raise UserError(f"{name} has no episodes.")
    from rich import filesize

    values, counts = np.array(returns), np.array(lengths)
    rows = {
        "env": found.env or "not named",
        "episodes": f"{len(values):,}, of which {terminated:,} terminated and the others were truncated",
        "env steps": f"{counts.sum():,}, {counts.min():,} to {counts.max():,} an episode",
        "return": f"{values.mean():.2f} \u00b1 {values.std():.2f}, {values.min():.2f} to {values.max():.2f}",
        "files": f"{len(found.shards):,} shards, {filesize.decimal(size)}",
    }
    for title, text in rows.items():
        print(f"{title:10} {text}")
    path = Path(options.picture or f"{registry.file_name(name.rstrip('/').rpartition('/')[2])}-returns.png")
    try:
        from tfrl.reporting import plots

        with files.replacing(path) as staged:
            plots.histogram(values, f"{name}: return of {len(values):,} episodes").savefig(
                staged, format="png"
            )
    except OSError as error:
        raise UserError(f"cannot write {path}: {files.reason(error)}.") from None
    print(path)
    return 0


sys.modules[__name__].__class__ = Function

if __name__ == "__main__":
    endings.run(main)
