"""The Python library: the commands as functions, such as `tfrl.train`. They raise exceptions instead of
giving exit codes, restore signal handlers, and import TensorFlow only when they need it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from tfrl.algorithms.policies import SavedPolicy
from tfrl.algorithms.runs import find_policy, run_folder
from tfrl.cli import endings, streams
from tfrl.cli.errors import SettingsError, TrainingError, UserError
from tfrl.cli.flags import check_ranges, coerce, flag, setting_hint, shown
from tfrl.cli.streams import quiet_start
from tfrl.config.run import RLSettings
from tfrl.envs import callables, observations, registry
from tfrl.envs.spec import Discrete
from tfrl.envs.subprocesses import ENV_PROCESS
from tfrl.experience import episodes as playing
from tfrl.networks.weights import PolicySource
from tfrl.reporting import runs, scores
from tfrl.run.callbacks import Callback
from tfrl.run.folder import read_results, weights_sha256
from tfrl.run.metrics import PROGRESS_FILE, logged_steps

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from tfrl.experience.memory import Memory
    from tfrl.run import loop
    from tfrl.training.command import Command

Action = int | np.ndarray
"""An action as `env.step` takes it, or a batch of actions."""
MakeEnv = Callable[..., Any]
"""A function that returns a `gymnasium.Env`, or the class of one."""
MakeFeatures = Callable[[Any], Any]
"""A function from Keras inputs to features, a Keras tensor [B, F]."""
Options = TypeVar("Options", bound="DataclassInstance")


@dataclasses.dataclass(frozen=True)
class Run:
    """The results of a run in a folder; `train` returns it.

    Attributes:
      folder: the run's folder.
    """

    folder: Path

    @property
    def results(self) -> dict[str, Any]:
        """The content of results.json; empty if a stop file ended the run."""
        found = read_results(self.folder) or {}
        steps = found.get("env_steps", found.get("images", 0))
        # Those of an earlier, shorter run may still be there.
        return found if steps >= logged_steps(self.folder / PROGRESS_FILE) else {}

    @property
    def progress(self) -> dict[str, np.ndarray]:
        """The columns of progress.csv by name, float64 [updates]; NaN where a row has no number."""
        return runs.read_progress(self.folder / PROGRESS_FILE)


def train(
    algorithm: str | type,
    *,
    env: str | MakeEnv | None = None,
    network: str | MakeFeatures | Mapping[str, str | MakeFeatures] | None = None,
    callbacks: Callback | str | Sequence[Callback | Any] = (),
    **settings: Any,
) -> Run:
    """Trains a run or resumes it: the same as `python -m tfrl.ALGORITHM`, with bit-equal results.

    Args:
      algorithm: the name of a command, such as "ppo" or "sac", "resnet" for supervised training, or your own
        class that extends an agent of tfrl (docs/extending.md).
      env: an id, `package.module:function`, or a callable that returns a `gymnasium.Env`. None: the default
        of the command.
      network: a function from Keras inputs to features (see `tfrl.networks.entrance.own_torso`),
        `package.module:function`, or a name of the zoo. {"actor": ..., "critic": ...} gives each its own
        network.
      callbacks: one or several objects of tfrl.Callback, and in supervised training of
        keras.callbacks.Callback; the same ones on all workers. `package.module:Class` is created without
        arguments, in each process of the run.
      settings: settings of the command by field name, such as `total_steps=100_000`. `config` is the path of
        a YAML file.

    Returns:
      The run. It is complete unless a stop file ended it.

    Raises:
      SettingsError: a setting or an input is wrong.
      TrainingError: the run failed, because of a NaN or an error of the env, for example.
      KeyboardInterrupt: Ctrl-C was pressed. The run is saved, and the same call resumes it. A second Ctrl-C
        exits without saving.
    """
    with _our_errors():
        command, config, values, made = _read("train", algorithm, env, network, callbacks, settings)
        code = command.train(config, _arguments(values), made)
    _raise_for(code, config.run_dir)
    return Run(config.run_dir)


def _read(
    caller: str,
    algorithm: str | type,
    env: str | MakeEnv | None,
    network: str | MakeFeatures | Mapping[str, str | MakeFeatures] | None,
    callbacks: Any,
    settings: dict[str, Any],
) -> tuple[Command, RLSettings, dict[str, Any], list[Callback]]:
    """The command, its settings, those that were given by name, and the callbacks that are objects."""
    if ENV_PROCESS in os.environ:
        raise UserError(
            "this process only steps envs and has imported your program for that: put the call of "
            f'tfrl.{caller} under `if __name__ == "__main__":`.'
        )
    command = command_of(algorithm.replace("-", "_") if isinstance(algorithm, str) else algorithm)
    if isinstance(callbacks, str) or not isinstance(callbacks, Iterable):
        callbacks = [callbacks]
    named = [each for each in callbacks if isinstance(each, str)]
    settings |= {} if network is None else _torsos(network)
    values = _values(command, env, settings | ({"callbacks": named} if named else {}))
    config = command.reader.of_values(values)
    made = [command.as_callback(each) for each in callbacks if not isinstance(each, str)]
    return command, config, values, made


def command_of(algorithm: str | type) -> Command:
    """The command of an algorithm, or of the supervised trainer. Raises UserError if there is none."""
    from tfrl.training.command import of_algorithm

    if algorithm == "resnet":
        from resnet.train import main

        return main
    return of_algorithm(algorithm)


def _raise_for(code: int, folder: Path) -> None:
    """Raises the exception of an exit code, or the signal again; returns for 0."""
    if code in endings.STOP_CODES.values():
        _raise_signal(code)
    elif code:
        raise TrainingError(f"the run in {folder} failed with exit code {code}.")


def _raise_signal(code: int) -> None:
    if code == endings.STOP_CODES[signal.SIGINT]:
        raise KeyboardInterrupt from None
    # The program's own handler, or the default one, gets the signal, also if another worker got it.
    signal.raise_signal(endings.OURS.first or signal.SIGTERM)


def trainer(
    algorithm: str | type,
    *,
    env: str | MakeEnv | None = None,
    network: str | MakeFeatures | Mapping[str, str | MakeFeatures] | None = None,
    callbacks: Callback | str | Sequence[Callback | Any] = (),
    **settings: Any,
) -> Trainer:
    """A run whose loop is your own: the same bits as `train` with the same arguments.

        with tfrl.trainer("ppo", env="CartPole-v1", total_steps=100_000) as trainer:
            while not trainer.done:
                metrics = trainer.update()

    The arguments are those of `train`. Other processes that learn, such as with `learners`, are not possible.
    The workers of a TF_CONFIG are possible, if all make the same calls.

    Raises SettingsError if a setting is wrong.
    """
    with _our_errors():
        command, config, _, made = _read("trainer", algorithm, env, network, callbacks, settings)
    return Trainer(command, config, made)


class Trainer:
    """A run as a context manager; `trainer` makes it. The context starts the run, or resumes it.

    At the end of the context, a run that is done gets its export and results.json. A run that is not done is
    saved, and the same call resumes it, also if the code of the context has raised an exception or called
    `sys.exit`. An exception of several workers, or a KeyboardInterrupt that ends the block, saves nothing.

    All methods raise what `train` raises. After such an exception the run has ended in this process.
    """

    def __init__(self, command: Command, config: RLSettings, callbacks: Sequence[Callback]) -> None:
        self._command, self._config, self._callbacks = command, config, callbacks
        self._contexts = contextlib.ExitStack()
        self._between = contextlib.ExitStack()  # the context in which the user's code runs
        self._loop: loop.TrainingRun | None = None  # once the context has begun
        self._ended = False  # in this process

    def __enter__(self) -> Trainer:
        """Starts the run, or resumes it."""
        if self._loop is not None:
            raise SettingsError("the run has begun already; make another tfrl.trainer.")
        with self._ending_on_errors():
            self._loop = self._contexts.enter_context(self._command.open(self._config, self._callbacks))
            self._loop.start()
        self._return(self._loop)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Ends the run: with its results if it is done, otherwise saved."""
        run = self._begun
        if self._ended:
            return
        self._between.close()
        with self._ending_on_errors():
            if run.is_done and error is None:
                run.finish()
            elif error is None or (isinstance(error, (Exception, SystemExit)) and run.num_workers == 1):
                run.leave()
        self._close()
        if error is None:
            _raise_for(run.code or 0, self._config.run_dir)

    @property
    def run(self) -> Run:
        """The folder of the run, with its progress and, after the context, its results."""
        return Run(self._config.run_dir)

    @property
    def done(self) -> bool:
        """True if no update follows: the run is complete, or a stop file or a callback ended it."""
        return self._begun.is_done or self._ended

    @property
    def updates(self) -> int:
        """The number of finished updates."""
        return self._begun.updates

    @property
    def env_steps(self) -> int:
        """Env steps of the finished updates, all workers together."""
        return self._begun.env_steps

    def update(self) -> dict[str, float]:
        """Takes one update, with the evaluation, callbacks and checkpoint that are due after it.

        Returns:
          The metrics by name, as in progress.csv.

        Raises:
          SettingsError: the run is done.
        """
        if self.done:
            raise SettingsError("the run is done, so no update follows: look at trainer.done first.")
        return dict(self._call(lambda run: run.update()))

    def evaluate(self) -> dict[str, float]:
        """Evaluates the present weights, as the run's own evaluations do; the run's bits do not change.

        Returns:
          The metrics by name, such as `eval_test/return`.
        """
        return dict(self._call(lambda run: run.evaluate()))

    def save(self) -> Path:
        """Saves a checkpoint now; returns its folder.

        Raises:
          TrainingError: it cannot be written, because the disk is full, for example.
        """
        path = self._call(lambda run: run.save())
        if path is None:
            raise TrainingError(f"the checkpoint could not be saved in {self._config.run_dir}.")
        return path

    @property
    def _begun(self) -> loop.TrainingRun:
        if self._loop is None:
            raise SettingsError("the run has not begun: write `with tfrl.trainer(...) as trainer:`.")
        return self._loop

    def _call(self, method: Callable[[loop.TrainingRun], Any]) -> Any:
        """Calls a method of the run, which may end it; returns its result."""
        run = self._begun
        if self._ended:
            raise SettingsError("the run has ended in this process; the same tfrl.trainer resumes it.")
        self._between.close()
        with self._ending_on_errors():
            result = method(run)
        self._return(run)
        return result

    def _return(self, run: loop.TrainingRun) -> None:
        """Returns to the user's code. Ends the run here if a signal or a stop file has stopped it."""
        if run.code is None:
            self._between.enter_context(run.unhurried())
            return
        self._close()
        _raise_for(run.code, self._config.run_dir)

    @contextlib.contextmanager
    def _ending_on_errors(self) -> Iterator[None]:
        """Ends the run in this process on an exception within the context, and raises it as `train` does."""
        with _our_errors():
            try:
                yield
            except BaseException:
                self._ended = True
                if not self._contexts.__exit__(*sys.exc_info()):
                    raise

    def _close(self) -> None:
        self._ended = True
        with _our_errors():
            self._contexts.close()


def _values(command: Command, env: str | MakeEnv | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings by field name, converted to the types of their fields."""
    kinds, aliases, found = command.reader.flag_kinds, command.reader.kind.aliases, {}
    if env is not None:
        settings = {"env": _name_of(env), **settings}
    for given, value in settings.items():
        name = aliases.get(given, given)
        if name not in kinds or name == "print_config":
            name_of_command = command.reader.command.removeprefix("python -m ").removeprefix("tfrl.")
            hint = setting_hint(name, kinds)
            raise UserError(f"{name_of_command} has no setting {given}{hint}.")
        value = value.item() if isinstance(value, np.generic) else value
        value = callables.give(value) if callable(value) else value
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
        found[names[name]] = torso if isinstance(torso, str) else callables.give(torso)
    return found


def _name_of(env: str | MakeEnv) -> str:
    try:
        return registry.name_of(env)
    except ValueError as error:
        raise UserError(f"{error}.") from None


def _arguments(values: Mapping[str, Any]) -> list[str]:
    """The same settings as command-line flags, which --learners needs to start workers."""
    texts = {n: json.dumps(v) if isinstance(v, dict) else str(v) for n, v in values.items()}
    return [f"{flag(name)}={text}" for name, text in texts.items()]


@contextlib.contextmanager
def _our_errors() -> Iterator[None]:
    """Turns a UserError into a SettingsError that names settings as Python does: num_envs for --num-envs.

    A SystemExit after a signal, before the run's loop, becomes that signal.
    """
    with streams.called_from_python():
        try:
            yield
        except UserError as error:
            # The cause is the trace of a user's env, if it raised.
            raise SettingsError(streams.spelled(str(error))) from error.__cause__
        except SystemExit as end:
            if not isinstance(end.code, int) or end.code not in endings.STOP_CODES.values():
                raise
            _raise_signal(end.code)
            raise TrainingError("a signal stopped the run before its training began.") from None


# Policies


class Policy:
    """A trained policy; `load` makes it. It takes observations in the form in which the env returns them.

    Attributes:
      config: the settings of the policy's run.
      source: a text that names the checkpoint.
    """

    def __init__(self, source: PolicySource, acting: SavedPolicy) -> None:
        self.config, self.source = source.config, source.name
        self._acting, self._weights = acting, source.weights
        self._observation, self._action = registry.specs(source.config)
        inputs = [part for part in self._observation.parts if part.kind != observations.MASK]
        self._takes_tuple = any(part.keys and part.keys[0].isdecimal() for part in inputs)
        self._shows_mask = all(part.keys != (observations.ACTION_MASK,) for part in inputs)

    @overload
    def __call__(
        self, observation: Any, state: None = None, *, action_mask: Any = ..., reward: Any = ...
    ) -> Action: ...

    @overload
    def __call__(
        self, observation: Any, state: np.ndarray, *, action_mask: Any = ..., reward: Any = ...
    ) -> tuple[Action, np.ndarray]: ...

    def __call__(
        self,
        observation: Any,
        state: np.ndarray | None = None,
        *,
        action_mask: Any = None,
        reward: Any = 0.0,
    ) -> Action | tuple[Action, np.ndarray]:
        """The most likely action.

        Args:
          observation: one observation of the env, [*shape], or a batch, [B, *shape], also with B = 0. A batch
            of Dict or Tuple observations is a Dict or Tuple of arrays [B, ...].
          state: only for a recurrent policy: `initial_state()` at the first step of an episode, then the
            state that the last call returned.
          action_mask: `info["action_mask"]` or `env.action_masks()`, [A] or [B, A], for a policy that was
            trained with masks. None: that of the observation, if the env shows it there; otherwise, all
            actions are allowed.
          reward: the reward of the last action, a number or [B], for a policy that was trained with
            --memory-inputs.

        Returns:
          The action for `env.step`: an int for Discrete actions, an array within the bounds of the env's
          Box and of its dtype, or for MultiDiscrete and MultiBinary an array in the env's shape and dtype.
          For a batch, an array [B, ...]. A recurrent policy returns (action, next state).

        Raises:
          SettingsError: the observation or the state has another shape than the policy needs, a number of an
            observation is NaN or infinite, or a mask allows no action.
        """
        return self._act(observation, action_mask, None, state, reward)

    @overload
    def sample(
        self,
        observation: Any,
        state: None = None,
        *,
        action_mask: Any = ...,
        reward: Any = ...,
        seed: int | None = ...,
    ) -> Action: ...

    @overload
    def sample(
        self,
        observation: Any,
        state: np.ndarray,
        *,
        action_mask: Any = ...,
        reward: Any = ...,
        seed: int | None = ...,
    ) -> tuple[Action, np.ndarray]: ...

    def sample(
        self,
        observation: Any,
        state: np.ndarray | None = None,
        *,
        action_mask: Any = None,
        reward: Any = 0.0,
        seed: int | None = None,
    ) -> Action | tuple[Action, np.ndarray]:
        """Draws an action from the policy's distribution; arguments and results are those of a call.

        The same seed draws the same action. None draws a new action each time.

        Raises SettingsError as a call does, and for a seed below 0.
        """
        try:
            generator = np.random.default_rng(seed)
        except (TypeError, ValueError):
            raise SettingsError(f"seed must be a whole number, 0 or more; got {shown(seed)}.") from None
        return self._act(observation, action_mask, generator, state, reward)

    def initial_state(self, batch: int | None = None) -> np.ndarray:
        """The zero state of a recurrent policy for the first step of an episode, float32 [M] or [batch, M].

        Raises SettingsError if the policy is not recurrent.
        """
        memory = self._acting.memory(1 if batch is None else batch)
        if memory is None:
            raise SettingsError("the policy is not recurrent, so it has no state.")
        return memory.values[0] if batch is None else memory.values

    def _act(
        self,
        observation: Any,
        mask: Any,
        generator: np.random.Generator | None,
        state: np.ndarray | None,
        reward: Any,
    ) -> Action | tuple[Action, np.ndarray]:
        """The actions: drawn by the generator, or the most likely ones without a generator."""
        acting = self._acting
        acting.greedy = generator is None
        if mask is not None and not self._observation.num_actions:
            raise SettingsError("the policy was trained without action masks, so it takes no action_mask.")
        if (
            isinstance(observation, tuple)
            and not self._takes_tuple
            and any(isinstance(part, Mapping) for part in observation)
        ):
            raise SettingsError(
                f"the policy takes an observation ({self._observation}); got a tuple with a dict: pass the "
                "observation alone, without info."
            )
        if self._observation.parts:
            rows, is_batch = self._packed(observation, mask)
        else:
            rows, is_batch = self._rows(np.asarray(observation))
        noise = acting.draw_noise(generator or np.random.default_rng(0), len(rows))
        memory = self._memory(len(rows), is_batch, state, reward)
        arguments = [rows, noise] + ([] if memory is None else [memory.values])
        if len(rows) < 2:  # a GPU rounds a batch of one differently; of an empty batch there is no product
            arguments = [np.resize(x, (2, *x.shape[1:])) for x in arguments]
        chosen = acting.act(*arguments)
        actions, states = (chosen, chosen) if memory is None else chosen
        batch = self._action.as_env_takes(actions[: len(rows)])
        one = int if isinstance(self._action, Discrete) else np.asarray
        taken: Action = batch if is_batch else one(batch[0])
        if memory is None:
            return taken
        memory.acted(states[: len(rows)], actions[: len(rows)])
        return taken, memory.values if is_batch else memory.values[0]

    def _memory(self, count: int, is_batch: bool, state: np.ndarray | None, reward: Any) -> Memory | None:
        """The memory of so many envs before their steps."""
        memory = self._acting.memory(count)
        if memory is None:
            if state is not None:
                self.initial_state()  # raises SettingsError: there is none
            return None
        wanted = self.initial_state(count if is_batch else None).shape
        if state is None or np.shape(state) != wanted:
            raise SettingsError(
                f"the policy is recurrent and needs a state of {list(wanted)}, at first initial_state(); "
                f"got {'none' if state is None else list(np.shape(state))}."
            )
        memory.values[:] = state
        try:
            memory.rewarded(np.asarray(reward, np.float32))
        except ValueError:
            raise SettingsError(
                f"reward must be a number, or an array of {count} numbers; got {shown(reward)}."
            ) from None
        return memory

    def _packed(self, observation: Any, mask: Any) -> tuple[np.ndarray, bool]:
        """Rows [B, n] that pack Dict or Tuple observations and their masks, and True if a batch was given."""
        spec, size = self._observation, self._action.mask_size
        if mask is None and self._shows_mask and isinstance(observation, Mapping):
            mask = observation.get(observations.ACTION_MASK)
        try:
            flags = np.ones(size, np.uint8) if mask is None else observations.flat_mask(mask)
        except ValueError as error:
            raise SettingsError(f"the policy does not take an action_mask with {error}.") from None
        if flags.shape[-1:] != (size,):
            raise SettingsError(f"action_mask needs {size} numbers; got {list(flags.shape)}.")
        try:
            count = observations.batch_size(spec, observation)
            rows = [None] if count is None else range(count)
            if mask is not None and (forbidden := self._action.forbidden_by(flags)):
                if count is None:
                    raise SettingsError(f"action_mask forbids {forbidden}; it must allow at least one.")
                # An episode's last observation often forbids all; Gymnasium's vector envs ignore its action.
                ended = [bool(self._action.forbidden_by(row)) for row in flags.reshape(-1, size)]
                flags = flags.copy()
                flags.reshape(-1, size)[ended] = 1
            if flags.shape[:-1] not in ((), (1,), (len(rows),)):
                raise ValueError(f"{len(rows)} row(s) with an action_mask of {list(flags.shape)}")
            masks = np.broadcast_to(flags, (len(rows), size)) if spec.num_actions else [None] * len(rows)
            pack = observations.Packer(spec)
            packed = [pack(observation, own, i) for i, own in zip(rows, masks, strict=True)]
            return np.array(packed, spec.dtype).reshape(-1, *spec.shape), count is not None
        except ValueError as error:
            raise SettingsError(f"the policy does not take an observation of {error}.") from None

    def _rows(self, observation: np.ndarray) -> tuple[np.ndarray, bool]:
        """Observations [B, *shape] in the network's layout, and True if a batch was given."""
        spec = self._observation
        shape = spec.env_shape
        is_batch = observation.shape[1:] == shape and observation.ndim == len(shape) + 1
        if not is_batch and observation.shape != shape:
            wanted = f"{list(shape)}, or a batch of them"
            raise SettingsError(f"the policy takes observations of {wanted}; got {list(observation.shape)}.")
        floats = spec.dtype == "float32" or spec.arrays[0].env_dtype.startswith("float")
        if observation.dtype.kind not in ("biuf" if floats else "biu"):
            wanted = "numbers" if floats else "integers of 0 to 255, uint8"
            raise SettingsError(f"the policy takes {wanted}; got {observation.dtype}.")
        if not floats and ((observation < 0) | (observation > 255)).any():
            raise SettingsError("the policy takes integers of 0 to 255; got others.")
        rows = observation if is_batch else observation[None]
        if spec.layout is not None:
            try:
                rows = spec.layout.stored(rows)
            except ValueError as error:
                raise SettingsError(f"the policy does not take an observation of {error}.") from None
        rows = np.ascontiguousarray(rows, spec.dtype)
        if spec.dtype == "float32" and not np.isfinite(rows).all():
            raise SettingsError("the policy takes finite float32 numbers; got NaN, infinite or larger ones.")
        return rows, is_batch


def load(folder: str | Path, checkpoint: str = "last") -> Policy:
    """Loads the policy of a run or of an export, without making its env.

    Args:
      folder: the path of the run's folder, or the name of a run in logs/.
      checkpoint: "last", "best" or the number of an update as a string.

    Raises:
      SettingsError: the run or the checkpoint does not exist.
    """
    with _our_errors():
        source = find_policy(run_folder(str(folder)), str(checkpoint))
        with quiet_start():
            return Policy(source, SavedPolicy(source))


def _loaded(given: Any) -> Any:
    """The policy of a run or a folder; anything else unchanged."""
    folder = given.folder if isinstance(given, Run) else given
    return load(folder) if isinstance(folder, str | Path) else given


def options_of(command: type[Options], **arguments: Any) -> Options:
    """The options of a command from arguments of a function: converted, and in the ranges of the command.

    Raises SettingsError for an argument of another type, or a number outside its range.
    """
    with _our_errors():
        kinds = typing.get_type_hints(command)
        plain = {n: x.item() if isinstance(x, np.generic) else x for n, x in arguments.items()}
        options = command(**{name: coerce(value, kinds[name], name) for name, value in plain.items()})
        check_ranges(options)
    return options


def task_of(config: RLSettings, env: str | MakeEnv | None, seed: int | None) -> RLSettings:
    """The settings of a run, with another env and seed if these are given.

    Raises UserError if the policy of the run cannot play that env.
    """
    changes = {} if env is None else playing.other_env(config, _name_of(env))
    if seed is not None:
        changes["seed"] = seed
    task = dataclasses.replace(config, **changes)
    playing.check_plays(config, task)
    return task


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Finished episodes.

    Attributes:
      returns: the sum of rewards of each episode, float64 [episodes].
      lengths: env steps of each episode, int64 [episodes].
      solved: True if the episode was solved, by `info["is_success"]` or by procgen's rules, bool [episodes].
      interval: the 95 % confidence interval of the mean return, by bootstrap over envs; NaN for a single env,
        and too narrow for fewer than 10.
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
    policy: Policy | Run | str | Path,
    *,
    env: str | MakeEnv | None = None,
    episodes: int = 128,
    seed: int | None = None,
    greedy: bool | None = None,
) -> Evaluation:
    """Plays episodes with a policy, the same number in each of up to 64 envs.

    Args:
      policy: the result of `load`, or the run or folder whose policy `load` gives.
      env: another env with the same observations and actions. None: the env of the run; for procgen, all
        levels of its game.
      episodes: the number of episodes. If it is not a multiple of the number of envs, the last round counts
        only for the first envs.
      seed: decides the episodes and the actions. None: the seed of the run, which repeats the run's own
        evaluation.
      greedy: True takes the most likely actions, False draws actions. None: as in the run's own evaluation.

    Raises:
      SettingsError: the policy or the env does not exist, the policy cannot play the env, or a number is
        outside its range: episodes 1 to 1,000,000, seed 0 to 2^31 - 1.
      TrainingError: the env failed.
    """
    with _our_errors():
        from tfrl.evaluate import Options as EvaluateOptions

        options = options_of(EvaluateOptions, episodes=episodes, seed=seed, greedy=greedy)
        policy = _loaded(policy)
        if not isinstance(policy, Policy):
            raise UserError(
                "policy must be that of tfrl.load, a run or its folder; got a value of type "
                f"{type(policy).__name__}."
            )
        task = task_of(policy.config, env, options.seed)
        acting = policy._acting
        acting.greedy = policy.config.eval_greedy if options.greedy is None else options.greedy
        episodes = options.episodes
        played = playing.play_level_set(acting, task, "test", episodes)
    # The first episode of each env, then the second one of each env, and so on: surplus episodes are last.
    returns, lengths, solved = (
        part.T.reshape(-1)[:episodes] for part in (played.returns, played.lengths, played.solved)
    )
    of_envs = [returns[env :: len(played.returns)].mean() for env in range(len(played.returns))]
    interval = scores.stratified_bootstrap([np.array(of_envs)], scores.mean)
    return Evaluation(returns, lengths.astype(np.int64), solved, interval)


# Recorded data


def collect(
    policy: Policy | Run | str | Path | Callable[[Any], Any],
    *,
    env: str | MakeEnv | None = None,
    out: str | Path,
    episodes: int | None = None,
    steps: int | None = None,
    seed: int | None = None,
    greedy: bool | None = None,
    epsilon: float | None = None,
    shard_episodes: int = 64,
) -> Path:
    """Records episodes of a policy as an RLDS set, which tensorflow-datasets and `--dataset` read.

    Args:
      policy: as in `evaluate`, "random" for uniform actions, or a function from an observation of the env to
        an action of `env.step`, such as a script or a human with a keyboard. It is called once for each env
        step, one episode after the other. Observations are those of the set: images are uint8 [H, W, C], and
        an action mask makes them a dict.
      env: the env, as in `train`. None: the env of the run of `policy`.
      out: the folder of the set. If it has a part of the same set, that is continued; a function cannot be
        told from another one.
      episodes: the number of episodes. None: 100, or as many as `steps` needs.
      steps: record whole files of `shard_episodes` episodes until there are this many env steps.
      seed: decides the episodes and the actions. None: the seed of the run, or 1.
      greedy: True takes the most likely actions, False draws actions. None: as in the run's own evaluations.
      epsilon: take the most likely actions, but uniform ones in this share of steps.
      shard_episodes: episodes of a file.

    Returns:
      The folder.

    Raises:
      SettingsError: the env does not exist, the policy cannot play it, the folder has another set or cannot
        be written, or a number is outside the range of its flag. Complete files stay.
      TrainingError: the env failed.
    """
    with _our_errors():
        from tfrl.collect import (
            CallablePolicy,
            EpsilonGreedy,
            Spaces,
            UniformPolicy,
            record,
            task_without_run,
        )
        from tfrl.collect import Options as CollectOptions
        from tfrl.experience.recorded import actions_in_words

        options = options_of(
            CollectOptions,
            episodes=episodes,
            steps=steps,
            seed=seed,
            epsilon=epsilon,
            shard_episodes=shard_episodes,
        )
        seed, epsilon, greedy = options.seed, options.epsilon, coerce(greedy, bool | None, "greedy")
        if greedy is not None and epsilon is not None:
            raise UserError("greedy and epsilon exclude each other: give one of them.")
        if policy != "random":
            policy = _loaded(policy)
        if isinstance(policy, Policy):
            task: Any = task_of(policy.config, env, seed)
            acting: Any = policy._acting
            acting.greedy = epsilon is not None or (policy.config.eval_greedy if greedy is None else greedy)
            about = {
                "policy": f"{policy.config.algorithm}, {policy.source}",
                "weights": weights_sha256(policy._weights),
                "actions": actions_in_words(acting.greedy, epsilon),
                "epsilon": epsilon,
            }
            if epsilon is not None:
                uniform = UniformPolicy(*registry.specs(task))
                acting = EpsilonGreedy(acting, uniform, epsilon)
        elif env is None:
            raise UserError("collect needs an env with a policy that is not of a run.")
        elif greedy is not None or epsilon is not None:
            raise UserError("greedy and epsilon need a policy of a run; leave them out.")
        else:
            task = task_without_run(_name_of(env), seed)
            spaces = Spaces(*registry.specs(task))
            if policy == "random":
                acting = UniformPolicy(spaces.observation, spaces.action)
            elif callable(policy):
                acting = CallablePolicy(policy, spaces)
            else:
                raise UserError(
                    'policy must be that of tfrl.load, a run or its folder, "random" or a function; '
                    f"got {policy!r}."
                )
            name = "uniform" if policy == "random" else getattr(policy, "__name__", type(policy).__name__)
            about = {"policy": name, "weights": None, "actions": "its own", "epsilon": None}
            about |= {"actions": "uniform"} if policy == "random" else {}
        record(
            lambda: acting,
            task,
            about,
            Path(out),
            episodes=options.episodes,
            steps=options.steps,
            shard_episodes=options.shard_episodes,
        )
    return Path(out)
