"""python -m cluster.launch: runs a command on several workers, and starts all again where one fails."""

import argparse
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import FrameType

from cluster.arguments import Parser
from cluster.output import Output
from cluster.places import Place, local_places, remote_places
from cluster.team import Team
from tfrl.cli import endings
from tfrl.cli.errors import UserError
from tfrl.workers.tf_config import RESTARTED

DESCRIPTION = """Runs COMMAND on several workers, with TF_CONFIG set for each of them.

  python -m cluster.launch --workers 2 -- python -m tfrl.ppo_procgen --run-name first
  python -m cluster.launch --hosts a,b -- python -m tfrl.ppo_procgen --run-name first

When a worker fails, all are stopped and started again: they go on from the last checkpoint. Ctrl-C and
SIGTERM reach all workers, which save and end; a second Ctrl-C kills them.

Exit codes: 0 done; 1 failed more often than --max-restarts; 2 bad settings; 130 and 143 stopped by Ctrl-C and
by SIGTERM: run the same command again to go on."""

DEFAULT_PORT = 2222
FAILED, BAD_SETTINGS, STALLED, SSH_FAILED = 1, 2, 75, 255
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)  # of C++ code
TICK = 0.1  # seconds
LONGEST_GRACE = 86400.0  # seconds: a day


class StopSignals:
    """Takes note of what tells it to stop: the first one to pass on, and whether Ctrl-C came again."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.kill = False
        for signum in endings.heeded_signals():
            signal.signal(signum, self._take)

    def _take(self, signum: int, _: FrameType | None) -> None:
        self.kill = self.kill or (self.first is not None and signum == signal.SIGINT)
        if self.first is None:
            self.first = signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM


@dataclass(frozen=True)
class Ending:
    """How an attempt ended."""

    culprit: int | None
    """The worker that failed first, if one did."""
    codes: list[int | None]
    told: bool
    """Whether the workers had been told to stop before that."""


class Launcher:
    """Starts the workers until they are done, stopped, or have failed too often."""

    def __init__(
        self,
        find_places: Callable[[], list[Place]],
        command: Sequence[str],
        output: Output,
        *,
        max_restarts: int,
        grace: float,
        terminal: tuple[int, int] | None,
    ) -> None:
        """`find_places` is asked before each start, because ports may be others then."""
        self._find_places = find_places
        self._command = command
        self._output = output
        self._max_restarts = max_restarts
        self._grace = grace
        self._terminal = terminal
        self._signals = StopSignals()

    def run(self) -> int:
        """Runs the workers to the end; returns the exit code."""
        for restart in range(self._max_restarts + 1):
            places = self._find_places()
            if restart:
                again = {RESTARTED: str(restart)}
                places = [replace(place, environment={**place.environment, **again}) for place in places]
            ending = self._attempt(places)
            if ending.culprit is None:
                return max(ending.codes)  # 0, or 130 or 143 if any of them was stopped
            code = ending.codes[ending.culprit]
            reason = describe(ending.culprit, code, places[ending.culprit].host)
            if code == BAD_SETTINGS:
                self._output.tell(f"{reason}; all workers are stopped")
                return BAD_SETTINGS
            if ending.told:
                self._output.tell(f"{reason} while all were being stopped; the last checkpoint counts")
                return FAILED
            if self._signals.first is not None:
                self._output.tell(f"{reason}; not restarted, as told to stop")
                return 128 + self._signals.first
            if restart < self._max_restarts:
                self._output.tell(
                    f"{reason}; restarting all {len(places)} workers from the last checkpoint "
                    f"(restart {restart + 1} of {self._max_restarts})"
                )
        self._output.tell(f"{reason}; no restarts are left (--max-restarts {self._max_restarts})")
        return FAILED

    def _attempt(self, places: list[Place]) -> Ending:
        """Starts all workers and waits until all have ended; a failure or a second Ctrl-C ends them."""
        team = Team(places, self._command, self._output, self._terminal)
        told = False
        try:
            while team.running:
                team.pump(TICK)
                culprit = first_failure(team.codes)
                if culprit is not None:
                    codes = list(team.codes)
                    team.stop(self._grace, told=told)
                    return Ending(culprit, codes, told)
                if self._signals.first is not None and not told:
                    team.signal(b"I" if self._signals.first == signal.SIGINT else b"T")
                    told = True
                if self._signals.kill:
                    team.stop(0.0, told=True)
                    return Ending(None, [128 + signal.SIGINT], told)
        finally:
            team.close()
        return Ending(None, team.codes, told)


def first_failure(codes: Sequence[int | None]) -> int | None:
    """The worker that failed, if any; one that refused its settings before all others."""
    failed = [worker for worker, code in enumerate(codes) if code not in (None, 0, *STOPPED)]
    return min(failed, key=lambda worker: codes[worker] != BAD_SETTINGS, default=None)


def describe(worker: int, code: int, host: str | None) -> str:
    """How a worker ended, for people: "worker 1 died (killed by signal 9)"."""
    name = f"worker {worker}" if host is None else f"worker {worker} on {host}"
    if code == BAD_SETTINGS:
        return f"{name} refused its settings (exit code {code})"
    if code == STALLED:
        return f"{name} gave up on another process (exit code {code})"
    if code == SSH_FAILED and host is not None:
        return f"{name} is out of reach: ssh failed or lost its connection (exit code {code})"
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

    def find_places() -> list[Place]:
        if hosts:
            return remote_places(hosts, flags.port or DEFAULT_PORT)
        return local_places(workers, flags.port)

    live = sys.stdout.isatty()
    size = shutil.get_terminal_size()
    launcher = Launcher(
        find_places,
        command,
        Output(sys.stdout.buffer, sys.stderr.buffer, live=live),
        max_restarts=flags.max_restarts,
        grace=flags.grace,
        terminal=(size.lines, size.columns) if live else None,
    )
    return launcher.run()


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
        "--max-restarts", type=int, default=3, help="how often all start again after a failure (3)"
    )
    parser.add_argument(
        "--grace", type=float, default=5.0, help="seconds from SIGTERM to SIGKILL after a failure (5)"
    )
    return parser


if __name__ == "__main__":
    endings.run(main)
