"""python -m cluster.launch: runs a command on several workers, and starts all again where one fails."""

import argparse
import math
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from cluster.arguments import Parser
from cluster.output import Output
from cluster.places import Place, local_places, remote_places
from cluster.team import LOST, NOTICE, Team
from tfrl.cli import endings, signals
from tfrl.cli.errors import UserError
from tfrl.workers.tf_config import LAUNCH, RESTARTED

DESCRIPTION = """Runs COMMAND on several workers, with TF_CONFIG set for each of them.

  python -m cluster.launch --workers 2 -- python -m tfrl.ppo_procgen --run-name first
  python -m cluster.launch --hosts a,b -- python -m tfrl.ppo_procgen --run-name first

When a worker dies or is out of reach, all are stopped and started again: they go on from the last checkpoint.
One that ends with 1, its own failure, or with 2, bad settings, would only do so again. Ctrl-C and SIGTERM
reach all workers, which save and end; a second Ctrl-C a second later, or a second SIGTERM after three, kills
them.

Exit codes: 0 done; 1 failed, or died more often than --max-restarts; 2 bad settings; 130 and 143 stopped by
Ctrl-C and by SIGTERM: run the same command again to go on."""

DEFAULT_PORT = 2222
FAILED, BAD_SETTINGS, STALLED = 1, 2, 75  # a trainer's, for its own failure, its settings, and another's
STOPPED = frozenset(signals.STOP_CODES.values())
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)  # of C++ code
TICK = 0.1  # seconds
LONGEST_GRACE = 86400.0  # seconds: a day
LONGEST_WAIT = 60.0  # seconds between two attempts


class StopSignals:
    """Takes note of what tells it to stop: the first signal to pass on, and whether another request came."""

    def __init__(self) -> None:
        self._requests = signals.Requests()
        for number in signals.heeded():
            signal.signal(number, self._take)

    def _take(self, number: int, _: FrameType | None) -> None:
        self._requests.take(number)

    @property
    def kill(self) -> bool:
        """True if it was told more than once."""
        return self._requests.again

    @property
    def letter(self) -> bytes:
        """The signal that workers are to get, for `Team.signal`; empty before there is one."""
        return {0: b"", signal.SIGINT: b"I"}.get(self._requests.first, b"T")

    @property
    def code(self) -> int:
        """The exit code of one who was told so; 0 for nobody."""
        return signals.STOP_CODES.get(self._requests.first, 0)


@dataclass(frozen=True)
class Ending:
    """The end of an attempt."""

    culprit: int | None
    """The worker that failed first, if one did."""
    code: int
    """Its exit code; of an attempt without failure, the workers'."""
    told: bool
    """True if the workers had been told to stop before that."""
    saved: bool
    """True if the run made a checkpoint."""
    started: bool = True
    """False if the culprit was not even started."""


FindPlaces = Callable[[Callable[[], bool], Callable[[str], None]], list[Place]]
"""Finds places of workers. It gets a function that says whether to stop, and one that tells a sentence."""


class Launcher:
    """Starts the workers until they are done, stopped, or have failed too often."""

    def __init__(
        self,
        find_places: FindPlaces,
        command: Sequence[str],
        output: Output,
        *,
        max_restarts: int,
        restart_wait: float,
        grace: float,
        terminal: tuple[int, int] | None,
        called: str = "worker",
    ) -> None:
        """`find_places` is asked before each start, because ports may be others then.

        `called` is what a worker is called in sentences.
        """
        self._find_places = find_places
        self._command = command
        self._output = output
        self._max_restarts = max_restarts
        self._restart_wait = restart_wait
        self._grace = grace
        self._terminal = terminal
        self._called = called
        self._signals = StopSignals()
        self._name = uuid.uuid4().hex

    def run(self) -> int:
        """Runs the workers to the end; returns the exit code."""
        restarts = failures = 0  # all of them; those since the last checkpoint
        while not self._signals.code:
            places = self._find_places(lambda: bool(self._signals.code), self._output.tell)
            if self._signals.code:
                break
            about = {LAUNCH: self._name, **({RESTARTED: str(restarts)} if restarts else {})}
            places = [replace(place, environment={**place.environment, **about}) for place in places]
            ending = self._attempt(places)
            if ending.culprit is None:
                return ending.code
            reason = describe(ending, places[ending.culprit].host, self._called)
            code, why = self._final(ending)
            failures = 1 if ending.saved else failures + 1
            if code is None and failures > self._max_restarts:
                code, why = FAILED, f"; no restarts are left (--max-restarts {self._max_restarts})"
            if code is not None:
                self._output.tell(reason + why)
                return code
            restarts += 1
            self._pause(0.0 if ending.saved else self._wait_after(failures), failures, reason, len(places))
        return self._signals.code

    def _final(self, ending: Ending) -> tuple[int | None, str]:
        """The exit code and its reason, where starting again is out of the question; else None."""
        if ending.code == BAD_SETTINGS:
            return BAD_SETTINGS, f"; all {self._called}s are stopped"
        if ending.told:
            return FAILED, " while all were being stopped; the last checkpoint counts"
        if ending.code == FAILED:
            return FAILED, "; not restarted, because it would fail again"
        if self._signals.code:
            return self._signals.code, "; not restarted, as told to stop"
        return None, ""

    def _wait_after(self, failures: int) -> float:
        """Seconds until the next start: four times as long each time, so that a host may come up again."""
        return min(LONGEST_WAIT, self._restart_wait * 4.0 ** (failures - 1))

    def _pause(self, seconds: float, failures: int, reason: str, workers: int) -> None:
        """Says what happens next, and waits for it, or for a signal."""
        when = f" in {seconds:g} s" if seconds else ""
        self._output.tell(
            f"{reason}; restarting all {workers} {self._called}s from the last checkpoint{when} "
            f"(restart {failures} of {self._max_restarts})"
        )
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._signals.code:
            time.sleep(TICK)

    def _attempt(self, places: list[Place]) -> Ending:
        """Starts all workers and waits until all have ended; a failure or a second Ctrl-C ends them."""
        team = Team(places, self._command, self._output, self._terminal)
        told, stopped_at = False, math.inf  # when a worker was the first to end as one that was told to stop
        try:
            while team.running:
                team.pump(TICK)
                if first_failure(team.codes) is not None:
                    team.settle()
                    codes = list(team.codes)  # without those that end because they are told to
                    team.stop(self._grace, told=told)
                    return _failed(codes, team.started, told=told, saved=team.saved)
                if stop_code(team.codes):
                    stopped_at = min(stopped_at, time.monotonic())
                letter = self._signals.letter
                if not letter and time.monotonic() - stopped_at > NOTICE:
                    letter = b"T"  # who has not ended with it may not have met it yet
                if letter and not told:
                    team.send(letter)
                    told = True
                if self._signals.kill:
                    team.stop(0.0, told=True)
                    return Ending(None, self._signals.code, told, team.saved)
        finally:
            team.close()
        return Ending(None, stop_code(team.codes), told, team.saved)


def _failed(codes: Sequence[int | None], started: Container[int], *, told: bool, saved: bool) -> Ending:
    culprit = first_failure(codes)
    code = codes[culprit]
    if code == STALLED and (stopped := stop_code(codes)):
        # Who was stopped has left it alone: after they had saved together, or when there was nothing to save.
        return Ending(None, stopped, told, saved)
    return Ending(culprit, code, told, saved, culprit in started)


def stop_code(codes: Sequence[int | None]) -> int:
    """The code with which workers ended that were stopped, 130 or 143; 0 if none has."""
    return max((code for code in codes if code in STOPPED), default=0)


def first_failure(codes: Sequence[int | None]) -> int | None:
    """The worker that failed, if any: the one whose code says most of the cause."""
    failed = [worker for worker, code in enumerate(codes) if code not in (None, 0, *STOPPED)]
    order = {BAD_SETTINGS: 0, FAILED: 1, STALLED: 3}
    return min(failed, key=lambda worker: order.get(codes[worker], 2), default=None)


def describe(ending: Ending, host: str | None, called: str) -> str:
    """Says how the worker that failed ended, for people: "worker 1 died (killed by signal 9)"."""
    worker, code = ending.culprit, ending.code
    name = f"{called} {worker}" if host is None else f"{called} {worker} on {host}"
    if code == BAD_SETTINGS and not ending.started:
        return f"{name} could not be started (exit code {code})"
    if code == BAD_SETTINGS:
        return f"{name} refused its settings (exit code {code})"
    if code == STALLED:
        return f"{name} gave up on another process (exit code {code})"
    if code == LOST and host is not None:
        return f"{name} is out of reach: it was not started, or the connection was lost (exit code {code})"
    if code - 128 in CRASHES:
        log = f"tensorflow/worker-{worker}.log in the run's folder"
        return f"{name} crashed (killed by signal {code - 128}; the last errors are in {log})"
    if code > 128:
        return f"{name} died (killed by signal {code - 128})"
    return f"{name} failed (exit code {code})"


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit code. UserError: bad flags, no free port, too few GPUs."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    flags, command = parser().parse_args(arguments[:split]), arguments[split + 1 :]
    if not command:
        raise UserError(
            "there is no command to run; write it after --, as in: --workers 2 -- python -m tfrl.ppo_procgen"
        )
    hosts = flags.hosts.split(",") if flags.hosts else []
    workers = len(hosts) or flags.workers
    if not workers:
        raise UserError("give --workers N, 1 or more, or --hosts a,b for a worker on each")
    if workers < 1 or flags.workers not in (None, workers):
        raise UserError(f"--workers {flags.workers} does not fit: 1 or more, and with --hosts one for each")
    if flags.max_restarts < 0 or not 0 <= flags.grace <= LONGEST_GRACE:
        raise UserError(
            f"--max-restarts {flags.max_restarts} --grace {flags.grace:g}; they must be 0 or more, and the "
            f"grace at most {LONGEST_GRACE:g} seconds"
        )
    if not 0 <= flags.restart_wait <= LONGEST_WAIT:
        raise UserError(f"--restart-wait {flags.restart_wait:g}; it must be 0 to {LONGEST_WAIT:g} seconds")

    def find_places(told: Callable[[], bool], tell: Callable[[str], None]) -> list[Place]:
        if hosts:
            return remote_places(hosts, flags.port or DEFAULT_PORT)
        return local_places(workers, flags.port)

    options = {name: getattr(flags, name) for name in ("max_restarts", "restart_wait", "grace")}
    return launch(find_places, command, **options)


def launch(find_places: FindPlaces, command: Sequence[str], **options: Any) -> int:
    """Runs workers whose output goes to this process's; the exit code. Options are those of `Launcher`."""
    live = sys.stdout.isatty()
    size = shutil.get_terminal_size()
    output = Output(sys.stdout.buffer, sys.stderr.buffer, live=live)
    terminal = (size.lines, size.columns) if live else None
    return Launcher(find_places, command, output, terminal=terminal, **options).run()


def parser() -> argparse.ArgumentParser:
    """The flags of this command."""
    parser = Parser("python -m cluster.launch", DESCRIPTION)
    parser.usage = "%(prog)s (--workers N | --hosts A,B) [flags] -- COMMAND"
    parser.add_argument("--workers", type=int, help="how many worker processes on this machine")
    parser.add_argument("--hosts", help="machines to reach by ssh, a worker on each: a,b or me@a,b:2223")
    parser.add_argument(
        "--port", type=int, help="TensorFlow's port: the first local one (any free), or each host's (2222)"
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=3,
        help="how often all start again after a failure, in a row without a new checkpoint (3)",
    )
    parser.add_argument(
        "--restart-wait",
        type=float,
        default=5.0,
        help="seconds before the first restart without a new checkpoint; each further one since the last "
        "checkpoint waits four times as long, up to a minute (5)",
    )
    parser.add_argument(
        "--grace", type=float, default=5.0, help="seconds from SIGTERM to SIGKILL after a failure (5)"
    )
    return parser


if __name__ == "__main__":
    endings.run(main)
