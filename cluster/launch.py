"""python -m cluster.launch: run a command on several workers, and restart all of them after a failure."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import os
import random
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple, TextIO

from cluster.agent import SAVED, STARTED, STOPS
from tfrl.cli import endings, flags
from tfrl.cli.errors import UserError
from tfrl.cli.flags import NATURAL, Range
from tfrl.cli.streams import surviving, tell
from tfrl.workers import machine, tf_config
from tfrl.workers.tf_config import LAUNCH, RESTARTED

USAGE = "python -m cluster.launch (--workers N | --hosts A,B) [flags] -- COMMAND"
DESCRIPTION = """Runs COMMAND on several workers, with TF_CONFIG set for each of them. The -- is optional.

  python -m cluster.launch --workers 2 -- python -m tfrl.ppo_procgen --run-name first
  python -m cluster.launch --hosts a,b -- python -m tfrl.ppo_procgen --run-name first

When a worker dies or is out of reach, all workers are stopped and started again. They resume from the last
checkpoint. A worker that exits with 1 (its own failure) or 2 (bad settings) is not restarted. Ctrl-C and
SIGTERM reach all workers, which save and exit. A second Ctrl-C after one second, or a second SIGTERM after
three, kills them.

Exit codes: 0 done; 1 failed, or died more often than --max-restarts; 2 bad settings; 130 stopped by Ctrl-C;
143 stopped by SIGTERM. To resume a stopped run, run the same command again."""

FAILED, BAD_SETTINGS, STALLED = 1, 2, 75  # a trainer's exit codes: its own failure, bad settings, a lost peer
LOST = 255  # the exit code of an ssh, or another connection to a worker, that failed
STOPPED = frozenset(endings.STOP_CODES.values())
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)  # of C++ code
DEFAULT_PORT = 2222
LONGEST_WAIT = 60.0  # seconds between two attempts
TICK = 0.1  # seconds
NOTICE = 1.0  # seconds for a worker that has lost a peer to say so and exit by itself
# Seconds for a worker to save if its launcher is gone, the same as in the recipes for SLURM and Kubernetes.
# The worker finishes its update first, which may take minutes on a CPU.
ORPHAN_GRACE = 300.0
AGENT = str(Path(__file__).with_name("agent.py"))
# Batch mode, because nobody can answer a question here. The other options find a dead connection in a minute.
SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
# The environment variables that a remote worker gets: they decide how training runs, and find programs.
PASSED = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "TERM")
PASSED_PREFIXES = (
    *("CUDA_", "GRPC_", "KERAS_", "NCCL_", "OMP_", "PYTHON", "RAY_AUTH_"),
    *("TF_", "TFDS_", "TFRL_", "XLA_"),
)
# Below the ports of outgoing connections, and above Ray's. Only another launcher could take one before the
# worker opens it.
LOCAL_PORTS = range(20000, 32000)
GPUS_WITHIN = 30.0  # seconds; a driver that hangs never answers


@dataclass(frozen=True)
class Options:
    """The flags."""

    workers: Annotated[int | None, Range(1, 4096)] = None
    """Worker processes on this machine."""
    hosts: str | None = None
    """Machines to reach by ssh, with a worker on each: a,b or me@a,b:2223."""
    port: Annotated[int | None, Range(1, 65535)] = None
    """TensorFlow's port: of the first local worker (any free ports), or on each host (2222)."""
    max_restarts: Annotated[int, NATURAL] = 3
    """Restarts after failures without a new checkpoint, before the launcher gives up."""
    restart_wait: Annotated[float, Range(0, LONGEST_WAIT)] = 5.0
    """Seconds before the first restart if there is no checkpoint. Each further restart without a new
    checkpoint waits four times as long, up to a minute."""
    grace: Annotated[float, Range(0, 86400)] = 5.0
    """Seconds from SIGTERM to SIGKILL of the other workers after a failure."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit code. UserError: bad flags, no free port, too few GPUs."""
    split = flags.leading(arguments)
    _, options = flags.parse(Options, arguments[:split], USAGE, DESCRIPTION)
    command = arguments[split + (arguments[split : split + 1] == ["--"]) :]
    if not command:
        raise UserError(f"there is no command to run; write it after --; usage: {USAGE}")
    hosts = options.hosts.split(",") if options.hosts else []
    if not hosts and shutil.which(command[0]) is None:
        reason = errno.EACCES if Path(command[0]).exists() else errno.ENOENT
        raise UserError(f"cannot start {command[0]!r}: {os.strerror(reason)}")
    workers = options.workers or len(hosts)
    if not workers:
        raise UserError(
            "give --workers N (1 or more), or --hosts a,b for one worker on each host, before the command"
        )
    if hosts and workers != len(hosts):
        raise UserError(f"--workers {workers} does not fit --hosts, which starts one worker on each host")

    def find_places(told: Callable[[], bool], tell: Callable[[str], None]) -> list[Place]:
        if hosts:
            return remote_places(hosts, options.port or DEFAULT_PORT)
        return local_places(workers, options.port)

    return launch(
        find_places,
        command,
        max_restarts=options.max_restarts,
        restart_wait=options.restart_wait,
        grace=options.grace,
    )


# Places of workers


@dataclass(frozen=True)
class Place:
    """One worker's place: its host (None: this machine) and its own environment variables."""

    host: str | None
    environment: Mapping[str, str]
    start: Callable[[], Any] | None = None
    """Starts its agent there and returns an object like `subprocess.Popen`; None: by ssh, or here."""


def remote_places(hosts: Sequence[str], port: int) -> list[Place]:
    """One place on each host ("name", "user@name", "name:port"), whose worker has the whole machine."""
    targets, addresses = [], []
    for host in hosts:
        user, at, name = host.rpartition("@")
        has_port = "]:" in name if name.startswith("[") else name.count(":") == 1
        addresses.append(name if has_port else f"{name}:{port}")
        targets.append(user + at + tf_config.split_address(addresses[-1])[0])
    return [
        Place(target, {"TF_CONFIG": config})
        for target, config in zip(targets, tf_configs(addresses), strict=True)
    ]


def local_places(
    workers: int, first_port: int | None, environ: Mapping[str, str] = os.environ
) -> list[Place]:
    """Places on this machine, each with an equal share of it. Raises the errors of `shares`."""
    mine = shares(workers, first_port, environ)
    configs = tf_configs([f"127.0.0.1:{port}" for port, _ in mine])
    return [Place(None, {**own, "TF_CONFIG": c}) for (_, own), c in zip(mine, configs, strict=True)]


def shares(
    workers: int, first_port: int | None = None, environ: Mapping[str, str] = os.environ
) -> list[tuple[int, dict[str, str]]]:
    """Equal parts of this machine: free ports, or those from `first_port` on, and environment variables.

    Numbers of threads in `environ` win. Raises UserError for more workers than GPUs or free ports, and if the
    GPUs' driver hangs.
    """
    ports = free_ports(workers) if first_port is None else range(first_port, first_port + workers)
    gpus: Sequence[str | None] = gpu_shares(visible_gpus(environ), workers) or [None] * workers
    mine = []
    for port, cores, visible in zip(ports, thread_shares(machine.cores(), workers), gpus, strict=True):
        threads = {
            "TF_NUM_INTRAOP_THREADS": cores,
            # Two at least: an operation that waits for a peer must not hold the only thread.
            "TF_NUM_INTEROP_THREADS": max(2, cores),
            "OMP_NUM_THREADS": cores,
        }
        own = {name: environ.get(name) or str(count) for name, count in threads.items()}
        mine.append((port, own if visible is None else {**own, "CUDA_VISIBLE_DEVICES": visible}))
    return mine


def environment_for(device: str) -> Mapping[str, str]:
    """This process's environment variables, without GPUs for --device cpu."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"} if device == "cpu" else os.environ


def tf_configs(addresses: Sequence[str]) -> list[str]:
    """TF_CONFIG of each worker."""
    tasks = [{"type": "worker", "index": index} for index in range(len(addresses))]
    texts = [json.dumps({"cluster": {"worker": addresses}, "task": task}) for task in tasks]
    return [tf_config.parse(text).to_json() for text in texts]


def free_ports(count: int) -> list[int]:
    """Random free ports of this machine. Raises UserError if there are too few."""
    found = []
    for port in random.sample(LOCAL_PORTS, len(LOCAL_PORTS)):
        try:
            tf_config.listen(port).close()
        except OSError:
            continue
        found.append(port)
        if len(found) == count:
            return found
    raise UserError(
        f"{count} workers need {count} free ports between {LOCAL_PORTS[0]} and {LOCAL_PORTS[-1]}; end a "
        "program that uses some of them"
    )


def thread_shares(cores: int, workers: int) -> list[int]:
    """The number of cores of each worker, at least one. If shares differ, the first workers have one more."""
    return [max(1, (cores + workers - 1 - index) // workers) for index in range(workers)]


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs of this process, as in CUDA_VISIBLE_DEVICES. Raises UserError if the driver hangs."""
    if shutil.which("nvidia-smi", path=environ.get("PATH")) is None:
        return []
    ask = functools.partial(subprocess.run, capture_output=True, text=True, env=dict(environ))
    try:
        listed = ask(["nvidia-smi", "-L"], timeout=GPUS_WITHIN).stdout.splitlines()
    except subprocess.TimeoutExpired:
        raise UserError(
            f"`nvidia-smi -L` has not answered for {GPUS_WITHIN:g} s: a GPU or its driver hangs; "
            "restart this machine, or train on another"
        ) from None
    count = sum(line.startswith("GPU ") for line in listed)
    if count and "CUDA_VISIBLE_DEVICES" in environ:
        return [gpu for gpu in environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu not in ("", "-1")]
    return [str(index) for index in range(count)]


def gpu_shares(gpus: Sequence[str], workers: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each worker, of equally many GPUs; empty without GPUs.

    Raises UserError for too few GPUs. Says which ones are not used.
    """
    if gpus and workers > len(gpus):
        raise UserError(
            f"{workers} workers are more than the GPUs here ({','.join(gpus)}), and two cannot share one; "
            f"start {len(gpus)}, or set CUDA_VISIBLE_DEVICES=-1 to train on the CPU"
        )
    each = len(gpus) // workers
    if unused := gpus[each * workers :]:
        tell(f"launch: {workers} workers get {each} GPU(s) each; not used: {','.join(unused)}")
    return [",".join(gpus[i * each : (i + 1) * each]) for i in range(workers)] if gpus else []


# Their run


FindPlaces = Callable[[Callable[[], bool], Callable[[str], None]], list[Place]]
"""Finds places of workers. It gets a function that says whether to stop, and one that tells a sentence."""


def launch(
    find_places: FindPlaces,
    command: Sequence[str],
    *,
    max_restarts: int,
    restart_wait: float = 5.0,
    grace: float = 5.0,
    called: str = "worker",
) -> int:
    """Starts workers until they are done, stopped, or have failed too often; returns the exit code.

    Args:
      find_places: called before each start, because other ports may be free then.
      command: the command of each worker.
      max_restarts: the number of restarts in a row without a new checkpoint.
      restart_wait: seconds before the first of them.
      grace: seconds from SIGTERM to SIGKILL after a failure.
      called: the word for a worker in sentences.
    """
    output = Output(sys.stdout, sys.stderr)
    with signals_taken() as stop:
        restarts = failures = 0  # all restarts; failures since the last checkpoint
        launch_id = secrets.token_hex(8)
        while not stop.first:
            places = find_places(lambda: bool(stop.first), output.tell)
            if stop.first:
                break
            about = {LAUNCH: launch_id} | ({RESTARTED: str(restarts)} if restarts else {})
            places = [replace(place, environment={**place.environment, **about}) for place in places]
            output.forget_errors()
            team = Team(places, command, output)
            try:
                culprit, code, told = attend(team, stop, grace)
            finally:
                team.close()
            if culprit is None:
                return code

            failures = 1 if team.saved else failures + 1
            end, why = None, ""
            if code == BAD_SETTINGS:
                end, why = BAD_SETTINGS, f"; all {called}s are stopped"
            elif told:
                end, why = FAILED, " while all were being stopped; a resume begins from the last checkpoint"
            elif code == FAILED:
                end, why = FAILED, "; not restarted, because it would fail again"
            elif stop.first:
                end, why = endings.STOP_CODES[stop.first], "; not restarted, because a stop was requested"
            elif failures > max_restarts:
                end, why = FAILED, f"; no restarts are left (--max-restarts {max_restarts})"
            reason = describe(called, culprit, code, places[culprit].host, started=culprit in team.started)
            if end is not None:
                output.tell(reason + why)
                return end

            restarts += 1
            # Each wait is four times as long, so that a host may come up again.
            seconds = 0.0 if team.saved else min(LONGEST_WAIT, restart_wait * 4.0 ** (failures - 1))
            output.tell(
                f"{reason}; restarting all {len(places)} {called}s from the last checkpoint"
                f"{f' in {seconds:g} s' if seconds else ''} (restart {failures} of {max_restarts})"
            )
            until = time.monotonic() + seconds
            while time.monotonic() < until and not stop.first:
                time.sleep(TICK)
        return endings.STOP_CODES[stop.first]


@contextlib.contextmanager
def signals_taken() -> Iterator[endings.Requests]:
    """Takes signals to stop within the context. Outside the main thread Python allows no handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield endings.Requests()
        return
    stop = endings.OURS
    stop.begin()
    stop.heard = True  # the workers answer
    handlers = {s: signal.signal(s, lambda number, _: stop.take(number)) for s in endings.heeded()}
    try:
        yield stop
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class Ending(NamedTuple):
    """The end of an attempt."""

    culprit: int | None  # the worker that failed first, if one did
    code: int  # its exit code; without a failure, the run's
    told: bool  # whether the workers had been told to stop before that


def attend(team: Team, stop: endings.Requests, grace: float) -> Ending:
    """Waits until all workers have ended; a failure or a second request to stop ends them."""
    told, stopped_at = False, math.inf  # when a worker was the first to end as one that was told to stop
    while team.running:
        team.note_ends()
        if first_failure(team.codes) is not None:
            team.settle()
            codes = list(team.codes)  # before the others end because they are told to
            team.stop(grace, told=told)
            culprit = first_failure(codes)
            code = None if culprit is None else codes[culprit]
            if code is None or (code == STALLED and stop_code(codes)):
                # It lost a peer that was stopped: both have saved, or have nothing to save.
                return Ending(None, stop_code(codes), told)
            return Ending(culprit, code, told)
        if stop_code(team.codes):
            stopped_at = min(stopped_at, time.monotonic())
        # A worker that does not end with a stopped peer may not have connected to it yet.
        if not told and (stop.first or time.monotonic() - stopped_at > NOTICE):
            team.send(b"I" if stop.first == signal.SIGINT else b"T")
            told = True
        if stop.again:
            team.stop(0.0, told=True)
            return Ending(None, endings.STOP_CODES[stop.first], told)
    return Ending(None, stop_code(team.codes), told)


def stop_code(codes: Sequence[int | None]) -> int:
    """The exit code of workers that were stopped, 130 or 143; 0 if there is none."""
    return max((code for code in codes if code in STOPPED), default=0)


def first_failure(codes: Sequence[int | None]) -> int | None:
    """The worker that failed, if any: the one whose exit code says most about the cause."""
    failed = {worker: code for worker, code in enumerate(codes) if code and code not in STOPPED}
    order = {BAD_SETTINGS: 0, FAILED: 1, STALLED: 3}
    return min(failed, key=lambda worker: order.get(failed[worker], 2), default=None)


def describe(called: str, worker: int, code: int, host: str | None, *, started: bool) -> str:
    """Words for a worker's failure, such as "worker 1 died (killed by signal 9)"."""
    name = f"{called} {worker}" if host is None else f"{called} {worker} on {host}"
    if code == BAD_SETTINGS:
        did = "refused its settings" if started else "could not be started"
        return f"{name} {did} (exit code {code})"
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


class Team:
    """The workers of one attempt, started together, each behind an agent. Their output goes to `output`.

    But where stdout is a terminal, a chief on this machine writes to it directly, so that its progress
    display works.

    Attributes:
        codes: their exit codes; None while they run.
        started: the workers that their agents have started.
        saved: True once a worker has made a checkpoint.
    """

    def __init__(self, places: Sequence[Place], command: Sequence[str], output: Output) -> None:
        """Starts all workers. UserError: there is no ssh on this machine."""
        self.codes: list[int | None] = [None] * len(places)
        self.saved = False
        self.started: set[int] = set()
        self._output = output
        self._agents: list[Any] = []
        self._readers: list[list[threading.Thread]] = []
        for index, place in enumerate(places):
            remote = {} if place.host is None else passed_on(os.environ)
            order = {
                "command": list(command),
                "environment": {**remote, "PYTHONUNBUFFERED": "1", **place.environment},
                "directory": str(Path.cwd()),
                "grace": ORPHAN_GRACE,
            }
            live = index == 0 and place.host is None and sys.stdout.isatty()
            agent = place.start() if place.start else start_agent(place.host, live=live)
            self._agents.append(agent)
            _send(agent, json.dumps(order).encode() + b"\n")
            sources = [(index, "stderr", agent.stderr)] + ([] if live else [(index, "stdout", agent.stdout)])
            self._readers.append([threading.Thread(target=self._copy, args=s, daemon=True) for s in sources])
            for reader in self._readers[-1]:
                reader.start()

    def _copy(self, index: int, stream: str, source: BinaryIO) -> None:
        """Copies the output of a worker to its end, in a thread of its own."""
        while data := source.read(1 << 16):
            if STARTED in data:
                self.started.add(index)
            self.saved = self.saved or SAVED in data
            self._output.write(index, stream, data.translate(None, STARTED + SAVED))

    @property
    def running(self) -> bool:
        """True while any worker still runs."""
        return None in self.codes

    def note_ends(self) -> None:
        """Waits a moment, and notes the exit codes of workers that have ended."""
        time.sleep(TICK)
        for index, agent in enumerate(self._agents):
            if self.codes[index] is None and agent.poll() is not None:
                for reader in self._readers[index]:
                    reader.join(1.0)  # for the rest of its output
                self._output.end(index)
                code = agent.returncode
                if code == 0 and index not in self.started:  # ssh, or a shell there, did nothing
                    code = LOST
                self.codes[index] = code if code >= 0 else 128 - code

    def send(self, letter: bytes) -> None:
        """Sends a signal to all workers: b"T", b"I" or b"K", as SIGTERM, SIGINT and SIGKILL."""
        for agent in self._agents:
            _send(agent, letter)

    def settle(self, seconds: float = NOTICE) -> None:
        """Waits until all have ended by themselves, but not longer than this."""
        end = time.monotonic() + seconds
        while self.running and time.monotonic() < end:
            self.note_ends()

    def stop(self, grace: float, *, told: bool) -> None:
        """Ends all workers: SIGTERM unless they were `told` before, and after `grace` seconds SIGKILL."""
        for letter, seconds in ((b"" if told else b"T", grace), (b"K", 5.0)):
            if self.running:
                self.send(letter)
                self.settle(seconds)
        for agent in self._agents:
            agent.kill()  # for an ssh whose other end does not answer
        self.close()

    def close(self) -> None:
        """Hangs up on the agents: an agent stops a worker that still runs, with time to save."""
        for agent in self._agents:
            agent.stdin.close()


def start_agent(host: str | None, *, live: bool) -> subprocess.Popen[bytes]:
    """Starts an agent here, or the ssh to it; a `live` one has this process's stdout. UserError: no program.

    It begins with signals blocked, because the launcher passes on those that reach the whole job. An agent
    unblocks them once it has a worker. ssh never does, and keeps the connection while the worker saves.
    """
    command = [sys.executable, "-IS", AGENT]
    if host is not None:
        command = [*SSH, "--", host, f"exec {shlex.join(command)}"]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=None if live else subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # the terminal's Ctrl-C comes to the launcher alone
        )
    except OSError as error:
        raise UserError(f"cannot start {command[0]!r} on this machine: {error.strerror}") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _send(agent: Any, data: bytes) -> None:
    with contextlib.suppress(OSError):  # it has ended; `note_ends` gets its exit code
        agent.stdin.write(data)


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of the environment that remote workers get."""
    return {
        name: value for name, value in environ.items() if name in PASSED or name.startswith(PASSED_PREFIXES)
    }


class Output:
    """Writes the chief's lines unchanged, and every other worker's lines after its number: "[1] ...".

    Whole lines are written, so that the lines of two workers never mix. The same error from several workers
    is written once in each attempt. If a stream's reader goes away, the workers continue, and their output is
    lost.
    """

    def __init__(self, stdout: TextIO, stderr: TextIO) -> None:
        self._streams = {"stdout": stdout, "stderr": stderr}
        self._lock = threading.RLock()
        self._unfinished: dict[tuple[int, str], bytes] = {}
        self._errors: set[bytes] = set()

    def write(self, worker: int, stream: str, data: bytes) -> None:
        """Takes output of a worker's "stdout" or "stderr"."""
        with self._lock:
            *lines, rest = (self._unfinished.pop((worker, stream), b"") + data).split(b"\n")
            if rest:
                self._unfinished[worker, stream] = rest
            for line in lines:
                if line in self._errors:
                    continue
                if line.startswith(b"error: "):
                    self._errors.add(line)
                self._put(stream, (b"[%d] " % worker if worker else b"") + line)

    def forget_errors(self) -> None:
        """Lets the next workers write errors that earlier ones have written."""
        with self._lock:
            self._errors.clear()

    def end(self, worker: int) -> None:
        """Writes the lines that the worker left unfinished when it ended."""
        for stream in self._streams:
            if (worker, stream) in self._unfinished:
                self.write(worker, stream, b"\n")

    def tell(self, sentence: str) -> None:
        """Writes a sentence of the launcher itself to stderr."""
        with self._lock:
            self._put("stderr", b"launch: " + sentence.encode())

    def _put(self, name: str, line: bytes) -> None:
        stream = self._streams[name]
        with surviving(stream):
            # On a terminal over the chief's progress line, which the chief will draw again.
            text = (b"\r\x1b[2K" if stream.isatty() else b"") + line + b"\n"
            if hasattr(stream, "buffer"):
                stream.buffer.write(text)
            else:  # in a notebook
                stream.write(text.decode(errors="replace"))
            stream.flush()


if __name__ == "__main__":
    endings.run(main)
