"""The trials of a sweep: which there are, with which flags, and how each runs in processes of its own."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import json
import math
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfrl.algorithms import registry as settings
from tfrl.cli import endings
from tfrl.cli.errors import TrainingError, UserError
from tfrl.cli.flags import coerce, flag, setting_hint
from tfrl.cli.settings import SETTINGS_FILE, Reader
from tfrl.config.run import DECIDE_MLP, DECIDE_WEIGHTS, RLSettings
from tfrl.envs.callables import is_name
from tfrl.reporting import runs
from tfrl.run import files
from tfrl.run.checkpoint import CheckpointStore, SavedState, State
from tfrl.run.folder import LEFT_FILE, RESULTS_FILE, is_held, read_json
from tfrl.run.metrics import PROGRESS_FILE

SUPERVISED = "resnet"
"""The name of the supervised trainer as an algorithm."""

_KINDS = ("uniform", "loguniform", "choice")
_OURS = ("logdir", "run_name", "resume", "print_config")  # a sweep gives each trial its own
_APART = ("--resume", "never")  # a trial does not continue the run that its flags alone would name
_FIXED = (*_OURS, "start_from", "config", "total_steps")

# In a run's folder:
_OUTPUT = "output.txt"  # the run's stdout and stderr
_TRIAL_RUN = "part.json"  # its `TrialRun`, and the trial's settings in it
_POLL_EVERY, _PATIENCE = 0.5, 300.0  # seconds
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Sampled:
    """A setting that is drawn at random.

    Attributes:
      name: the name of the setting.
      kind: uniform or loguniform between the two values, or a choice of them.
      values: the two ends, or the choices, in the type of the setting.
    """

    name: str
    kind: str
    values: tuple[Any, ...]

    def draw(self, generator: np.random.Generator) -> Any:
        """A value; whole numbers are rounded, others have four digits, so that people can type them."""
        if self.kind == "choice":
            return self.values[int(generator.integers(len(self.values)))]
        low, high = self.values
        if self.kind == "loguniform":
            return self.inside(math.exp(generator.uniform(math.log(low), math.log(high))))
        return self.inside(generator.uniform(low, high))

    def inside(self, value: float) -> Any:
        """The number between the ends that is closest to `value`, in the type of the setting."""
        low, high = self.values
        whole = isinstance(low, int)
        return min(max(round(value) if whole else float(f"{value:.4g}"), low), high)


@dataclass(frozen=True)
class Sweep:
    """The trials of one algorithm.

    Attributes:
      algorithm: as in `python -m tfrl.ALGORITHM`, or a user's `module:Class`.
      flags: the flags of all trials.
      trials: the settings of each trial that vary, by name.
      sampled: the settings that are drawn, which a scheduler may change.
      scheduler: none, asha or pbt.
      metric: the column of progress.csv by which trials are compared; larger is better.
      total_steps: the env steps of a trial; 0 for supervised trials, whose images are not known before.
    """

    algorithm: str
    flags: tuple[str, ...]
    trials: tuple[Mapping[str, Any], ...]
    sampled: tuple[Sampled, ...]
    scheduler: str
    metric: str
    total_steps: int

    def arguments(self, trial: Mapping[str, Any]) -> list[str]:
        """The flags of a trial with these varied settings."""
        return [*self.flags, *(f"{flag(name)}={_typed(value)}" for name, value in trial.items())]

    @property
    def program(self) -> list[str]:
        """The arguments of Python that name the algorithm's command."""
        return ["-m", "tfrl", self.algorithm] if is_name(self.algorithm) else ["-m", f"tfrl.{self.algorithm}"]

    def command(self, trial: Mapping[str, Any]) -> str:
        """The command that trains with the settings of a trial outside the sweep."""
        return shlex.join(["python", *self.program, *self.arguments(trial)])

    def config(self, trial: Mapping[str, Any]) -> RLSettings:
        """All settings of a trial. Raises UserError if they contradict each other."""
        return settings.reader(self.algorithm).parse([*self.arguments(trial), *_APART])

    def is_possible(self, trial: Mapping[str, Any]) -> bool:
        """True if these settings do not contradict each other."""
        try:
            self.config(trial)
        except UserError:
            return False
        return True

    def content(self) -> dict[str, Any]:
        """The sweep as JSON's types, for a file that identifies it."""
        return json.loads(json.dumps(dataclasses.asdict(self)))


def difference(there: Mapping[str, Any] | None, here: Mapping[str, Any]) -> str:
    """The flags that another sweep has and this one lacks, or the reverse, as part of a sentence.

    Both are given as `Sweep.content`. The text is "" if their flags are equal.
    """
    if there is None or there.keys() != here.keys():  # the file is damaged, or of another version
        return ""
    theirs, ours = _in_words(there), _in_words(here)
    has = " ".join(word for word in theirs if word not in ours)
    lacks = " ".join(word for word in ours if word not in theirs)
    if has and lacks:
        return f", with {has} instead of {lacks}"
    if has or lacks:
        return f", with {has}" if has else f", without {lacks}"
    return ", with values of another --seed" if there["trials"] != here["trials"] else ""


def _in_words(content: Mapping[str, Any]) -> list[str]:
    """The flags of a sweep, each with its value, from its content."""
    drawn = {each["name"]: each for each in content["sampled"]}
    points = [{name: _typed(x) for name, x in one.items() if name not in drawn} for one in content["trials"]]
    grid = [f"--grid {name}={_listed(dict.fromkeys(one[name] for one in points))}" for name in points[0]]
    samples = [
        f"--sample {name}={s['kind']}:{_listed(map(_typed, s['values']))}" for name, s in drawn.items()
    ]
    same = points.count(points[0])
    flags: list[str] = []
    for word in content["flags"]:
        if word.startswith("--") or not flags:
            flags.append(word)
        else:
            flags[-1] += f" {word}"
    more = [f"--trials {same}", f"--scheduler {content['scheduler']}", f"--metric {content['metric']}"]
    return [content["algorithm"], *flags, *grid, *samples, *more]


def trial_name(index: int) -> str:
    """The name of a trial and of its run's folder."""
    return f"trial-{index:03d}"


def plan(
    algorithm: str,
    flags: Sequence[str],
    *,
    grids: Sequence[str],
    samples: Sequence[str],
    trials: int,
    seed: int,
    scheduler: str,
    metric: str,
) -> Sweep:
    """The sweep that a command line describes: each point of the grid, `trials` times if values are drawn.

    Raises UserError if the algorithm has no such setting, a value is not allowed, or a trial cannot work.
    """
    reader = settings.reader(algorithm)
    grid, sampled = [_grid(text, reader) for text in grids], [_sampled(text, reader) for text in samples]
    names = [name for name, _ in grid] + [each.name for each in sampled]
    if not names:
        raise UserError("a sweep needs --grid or --sample, for example --grid lr=5e-4,1e-3.")
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{flag(twice[0])} is varied twice; give it once.")
    if not sampled and trials > 1:
        raise UserError(f"--trials {trials} needs --sample: each point of a grid is one trial.")
    if scheduler == "pbt" and not sampled:
        raise UserError("--scheduler pbt needs --sample: it changes the sampled settings.")
    _check_flags(flags, reader)
    generator = np.random.default_rng(seed)
    made = []
    for values in itertools.product(*(values for _, values in grid)):
        fixed = {name: value for (name, _), value in zip(grid, values, strict=True)}
        made += [fixed | {s.name: s.draw(generator) for s in sampled} for _ in range(trials)]
    sweep = Sweep(algorithm, tuple(flags), tuple(made), tuple(sampled), scheduler, metric, 0)
    trials_of = [*made, *_ends(made[0], sampled)]
    configs = [reader.parse([*sweep.arguments(trial), *_APART]) for trial in trials_of]
    if algorithm == SUPERVISED:
        return _supervised(sweep, configs)
    on_the_way = configs[0].eval_every or configs[0].eval_every_steps
    if scheduler != "none" and not on_the_way and metric.startswith("eval"):
        raise UserError(
            f"--scheduler {scheduler} compares trials during their training: give --eval-every after the --."
        )
    lengths = {config.total_steps for config in configs}
    if scheduler != "none" and len(lengths) > 1:
        raise UserError(
            f"--scheduler {scheduler} compares trials of one length, and these have {min(lengths):,} to "
            f"{max(lengths):,} env steps: give --total-steps after the --."
        )
    if scheduler == "pbt":
        if not (on_the_way and metric.startswith("eval")):
            raise UserError(
                "--scheduler pbt copies the weights of an evaluation: give --eval-every after the --, and a "
                f"--metric of evaluations, such as eval_test/return, not {metric}."
            )
        _check_exploits(grids, sampled, configs)
    if scheduler != "none":
        _check_intervals(scheduler, metric, configs)
    return dataclasses.replace(sweep, total_steps=configs[0].total_steps)


def _supervised(sweep: Sweep, configs: Sequence[Any]) -> Sweep:
    """The sweep over the supervised trainer, which tests after each epoch. Raises UserError."""
    if sweep.scheduler == "pbt":
        raise UserError("--scheduler pbt is not for resnet; use asha.")
    epochs = {config.epochs for config in configs}
    if sweep.scheduler != "none" and len(epochs) > 1:
        raise UserError(
            f"--scheduler {sweep.scheduler} compares trials of one length, and these have {min(epochs)} to "
            f"{max(epochs)} epochs: give --epochs after the --."
        )
    return sweep


def _check_flags(flags: Sequence[str], reader: Reader) -> None:
    """Raises UserError for a flag that the sweep itself gives each trial."""
    for word in flags:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        if word.startswith("--") and reader.kind.aliases.get(name, name).removeprefix("no_") in _OURS:
            raise UserError(
                f"a sweep chooses {flag(name)} of its trials: leave it out after the --; --logdir may "
                "stand before the --."
            )


def _check_exploits(grids: Sequence[str], sampled: Sequence[Sampled], configs: Sequence[RLSettings]) -> None:
    """Raises UserError if a trial could not continue from another trial's weights, as PBT requires."""
    if grids:
        raise UserError(
            "--scheduler pbt copies another trial's settings, so a trial would not keep its value of "
            f"--grid {grids[0]}: give --sample instead."
        )
    fixed = [s.name for s in sampled if s.name in (*DECIDE_WEIGHTS, *DECIDE_MLP, "env", "preset")]
    if fixed:
        raise UserError(
            f"--scheduler pbt copies weights between trials, so {flag(fixed[0])}, which changes the "
            "network, cannot be sampled."
        )
    of_order = [s for s in sampled if s.name == "order_coef" and s.kind == "choice"]
    if any(0 in each.values and any(each.values) for each in of_order):
        raise UserError(
            "--scheduler pbt copies weights between trials, and --order-coef 0 makes a smaller network than "
            "other values: leave 0 out, or sample another setting."
        )
    config = configs[0]
    if hasattr(config, "learning_starts"):
        raise UserError(
            f"--scheduler pbt is not for {config.algorithm}: a run that starts with the weights of another "
            "run has an empty replay."
        )
    for name in ("start_from", "torso_weights"):
        if any(getattr(each, name, None) is not None for each in configs):
            raise UserError(f"--scheduler pbt copies weights between trials: leave {flag(name)} out.")


def _check_intervals(scheduler: str, metric: str, configs: Sequence[RLSettings]) -> None:
    """Raises UserError if trials would be compared after different numbers of env steps."""
    updates = {config.steps_per_update for config in configs}
    vary, steps = configs[0].updates_vary, configs[0].counts
    if len(updates) == 1 and not vary:
        return
    least = 1 if vary else max(updates)  # an evaluation comes at the end of an update
    if not metric.startswith("eval"):
        if len(updates) > 1:  # those that vary by chance have equal numbers of episodes
            raise UserError(
                f"--scheduler {scheduler} compares trials after equal {steps}, and {metric} has a number for "
                f"each update of {min(updates)} to {max(updates)} {steps}: give --metric eval_test/return, "
                f"and --eval-every-steps after the --, at least {least}."
            )
    elif any(config.eval_every or config.eval_every_steps < least for config in configs):
        enough = "" if vary else f", at least {least}"
        raise UserError(
            f"--scheduler {scheduler} compares trials after equal {steps}, and their updates differ in "
            f"{steps}: give --eval-every-steps after the --{enough}, and no --eval-every, or 0."
        )


def _ends(trial: Mapping[str, Any], sampled: Sequence[Sampled]) -> list[dict[str, Any]]:
    """The trial with each sampled setting at each of its ends."""
    return [{**trial, each.name: value} for each in sampled for value in each.values]


def _grid(text: str, reader: Reader) -> tuple[str, tuple[Any, ...]]:
    name, values = _named(text, reader, "--grid lr=5e-4,1e-3")
    found = _values(name, values, reader)
    if len(set(map(_typed, found))) < len(found):
        raise UserError(f"--grid {text} has a value twice; where values have commas, put ; between them.")
    return name, found


def _sampled(text: str, reader: Reader) -> Sampled:
    usage = "--sample lr=loguniform:1e-4,1e-2"
    name, rest = _named(text, reader, usage)
    kind, colon, values = rest.partition(":")
    if kind not in _KINDS or not colon:
        raise UserError(f"--sample {text} must be like {usage}; known: {', '.join(_KINDS)}.")
    found = _values(name, values, reader)
    if kind == "choice":
        return Sampled(name, kind, found)
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in found)
    if len(found) != 2 or not numbers or found[0] >= found[1]:
        raise UserError(f"--sample {text}: {kind} is between two numbers, the smaller one first.")
    if kind == "loguniform" and found[0] <= 0:
        raise UserError(f"--sample {text}: loguniform is between numbers above 0.")
    return Sampled(name, kind, found)


def _named(text: str, reader: Reader, usage: str) -> tuple[str, str]:
    word, equals, values = text.partition("=")
    if not equals or not values:
        raise UserError(f"{text!r} must be like {usage}.")
    name = word.strip().lstrip("-").replace("-", "_")
    name = reader.kind.aliases.get(name, name)
    if name in _FIXED:
        raise UserError(f"{flag(name)} cannot be varied.")
    if name not in reader.flag_kinds:
        hint = setting_hint(name, reader.flag_kinds)
        raise UserError(f"{text!r}: {reader.command} has no setting {word}{hint}.")
    return name, values


def _values(name: str, text: str, reader: Reader) -> tuple[Any, ...]:
    words = text.split(";" if ";" in text else ",")
    return tuple(coerce(word.strip(), reader.flag_kinds[name], flag(name)) for word in words)


def _listed(words: Iterable[str]) -> str:
    """Values of a grid or a sample, as a user types them."""
    listed = list(words)
    return (";" if any("," in word for word in listed) else ",").join(listed)


def _typed(value: Any) -> str:
    """A value as a user types it."""
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


# A trial's runs


class TrialRun(NamedTuple):
    """A run of a trial, and its evaluations that were reported to the scheduler.

    Attributes:
      name: the name of its folder.
      start: the folder of its initial weights, relative to the sweep's folder; None: they are random.
      offset: the env steps that those weights were trained for.
      evaluations: the number of reported evaluations, including those of the run that gave the weights.
      seen: the run's env steps at its last reported evaluation; -1 before the first evaluation.
    """

    name: str
    start: str | None = None
    offset: int = 0
    evaluations: int = 0
    seen: int = -1


class TrialState(NamedTuple):
    """The state of a trial, read from its folders.

    Attributes:
      name: the trial's name.
      run: the folder of its newest run.
      state: waiting, running, done, ended early or failed.
      settings: the varied settings of this run.
      env_steps: the env steps that its weights were trained for.
      episode_return: the mean of its last training episodes; NaN before the first one has ended.
      value: the last value of the sweep's metric, or None.
      error: one line that says why it failed, or None.
    """

    name: str
    run: Path
    state: str
    settings: Mapping[str, Any]
    env_steps: int
    episode_return: float
    value: float | None
    error: str | None


class Row(NamedTuple):
    """A row of progress.csv that has the metric."""

    env_steps: int
    value: float


def outcome(sweep: Sweep, logdir: Path, index: int) -> TrialState:
    """The present state of a trial."""
    name = trial_name(index)
    newest, own = current(logdir, name, sweep.trials[index])
    run, error = logdir / newest.name, files.read_text(failure_file(logdir, name))
    env_steps, episode_return, rows = newest.offset, math.nan, []
    try:
        progress = runs.read_progress(run / PROGRESS_FILE)
    except UserError:  # it is damaged
        pass
    else:
        taken = next(iter(progress.values()))
        env_steps += int(taken[-1]) if taken.size else 0
        returns = runs.points(progress, None, "rollout/episode_return")[1]
        episode_return = float(returns[-1]) if returns.size else math.nan
        rows = rows_with(run, sweep.metric)
    if error is not None:
        state = "failed"
    elif is_over(logdir, name):
        state = "done" if (run / RESULTS_FILE).is_file() else "ended early"
    else:
        state = "running" if is_held(run) else "waiting"
    value = rows[-1].value if rows else None
    return TrialState(name, run, state, own, env_steps, episode_return, value, error)


def failure_file(logdir: Path, name: str) -> Path:
    """The file that says why a trial failed. It exists while the trial counts as failed."""
    return logdir / f"{name}.failed"


def is_over(logdir: Path, name: str) -> bool:
    """True if a trial is done, or the scheduler has ended it."""
    run = _newest(logdir, name)
    return (run / RESULTS_FILE).is_file() or (run / LEFT_FILE).exists()


def current(logdir: Path, name: str, planned: Mapping[str, Any]) -> tuple[TrialRun, Mapping[str, Any]]:
    """The newest run of a trial, with nothing reported yet, and its settings; at first the planned ones."""
    found = read_json(_newest(logdir, name) / _TRIAL_RUN)
    return (TrialRun(name), planned) if found is None else (TrialRun(*found["part"]), found["settings"])


def _newest(logdir: Path, name: str) -> Path:
    of_trial = (logdir / name, *logdir.glob(f"{name}-at-*"))
    return max(
        of_trial, key=lambda run: (not (run / LEFT_FILE).exists(), files.last_change([run / _TRIAL_RUN]))
    )


def begin(
    sweep: Sweep, logdir: Path, name: str, own: Mapping[str, Any], reported: Mapping[str, Any] | None
) -> TrialRun:
    """The run with which a trial continues: a new one if the trial got another trial's weights.

    Args:
      sweep, logdir: the sweep and its folder.
      name: the trial's name.
      own: its varied settings.
      reported: the `trial` and its run, `part`, that reported the weights to start from; None: the trial or
        the sweep begins.

    Raises:
      TrainingError: the other trial's run has no checkpoint.
    """
    if reported is None:
        run = current(logdir, name, own)[0]
        rows = rows_with(logdir / run.name, sweep.metric)
        # A resumed sweep compares only the newest evaluation: the earlier ones have been compared.
        if sweep.scheduler != "none" and len(rows) > 1:
            evaluations = run.evaluations + len(rows) - 1
            run = run._replace(seen=rows[-2].env_steps, evaluations=evaluations)
    elif reported["trial"] == name:
        run = TrialRun(*reported["part"])
    else:
        run = _taken_over(logdir, name, TrialRun(*reported["part"]))
    place = logdir / run.name
    if not (place / _TRIAL_RUN).exists():
        files.make_folder(place)
        files.write(place / _TRIAL_RUN, json.dumps({"part": run, "settings": dict(own)}))
    leave(logdir, name, run.name)
    return run


def _taken_over(logdir: Path, name: str, donor: TrialRun) -> TrialRun:
    """The run that begins with a copy of another trial's weights."""
    found = _evaluated(logdir / donor.name, donor.seen)
    offset, number = donor.offset + found.env_steps, len(list(logdir.glob(f"{name}-at-*")))
    run = logdir / f"{name}-at-{offset}-{number}"
    start = run / f"weights-of-{donor.name}"
    files.make_folder(start)  # the other run continues, and prunes its own checkpoints
    files.write(start / SETTINGS_FILE, (logdir / donor.name / SETTINGS_FILE).read_text())
    store = CheckpointStore(start / "checkpoints", keep=1)
    store.save(found.update, State(found.learner, [{}]), env_steps=found.env_steps)
    return TrialRun(run.name, str(start.relative_to(logdir)), offset, donor.evaluations)


def _evaluated(run: Path, env_steps: int) -> SavedState:
    """The checkpoint of an evaluation or, if that is pruned, the next one that exists."""
    store = CheckpointStore(run / "checkpoints", keep=1)
    found: list[SavedState] = []
    for update in store.updates():
        try:
            found += filter(None, [store.load(lambda sentence: None, update)])
        except UserError:  # pruned since, or damaged
            continue
    if not found:
        raise TrainingError(f"{run} has no checkpoint for another trial to start from")
    return next((each for each in found if each.env_steps >= env_steps), found[-1])


def leave(logdir: Path, name: str, current: str | None) -> None:
    """Marks the runs of a trial that the sweep does not continue: all but the current one; None: all."""
    for run in (logdir / name, *logdir.glob(f"{name}-at-*")):
        if run.name == current:
            (run / LEFT_FILE).unlink(missing_ok=True)
        elif run.is_dir():
            (run / LEFT_FILE).touch()


def run_to_end(
    sweep: Sweep,
    logdir: Path,
    own: Mapping[str, Any],
    run: TrialRun,
    *,
    environment: Mapping[str, str],
    folder: str,
    tell: Callable[[TrialRun, Mapping[str, Any]], None],
) -> None:
    """Runs the command of a trial's run to its end, and reports each evaluation.

    The last evaluation is reported when the run has ended, so that a scheduler does not continue a trial that
    has all its steps.

    Args:
      sweep, logdir: the sweep and its folder.
      own: the trial's varied settings.
      run: the trial's run.
      environment, folder: the environment variables and the working folder of its process.
      tell: gets the run and a dict of the evaluation: `value` of the metric, `env_steps` and `evaluations`
        of the weights, `run` and, with the last one, `done` and `finished`.

    Raises TrainingError if the run does not reach its end.
    """
    place = logdir / run.name

    def is_finished() -> bool:
        return (place / RESULTS_FILE).is_file()

    def new_rows() -> list[Row]:
        return [row for row in rows_with(place, sweep.metric) if row.env_steps > run.seen]

    def report(row: Row, evaluations: int, **marks: bool) -> None:
        nonlocal run
        run = run._replace(seen=row.env_steps, evaluations=evaluations)
        env_steps = run.offset + row.env_steps
        metrics = {"value": row.value, "env_steps": env_steps, "evaluations": evaluations, "run": run.name}
        tell(run, {**metrics, **marks})

    if not is_finished():
        end = time.monotonic() + _PATIENCE
        while is_held(place) and time.monotonic() < end:  # PBT has paused it, and it still saves
            time.sleep(_POLL_EVERY)
        flags = [*sweep.arguments(own), "--logdir", str(logdir), "--run-name", run.name]
        if run.start is not None:
            one_update = sweep.config(own).steps_per_update  # a run has one at least
            left = max(one_update, sweep.total_steps - run.offset)
            flags += ["--start-from", str(logdir / run.start), "--total-steps", str(left)]
        place.mkdir(parents=True, exist_ok=True)
        with (place / _OUTPUT).open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, *sweep.program, *flags],
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_stop_with_parent,
            )
        while process.poll() is None:
            time.sleep(_POLL_EVERY)
            # The last evaluation is reported below. Where the length is not known, it may be the newest one.
            rows = new_rows() if sweep.total_steps else new_rows()[:-1]
            for row in rows:
                if not sweep.total_steps or row.env_steps < sweep.total_steps - run.offset:
                    report(row, run.evaluations + 1)
        if process.returncode != 0 or not is_finished():
            raise TrainingError(_reason(process.returncode, files.last_line(place / _OUTPUT)))
    if rows := rows_with(place, sweep.metric):
        report(rows[-1], run.evaluations + len(new_rows()), done=True, finished=True)


def _stop_with_parent() -> None:
    """Called in the run's process before it begins: Linux sends it SIGTERM when the trial's thread ends.

    It lets signals through, which the process of Ray that starts it blocks.
    """
    endings.let_through()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _reason(code: int, words: str) -> str:
    """Words for why a run has not reached its end."""
    if code < 0:
        return f"killed by signal {-code}"
    return (
        "stopped by its stop file; the same command continues" if code == 0 else words or "nothing was said"
    )


def rows_with(run: Path, metric: str) -> list[Row]:
    """The points of a run's metric, as `tfrl.reporting.runs.points` gives them, but none at 0 env steps."""
    progress, results = runs.read_progress(run / PROGRESS_FILE), read_json(run / RESULTS_FILE)
    found = zip(*runs.points(progress, results, metric), strict=True)
    return [Row(int(env_steps), float(value)) for env_steps, value in found if env_steps]
