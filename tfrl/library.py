"""The Python library: what the commands do, as functions. `import tfrl` has them as `tfrl.train` and so on.

They raise errors in place of exit codes, leave signals as they found them, and import TensorFlow when it is
needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfrl.cli import signals
from tfrl.cli.errors import SettingsError, TrainingError, UserError
from tfrl.cli.flags import coerce, flag, nearest, nearest_setting
from tfrl.cli.quiet import quiet_start
from tfrl.config import ALGORITHMS, of_run, owners, reader_of_class
from tfrl.config.run import RLSettings
from tfrl.envs import callables, observations, registry
from tfrl.envs.subprocesses import ENV_PROCESS
from tfrl.evaluation import episodes as playing
from tfrl.evaluation import policy_files
from tfrl.reporting import runs, scores
from tfrl.run import results
from tfrl.run.callbacks import Callback
from tfrl.run.metrics import PROGRESS_FILE

if TYPE_CHECKING:
    from tfrl.evaluation.policy import Policy as ActingPolicy
    from tfrl.experience.memory import Memory
    from tfrl.training.command import Command

MakeEnv = Callable[..., Any]
"""A function that returns a `gymnasium.Env`, or the class of one."""
MakeFeatures = Callable[[Any], Any]
"""A function from Keras inputs to features, a Keras tensor [B, F]."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that `train` has trained, or that is in a folder.

    Attributes:
      folder: its folder.
    """

    folder: Path

    @property
    def results(self) -> dict[str, Any]:
        """The content of results.json; empty where the run was ended by its stop file."""
        return results.read(self.folder) or {}

    @property
    def progress(self) -> dict[str, np.ndarray]:
        """The columns of progress.csv by name, float64 [updates]; NaN where a row has no number."""
        return runs.read_progress(self.folder / PROGRESS_FILE)


def train(
    algorithm: str | type,
    *,
    env: str | MakeEnv | None = None,
    network: str | MakeFeatures | Mapping[str, str | MakeFeatures] | None = None,
    callbacks: Sequence[Callback | str] = (),
    **settings: Any,
) -> Run:
    """Trains, or goes on with a run: what `python -m tfrl.ALGORITHM` does, with the same bits.

    Args:
      algorithm: the name of the command: "ppo", "sac"; or a class of your own that extends one of ours
        (docs/extending.md).
      env: an id, `package.module:function`, or a callable that returns a `gymnasium.Env`. None: the command's
        default.
      network: a function from Keras inputs to features, as `tfrl.networks.own.build` calls it, or
        `package.module:function`, or a name of the zoo; {"actor": ..., "critic": ...} for one each.
      callbacks: called by the loop, the same on all workers of a run; `package.module:Class` stands for one
        that is made without arguments, also in other processes.
      settings: any settings of the command by field name: `total_steps=100_000`. `config` names a YAML file.

    Returns:
      The run, which is complete unless its stop file has ended it.

    Raises:
      SettingsError: one sentence: bad settings or input.
      TrainingError: the run failed: a NaN, or an env that raised an error.
      KeyboardInterrupt: Ctrl-C. The run was saved, and the same call goes on with it. A second Ctrl-C ends
        without saving.
    """
    with _our_errors():
        if ENV_PROCESS in os.environ:
            raise UserError(
                "this process only steps envs, and imports the program for that: put the call of tfrl.train "
                'under `if __name__ == "__main__":`.'
            )
        command = _command(algorithm)
        named = [each for each in callbacks if isinstance(each, str)]
        settings |= {} if network is None else _torsos(network)
        values = _values(command, env, settings | ({"callbacks": named} if named else {}))
        config = command.reader.of_values(values)
        made = [each for each in callbacks if not isinstance(each, str)]
        code = command.train(config, _arguments(values), made)
    if code == signals.STOP_CODES[signal.SIGINT]:
        raise KeyboardInterrupt
    if code == signals.STOP_CODES[signal.SIGTERM]:
        signal.raise_signal(
            signals.OURS.first
        )  # for the handler of the program, or the default, which ends it
    elif code:
        raise TrainingError(f"the run in {config.run_dir} failed with exit code {code}.")
    return Run(config.run_dir)


def _command(algorithm: str | type) -> Command:
    """The command that trains an algorithm."""
    if isinstance(algorithm, type):
        from tfrl.training.command import Command

        return Command(reader_of_class(algorithm), algorithm)
    name = str(algorithm).replace("-", "_").lower()
    known = ("ppo_procgen", *ALGORITHMS)
    if name not in known:
        hint = nearest(name, known)
        raise UserError(f"there is no algorithm {algorithm!r}{hint}; known: {', '.join(known)}.")
    return importlib.import_module(f"tfrl.{name}").main


def _values(command: Command, env: str | MakeEnv | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The given settings by field name, of their fields' types."""
    kinds, aliases, found = command.reader.flag_kinds, command.reader.kind.aliases, {}
    if env is not None:
        settings = {"env": _name_of(env), **settings}
    for given, value in settings.items():
        name = aliases.get(given, given)
        if name not in kinds or name == "print_config":
            having = [] if name in kinds else owners(name)
            hint = f" (it is a setting of {', '.join(having)})" if having else nearest_setting(name, kinds)
            raise UserError(f"{command.reader.prog.rpartition('.')[2]} has no setting {given}{hint}.")
        if isinstance(value, Path):
            value = str(value)
        elif isinstance(value, list | tuple):  # hidden=(256, 256)
            value = ",".join(map(str, value))
        elif isinstance(value, np.generic):
            value = value.item()
        found[name] = coerce(value, kinds[name], given)
    return found


def _torsos(network: str | MakeFeatures | Mapping[str, str | MakeFeatures]) -> dict[str, str]:
    """The settings torso and critic_torso for a network."""
    given = network if isinstance(network, Mapping) else {"actor": network}
    if not {"actor"} <= given.keys() <= {"actor", "critic"}:
        raise UserError(f'network takes "actor" and "critic"; got {", ".join(map(repr, given))}.')
    names = {"actor": "torso", "critic": "critic_torso"}
    found = {}
    for name, torso in given.items():
        if not isinstance(torso, str) and not callable(torso):
            raise UserError(f"network must be a function of Keras inputs; got a {type(torso).__name__}.")
        found[names[name]] = torso if isinstance(torso, str) else callables.give(torso)[0]
    return found


def _name_of(env: str | MakeEnv) -> str:
    try:
        return registry.name_of(env)
    except ValueError as error:
        raise UserError(f"{error}.") from None


def _arguments(values: Mapping[str, Any]) -> list[str]:
    """The flags of the command that does the same; --learners start it."""
    texts = {n: json.dumps(v) if isinstance(v, dict) else str(v) for n, v in values.items()}
    return [f"{flag(name)}={text}" for name, text in texts.items()]


@contextlib.contextmanager
def _our_errors() -> Iterator[None]:
    """Raises SettingsError in place of UserError, and names settings as they are here: num_envs."""
    try:
        yield
    except UserError as error:
        spelled = re.sub(r"--([a-z][a-z-]*[a-z])", lambda found: found[1].replace("-", "_"), str(error))
        raise SettingsError(spelled) from error


# Policies


class Policy:
    """A trained policy, which acts on observations as an env shows them; `load` makes it.

    Attributes:
      config: the settings of its run.
      source: for people: which checkpoint.
    """

    def __init__(self, source: policy_files.PolicySource, greedy: ActingPolicy, drawn: ActingPolicy) -> None:
        self.config, self.source = source.config, source.name
        self._greedy, self._drawn = greedy, drawn
        self._observation, self._action = registry.specs(source.config)

    def __call__(
        self,
        observation: Any,
        state: np.ndarray | None = None,
        *,
        action_mask: Any = None,
        reward: Any = 0.0,
    ) -> Any:
        """The most likely action.

        Args:
          observation: one observation as the env shows it, [*shape], or a batch of them, [B, *shape]: of a
            Dict or Tuple, arrays [B, ...] in it.
          state: of a recurrent policy: `initial_state` at an episode's first step, then the one that the last
            call gave.
          action_mask: `info["action_mask"]`, [A] or [B, A], for a policy that was trained with masks. None:
            everything is allowed.
          reward: of the last action, a number or [B]; policies with --memory-inputs see it.

        Returns:
          What `env.step` takes: an int, or a float32 array [D] within the bounds of the env's Box; of a batch
          an array [B, ...] of them. A recurrent policy gives a pair: that, and the next state.

        Raises SettingsError for an observation, or a state, of another shape.
        """
        return self._act(self._greedy, observation, action_mask, np.random.default_rng(0), state, reward)

    def sample(
        self,
        observation: Any,
        state: np.ndarray | None = None,
        *,
        action_mask: Any = None,
        reward: Any = 0.0,
        seed: int | None = None,
    ) -> Any:
        """An action drawn from the policy's distribution, or one for each of a batch; else as a call.

        The same seed draws the same; None: another one each time.
        """
        generator = np.random.default_rng(seed)
        return self._act(self._drawn, observation, action_mask, generator, state, reward)

    def initial_state(self, batch: int | None = None) -> np.ndarray:
        """The state of a recurrent policy at an episode's first step, float32 [M] or [batch, M]: zeros.

        Raises SettingsError if the policy is not recurrent.
        """
        memory = self._greedy.memory(batch or 1)
        if memory is None:
            raise SettingsError("the policy is not recurrent, so it has no state.")
        return memory.values[0] if batch is None else memory.values

    def _act(
        self,
        player: ActingPolicy,
        observation: Any,
        mask: Any,
        generator: np.random.Generator,
        state: np.ndarray | None,
        reward: Any,
    ) -> Any:
        if self._observation.parts:
            rows, is_batch = self._packed(observation, mask)
        else:
            rows, is_batch = self._rows(np.asarray(observation))
        noise = player.draw_noise(generator, len(rows))
        memory = self._memory(len(rows), is_batch, state, reward)
        arguments = [rows, noise] + ([] if memory is None else [memory.values])
        if len(rows) == 1:  # a GPU computes a batch of one in another way
            arguments = [x.repeat(2, axis=0) for x in arguments]
        chosen = player.act(*arguments)
        actions, states = (chosen, chosen) if memory is None else chosen
        taken: Any = self._action.as_env_takes(actions[: len(rows)])
        taken = taken if is_batch else taken[0] if taken.ndim > 1 else int(taken[0])
        if memory is None:
            return taken
        memory.acted(states[: len(rows)], actions[: len(rows)])
        return taken, memory.values if is_batch else memory.values[0]

    def _memory(self, count: int, is_batch: bool, state: np.ndarray | None, reward: Any) -> Memory | None:
        """The memory of so many envs before their steps."""
        memory = self._greedy.memory(count)
        if memory is None:
            if state is not None:
                self.initial_state()  # raises SettingsError: there is none
            return None
        wanted = self.initial_state(count if is_batch else None).shape
        if state is None or np.shape(state) != wanted:
            raise SettingsError(
                f"the policy is recurrent and takes a state of {list(wanted)}, first that of initial_state; "
                f"got {'none' if state is None else list(np.shape(state))}."
            )
        memory.values[:] = state
        memory.rewarded(np.asarray(reward, np.float32))
        return memory

    def _packed(self, observation: Any, mask: Any) -> tuple[np.ndarray, bool]:
        """Rows [B, n] of observations of several arrays and their masks, and whether a batch was given."""
        spec, size = self._observation, self._action.mask_size
        flags = np.ones(size, np.uint8) if mask is None else observations.flat_mask(mask)
        try:
            shown, is_batch = observations.unbatched(spec, observation)
            masks = np.broadcast_to(flags, (len(shown), size)) if spec.num_actions else [None] * len(shown)
            pack = observations.Packer(spec)
            return np.stack([pack(one, own) for one, own in zip(shown, masks, strict=True)]), is_batch
        except ValueError as error:
            raise SettingsError(f"the policy does not take an observation of {error}.") from None

    def _rows(self, observation: np.ndarray) -> tuple[np.ndarray, bool]:
        """Observations [B, *shape] as the network takes them, and whether a batch was given."""
        spec = self._observation
        shape = spec.env_shape
        is_batch = observation.shape[1:] == shape and observation.ndim == len(shape) + 1
        if not is_batch and observation.shape != shape:
            wanted = f"{list(shape)}, or a batch of them"
            raise SettingsError(f"the policy takes observations of {wanted}; got {list(observation.shape)}.")
        rows = observation if is_batch else observation[None]
        if spec.channels_first:
            rows = np.moveaxis(rows, 1, -1)
        return np.ascontiguousarray(rows, spec.dtype), is_batch


def load(folder: str | Path, checkpoint: str = "last") -> Policy:
    """Loads the policy of a run's folder, or of an export; it needs no env.

    Args:
      folder: a path, or the name of a run in logs/.
      checkpoint: "last", "best" or the number of an update, as text.

    Raises SettingsError: there is no such run, or no such checkpoint.
    """
    with _our_errors():
        source = policy_files.find(of_run.folder(str(folder)), str(checkpoint))
        with quiet_start():
            from tfrl.evaluation import policy

            greedy, drawn = (policy.load(source, greedy=greedy) for greedy in (True, False))
        return Policy(source, greedy, drawn)


def task_of(config: RLSettings, env: str | MakeEnv | None, seed: int | None) -> RLSettings:
    """The settings of a run with another env and seed than its own, where they are given.

    Raises UserError where a policy of the run cannot play that env.
    """
    changes: dict[str, Any] = {} if env is None else {"env": registry.own_name(_name_of(env))}
    if seed is not None:
        changes["seed"] = coerce(seed, int, "seed")
    task = dataclasses.replace(config, **changes)
    playing.check_plays(config, task)
    return task


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Finished episodes.

    Attributes:
      returns: the sum of each one's rewards, float64 [episodes].
      lengths: in env steps, int64 [episodes].
      solved: by the env's `info["is_success"]`, or procgen's levels, bool [episodes].
      interval: of the mean return, 95 %, by the bootstrap over envs; NaN for a single env.
    """

    returns: np.ndarray
    lengths: np.ndarray
    solved: np.ndarray
    interval: tuple[float, float]

    @property
    def mean(self) -> float:
        """The mean return."""
        return float(self.returns.mean())


def evaluate(
    policy: Policy,
    *,
    env: str | MakeEnv | None = None,
    episodes: int = 128,
    seed: int | None = None,
    greedy: bool | None = None,
) -> Evaluation:
    """Plays episodes with a policy, the same number in each of up to 64 envs.

    Args:
      policy: of `load`.
      env: another env than the run's, with the same observations and actions; None: the run's, on all levels
        of a procgen game.
      episodes: how many; the first of them where they do not fill the envs evenly.
      seed: decides episodes and actions; None: the run's, which plays what its own evaluation plays.
      greedy: take the most likely action; None: as the run's own evaluation does.

    Raises:
      SettingsError: there is no such env, or the policy is not for it.
      TrainingError: the env failed.
    """
    with _our_errors():
        task = task_of(policy.config, env, seed)
        greedy = policy.config.eval_greedy if greedy is None else greedy
        num_envs, each = playing.split_episodes(coerce(episodes, int, "episodes"))
        spec = playing.level_spec(task, "test", num_envs)
        player = policy._greedy if greedy else policy._drawn
        played = playing.play(player, spec, range(num_envs), episodes_each=each)
    interval = scores.stratified_bootstrap([played.returns.mean(axis=1)], scores.mean)
    # Of each env the first episode, then of each the second: what is too many are last ones.
    returns, lengths, solved = (
        part.T.reshape(-1)[:episodes] for part in (played.returns, played.lengths, played.solved)
    )
    return Evaluation(returns, lengths.astype(np.int64), solved, interval)
