"""python -m tfrl.suite: algorithms x games x seeds, one by one or side by side, and a report at the end.

What is done is skipped and what was cut off goes on, so the same command finishes an interrupted suite.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

from tfrl import config as settings
from tfrl import report
from tfrl.algorithms import ppo
from tfrl.cli import command_line, endings, signals
from tfrl.cli.errors import PeerError, TrainingError, UserError
from tfrl.cli.flags import coerce, flag, shown
from tfrl.cli.settings import Range
from tfrl.cli.streams import tell
from tfrl.config.run import RLSettings
from tfrl.envs.registry import games
from tfrl.reporting import runs
from tfrl.run import files
from tfrl.run.folder import RESULTS_FILE, SETTINGS_FILE, as_it_began, check_run_folder
from tfrl.workers import machine

# Bad settings are bad for the next run as well, a worker that is gone is missing there, too, and who told a
# run to stop means the suite.
_ENDING = (UserError.exit_code, PeerError.exit_code, 130, 143)
_TRAINER = ("-m", "tfrl.ppo_procgen")  # of PPO; the others are named like their algorithms
_OUTPUT = "output.txt"  # in a run's folder: what it would have shown, where several share a terminal
_POLL_EVERY = 0.2  # seconds
_RUNS_PER_CORE = 2  # side by side; more would fill the memory before they are any faster
_USAGE = "python -m tfrl.suite"
_SUMMARY = """Trains every game with every seed by every algorithm, skips complete runs, and writes
LOGDIR/report.html. All other flags are those of the algorithms' commands, and the same for every run; they
may stand after --."""


@dataclass(frozen=True)
class Options:
    """The suite."""

    algorithms: str = "ppo"
    """Algorithms with commas between: ppo,ppg,drac."""
    envs: str = "all"
    """Games with commas between, or all of procgen's 16."""
    seeds: str = "1,2,3"
    """Seeds with commas between."""
    workers: int = 1
    """Runs side by side, which share the machine's cores; what each shows goes to its output.txt."""


@dataclass(frozen=True)
class _Task:
    config: RLSettings
    arguments: list[str]

    @property
    def trainer(self) -> tuple[str, ...]:
        """The command that trains it, for Python."""
        algorithm = self.config.algorithm
        return _TRAINER if algorithm == "ppo" else ("-m", f"tfrl.{algorithm}")


def main(arguments: Sequence[str]) -> int:
    """Runs the suite; the exit code: 130 or 143 where a run was told to stop."""
    options, rest = _split(arguments)
    tasks = plan(options, rest)
    lengths = sum(task.config.run_steps for task in tasks)
    _show(f"{len(tasks)} run(s), {lengths:,} env steps in all; Ctrl-C saves, the same command continues")
    suite = _Runs(tasks, options.workers)
    code = suite.run()
    done = [task.config.run_dir for task in tasks if is_done(task.config)]
    if code:
        left = [task.config.run_dir.name for task in tasks if task.config.run_dir not in done]
        if left and code not in signals.STOP_CODES.values():
            tell(
                f"error: the other runs would fail in the same way: {len(left)} runs are not done: "
                f"{', '.join(left)}."
            )
        return code
    if done:
        _show(str(report.write([runs.load(folder) for folder in done], done[0].parent)))
    undone = [
        f"{len(names)} of {len(tasks)} runs {what}: {', '.join(names)}"
        for what, names in (("failed", suite.failed), ("were stopped", suite.stopped))
        if names
    ]
    if undone:
        raise TrainingError(f"{'; '.join(undone)}.")
    return 0


class _Runs:
    """Starts the runs that are not done, `workers` at a time.

    Each is in a session of its own, so that a Ctrl-C reaches it through us alone: once, and we wait until it
    has saved.

    Attributes:
      failed, stopped: names of runs that failed, or that their stop files ended.
    """

    def __init__(self, tasks: Sequence[_Task], workers: int) -> None:
        self._tasks = tasks
        self._workers = min(workers, len(tasks))
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._output_from: dict[int, int] = {}  # where what a run says now begins in its file
        self._code = 0  # of a run that ends the suite
        self._requests = signals.Requests()
        self.failed: list[str] = []
        self.stopped: list[str] = []

    def run(self) -> int:
        """Trains until nothing is left to do; the code to end with, 0 for none."""
        waiting = []
        for index, task in enumerate(self._tasks):
            if is_done(task.config):
                self._say(index, "done before")
            else:
                waiting.append(index)
        with self._listening():
            while self._running or (waiting and not self._is_ending):
                if waiting and len(self._running) < self._workers and not self._is_ending:
                    self._start(waiting.pop(0))
                else:
                    time.sleep(_POLL_EVERY)
                    self._reap()
        return self._code or signals.STOP_CODES.get(self._requests.first, 0)

    @property
    def _is_ending(self) -> bool:
        """Whether no further run is to be started."""
        return bool(self._code or self._requests.first)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Heeds signals inside, and leaves no run behind, out of everybody's reach, where it fails itself."""
        before = {which: signal.signal(which, self._take) for which in signals.heeded()}
        try:
            yield
        finally:
            self._tell(signal.SIGTERM)
            for process in self._running.values():
                process.wait()
            for which, handler in before.items():
                signal.signal(which, handler)

    def _start(self, index: int) -> None:
        task = self._tasks[index]
        self._say(index, "starts")
        command = [sys.executable, *task.trainer, *task.arguments]
        with contextlib.ExitStack() as opened:
            output, environment = None, dict(os.environ)
            if self._workers > 1:
                share = max(1, machine.cores() // self._workers)
                for threads in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
                    environment.setdefault(threads, str(share))
                if not task.config.env_threads:
                    command += ["--env-threads", str(max(1, share // 2))]
                task.config.run_dir.mkdir(parents=True, exist_ok=True)
                output = opened.enter_context((task.config.run_dir / _OUTPUT).open("ab"))
                self._output_from[index] = output.tell()
            self._running[index] = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        if self._requests.first:  # it came in between; told twice, the run hears an echo
            self._tell(self._requests.first, only=index)

    def _reap(self) -> None:
        for index, process in list(self._running.items()):
            code = process.poll()
            if code is None:
                continue
            del self._running[index]
            config = self._tasks[index].config
            code = signals.STOP_CODES.get(-code, code)  # in its first moments the signal itself ends a run
            said = "done"
            if code in signals.STOP_CODES.values() or (code == 0 and not is_done(config)):
                self.stopped.append(config.run_dir.name)
                said = "stopped; the same command continues it"
            elif code:
                self.failed.append(config.run_dir.name)
                said = f"ended with code {code}"
            if code and self._workers > 1:
                last = files.last_line(config.run_dir / _OUTPUT, self._output_from[index])
                was_stopped = code in signals.STOP_CODES.values()
                said = (last or said) if was_stopped else f"{said}: {last or 'no output'}"
            self._say(index, said)
            if code in _ENDING:
                if not self._is_ending:  # a second signal would end the others at once
                    self._tell(signal.SIGTERM)
                self._code = self._code or code

    def _take(self, which: int, _: FrameType | None) -> None:
        """Passes a signal on at once: a run that gets it from elsewhere, too, must see that both are one."""
        if self._requests.take(which):
            self._tell(which)

    def _tell(self, which: int, only: int | None = None) -> None:
        for index, process in self._running.items():
            if only in (None, index):
                process.send_signal(signal.SIGTERM if which == signal.SIGHUP else which)

    def _say(self, index: int, words: str) -> None:
        _show(f"[{index + 1}/{len(self._tasks)}] {self._tasks[index].config.run_dir}: {words}")


def _show(line: str) -> None:
    """On stdout. The runs go on when its reader goes away."""
    tell(line, sys.stdout)


def _split(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """The suite's own flags, and those of its runs: all others, and whatever stands after a --."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    rest = list(arguments[:end])
    own = command_line.take(rest, [flag(field.name) for field in dataclasses.fields(Options)])
    own += [token for token in rest if token in ("-h", "--help")]
    _, options = command_line.parse(Options, own, _USAGE, _SUMMARY)
    if not (allowed := Range(1, _RUNS_PER_CORE * machine.cores())).holds(options.workers):
        raise UserError(f"--workers must be {allowed}; got {shown(options.workers)}.")
    return options, [*rest, *arguments[end + 1 :]]


def plan(options: Options, rest: Sequence[str]) -> list[_Task]:
    """The runs, each with the trainer's flags `rest`, checked before the first one starts.

    Raises:
      UserError: a setting cannot be meant, or would give two runs one folder.
    """
    for own in ("--env", "--seed", "--run-name"):
        if any(token.partition("=")[0] == own for token in rest):
            raise UserError(f"a suite names its runs itself: give --envs and --seeds instead of {own}.")
    names = games() if options.envs == "all" else options.envs.split(",")
    seeds = [coerce(seed.strip(), int, "--seeds") for seed in options.seeds.split(",")]
    algorithms = [name.strip() for name in options.algorithms.split(",")]
    tasks = []
    for algorithm in algorithms:
        reader = ppo.PROCGEN_READER if algorithm == "ppo" else settings.reader(algorithm)
        for env in names:
            for seed in seeds:
                arguments = [*rest, "--env", env.strip(), "--seed", str(seed)]
                try:
                    tasks.append(_Task(settings.parse(reader, arguments), arguments))
                except UserError as error:
                    raise UserError(f"{algorithm}: {error}" if len(algorithms) > 1 else str(error)) from None
    for config in (task.config for task in tasks):  # nothing should fail in the night that can be seen now
        check_folder(config)
        is_done(config)
    folders = [task.config.run_dir for task in tasks]
    twice = next((folder for folder in folders if folders.count(folder) > 1), None)
    if twice:
        raise UserError(
            f"two runs of the suite would share the folder {twice}; give each algorithm, game and seed once."
        )
    return tasks


def check_folder(config: RLSettings) -> None:
    """Raises UserError where the run's folder cannot be written, or holds a run of other settings.

    A run that is done would otherwise pass for one of these.
    """
    check_run_folder(config)
    file = config.run_dir / SETTINGS_FILE
    if file.is_file():
        as_it_began(config, settings.reader(config.algorithm).from_yaml(file), instead="--logdir")


def is_done(config: RLSettings) -> bool:
    """True if the run of these settings has come to its end, and left results."""
    if not (config.run_dir / RESULTS_FILE).is_file():
        return False
    return runs.load(config.run_dir).is_done_for(config)


if __name__ == "__main__":
    endings.run(main)
