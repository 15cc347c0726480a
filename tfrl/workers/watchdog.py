"""Watchdog: finds a worker that hangs, by small files in which each worker notes its progress.

A dead worker breaks its connections, and TensorFlow notices. A worker that hangs (a stopped process, a disk
that does not answer, a deadlock) leaves the others in a collective for ever, and no collective can say who is
missing. So every worker counts its steps in `heartbeats/worker-N.json` of the run's folder, which all workers
share. If no worker has made a step for too long, each names the worker that is behind and its own place in
the code, and ends its process. TensorFlow takes no part, because it may be what hangs.
"""

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tfrl.cli.endings import end_at_once
from tfrl.cli.errors import PeerError
from tfrl.cli.streams import tell
from tfrl.workers.tf_config import split_address

TICK = 1.0  # seconds between two writes
LEAST, MULTIPLE = 60.0, 10.0  # the default limit: seconds, and times the measured update
# Before an update is measured, and the first time of a phase, TensorFlow may trace for minutes, and the time
# of a step is unknown. But a process that traces or computes shows signs of life:
LIFELESS = 180.0  # seconds without a step or a sign of life of any worker
UNMEASURED = 1800.0  # seconds without a step, whatever the signs of life
LIFE_OVER = 10.0  # seconds over which the use of the processor is measured
LIFE_SHARE = 0.1  # of one core: a hanging process uses less, even if it draws a progress bar
LOOKS = 5  # the least number of reads of the other files before a verdict
FROZEN_LOOKS = 3  # a file that did not change in so many reads: the process does not run
ANSWER_WITHIN = 1.0  # seconds for the others to show that they still listen
CONNECTING = "connecting"  # in this phase TensorFlow blocks all other threads, so silence means nothing
_SIZE = 2048  # bytes of a file: it is written in place and never grows, so it works on a full disk
_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = (_ROOT / "tfrl", _ROOT / "resnet")


@dataclass
class Heartbeat:
    """The content of a worker's file."""

    phases: int = 0  # begun so far; all workers have the same phases, so the lowest number is behind
    steps: int = 0  # of any kind since the phase began
    update: int = 0
    phase: str = "starting"
    at: str = ""  # the place in the code where its main thread is
    age: float = 0.0  # seconds since the last step
    signs: int = 0  # signs of life: seconds in which the main thread moved, or the process computed
    ticks: int = 0  # grows with each write

    @property
    def progress(self) -> tuple[int, int]:
        """Grows with each step, and compares one worker with another."""
        return self.phases, self.steps

    def __str__(self) -> str:
        return f"in update {self.update + 1}, {self.phase}, at {self.at} (call {self.steps + 1})"


class _Peer:
    """The progress of another worker while this one waits, on this worker's clock."""

    def __init__(self) -> None:
        self.last: Heartbeat | None = None
        self.moved = -1.0e9  # when it last made a step
        self.alive = -1.0e9  # when it last made a step or showed a sign of life
        self.silent = 0  # reads since its file last changed

    def look(self, now: float, heartbeat: Heartbeat | None) -> None:
        before, self.last = self.last, heartbeat or self.last
        self.silent = self.silent + 1 if self.last is None or self.last == before else 0
        if heartbeat is None:
            return
        if before is None:
            self.moved = self.alive = now - heartbeat.age
        elif heartbeat.progress != before.progress:
            self.moved = self.alive = now
        elif heartbeat.signs != before.signs:
            self.alive = now


class NoWatchdog:
    """The watchdog of a single process, which nobody waits for: it does nothing."""

    def _skip(self, *_: Any) -> None:
        """Does nothing."""

    start = beat = measured = close = _skip

    def unhurried(self) -> contextlib.AbstractContextManager[None]:
        """A context for code that may take as long as it likes."""
        return contextlib.nullcontext()


class Watchdog(NoWatchdog):
    """Watches all workers from one worker.

    Args:
      folder: the folder of the heartbeat files, on a shared disk.
      addresses: "host:port" of each worker, in order.
      worker: the index of this worker.
      stall_timeout: the allowed seconds without a step of any worker; 0: 60 or ten times the measured update,
        whichever is more. Before the first update is measured, and the first time of each phase, the limit
        is three minutes without a step or a sign of life, or half an hour without a step, and never less
        than this argument.
    """

    def __init__(self, folder: Path, addresses: Sequence[str], worker: int, *, stall_timeout: float) -> None:
        self._folder = folder
        self._addresses = addresses
        self._worker = worker
        self._stall_timeout = stall_timeout
        self._main = threading.main_thread().ident or 0
        self._closed = threading.Event()
        self._clock = 0.0  # counts only while this process runs: a suspended machine is no stall
        self._own, self._last_beat, self._last_sign = Heartbeat(), 0.0, 0.0
        self._stack: tuple[tuple[int, int], ...] = ()
        self._computed = (0.0, time.process_time())  # the clock at the last look, and the CPU time
        self._known = set[str]()  # phases of the past
        self._updates: list[float] = []  # the seconds of the first update, which traces, and of the last one
        self._unhurried = False
        self._forget()

    def start(self) -> None:
        """Starts to watch in a separate thread."""
        self._write()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    # From the main thread

    def beat(self, phase: str | None = None, update: int | None = None) -> None:
        """Notes a step of this worker, or the beginning of a phase. All workers begin the same phases."""
        own = self._own
        if phase is None:
            own.steps += 1
        else:
            self._known.add(own.phase)
            own.phase, own.phases, own.steps = phase, own.phases + 1, 0
        own.update = own.update if update is None else update
        self._last_beat = self._clock

    @contextlib.contextmanager
    def unhurried(self) -> Iterator[None]:
        """Counts each second inside as a step, for work without a time limit, such as a download."""
        self._unhurried = True
        try:
            yield
        finally:
            self._unhurried = False

    def measured(self, seconds: float) -> None:
        """Notes how long an update took. The first update does not count, because it includes tracing."""
        self._updates[1:] = [seconds]

    def close(self) -> None:
        """Ends the watch."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._path(self._worker).unlink(missing_ok=True)
            self._folder.rmdir()  # the last worker succeeds

    def missing(self) -> str:
        """The beginning of a sentence that names the missing workers, after TensorFlow lost a connection.

        The watchdog stops here, because the process is about to end.
        """
        self._closed.set()
        others = [w for w in range(len(self._addresses)) if w != self._worker]
        # All at the same time, because many may be silent.
        pool = ThreadPoolExecutor(len(others))
        asked = {w: pool.submit(_refuses, self._addresses[w]) for w in others}
        wait(asked.values(), ANSWER_WITHIN)
        pool.shutdown(wait=False)
        gone = [self._name(w) for w, answer in asked.items() if answer.done() and answer.result()]
        if gone:
            return f"{', '.join(gone)} {'is' if len(gone) == 1 else 'are'} gone"
        before = {w: self._read(w) for w in others}
        time.sleep(2.5 * TICK)
        frozen = [w for w in others if before[w] is not None and self._read(w) == before[w]]
        return self._silent(before, frozen) or "contact with another worker is lost"

    # The watchdog's thread

    def _watch(self) -> None:
        while not self._closed.wait(TICK):
            verdict = self.tick()
            if verdict is not None and not self._closed.is_set():
                _exit(verdict)

    def tick(self) -> str | None:
        """Writes this worker's heartbeat; while it waits, reads the others. Returns text if all stall."""
        self._clock += TICK
        if self._unhurried:
            self.beat()
        self._note_life()
        self._write()
        limit, lifeless, clock = *self._limits(), self._clock
        if self._own.age < min(limit, lifeless) / 2:
            self._forget()
            return None
        self._looks += 1
        for worker, peer in self._peers.items():
            peer.look(clock, self._read(worker))
        # This worker may wait for the work of others, such as an evaluation.
        moved = max(self._last_beat, *(peer.moved for peer in self._peers.values()))
        alive = max(self._last_beat, self._last_sign, *(peer.alive for peer in self._peers.values()))
        if self._looks < LOOKS or (clock - moved < limit and clock - alive < lifeless):
            return None
        return self._verdict(clock - moved)

    def _forget(self) -> None:
        """Forgets the others: there is no need to read their files while this worker makes steps."""
        self._peers = {w: _Peer() for w in range(len(self._addresses)) if w != self._worker}
        self._looks = 0

    def _limits(self) -> tuple[float, float]:
        """Seconds without a step, and without a step or a sign of life."""
        measured = self._updates[1] if len(self._updates) > 1 else 0.0
        if measured and self._own.phase in self._known:
            limit = self._stall_timeout or max(LEAST, MULTIPLE * measured)
            return limit, limit
        least = max(self._stall_timeout, MULTIPLE * measured)
        return max(least, UNMEASURED), max(least, LIFELESS)

    def _note_life(self) -> None:
        """Notes whether the main thread has moved since the last tick, or the process has computed."""
        frames = traceback.walk_stack(sys._current_frames().get(self._main))
        stack = tuple((id(frame.f_code), frame.f_lasti) for frame, _ in frames)
        then, before = self._computed
        moved, computed = stack != self._stack, False
        self._stack = stack
        if self._clock - then >= LIFE_OVER:
            self._computed = self._clock, time.process_time()
            computed = self._computed[1] - before >= LIFE_SHARE * (self._clock - then)
        if moved or computed:
            self._own.signs += 1
            self._last_sign = self._clock

    def _verdict(self, seconds: float) -> str:
        said = {w: peer.last for w, peer in self._peers.items()} | {self._worker: self._own}
        frozen = [
            w
            for w, peer in self._peers.items()
            if peer.silent >= FROZEN_LOOKS and not (peer.last and peer.last.phase == CONNECTING)
        ]
        left = {w: heartbeat for w, heartbeat in said.items() if heartbeat is not None}
        ahead = max(left, key=lambda w: left[w].progress)
        least = min(heartbeat.progress for heartbeat in left.values())
        behind = [w for w in left if left[w].progress == least < left[ahead].progress]
        if frozen:
            found = self._silent(said, frozen)
        elif behind:
            found = "; ".join(f"{self._name(w)} is stuck {left[w]}" for w in behind)
            found += f"; {self._name(ahead)} waits {left[ahead]}"
        else:
            found = f"all of them are {self._own}"
        return f"no worker has made a step for {seconds:.0f} s: {found}; start all workers again"

    def _silent(self, said: Mapping[int, Heartbeat | None], frozen: Sequence[int]) -> str:
        last = {w: said[w] or "(it has left no heartbeat)" for w in frozen}
        return "; ".join(f"{self._name(w)} has fallen silent {where}" for w, where in last.items())

    def _place(self) -> str:
        """The innermost line of this project in the main thread's stack."""
        for frame, line in traceback.walk_stack(sys._current_frames().get(self._main)):
            path = Path(frame.f_code.co_filename)
            if any(path.is_relative_to(package) for package in _PACKAGES):
                return f"{path.relative_to(_ROOT)}:{line} in {frame.f_code.co_name}"
        return "an unknown place"

    def _name(self, worker: int) -> str:
        return f"worker {worker} ({self._addresses[worker]})"

    def _path(self, worker: int) -> Path:
        return self._folder / f"worker-{worker}.json"

    def _write(self) -> None:
        own = self._own
        own.at, own.age, own.ticks = self._place(), self._clock - self._last_beat, own.ticks + 1
        data = json.dumps(asdict(own)).encode().ljust(_SIZE)
        with contextlib.suppress(OSError):  # it must not end the training
            self._folder.mkdir(parents=True, exist_ok=True)
            # Network file systems show a file to other machines when it is closed.
            descriptor = os.open(self._path(self._worker), os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(descriptor, data, 0)
            finally:
                os.close(descriptor)

    def _read(self, worker: int) -> Heartbeat | None:
        try:
            return Heartbeat(**json.loads(self._path(worker).read_bytes()))
        except (OSError, ValueError, TypeError):  # there is none, or it is being written
            return None


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Ends the process with SIGALRM, and prints its stack, if the code inside takes longer than this.

    While TensorFlow connects, no other Python thread runs, so the watchdog cannot help. TensorFlow would wait
    an hour for a worker that went away after the rendezvous.

    In a thread of a program with its own handler of SIGALRM, it only prints the stack.
    """
    # Outside the main thread Python allows no other handler.
    is_main, handler = threading.current_thread() is threading.main_thread(), signal.getsignal(signal.SIGALRM)
    has_alarm = is_main or handler == signal.SIG_DFL
    try:
        faulthandler.dump_traceback_later(seconds, file=sys.stderr)
        if is_main:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        if has_alarm:
            signal.setitimer(signal.ITIMER_REAL, seconds + 1.0)  # when the stack has been written
        yield
    finally:
        if has_alarm:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        if is_main:
            signal.signal(signal.SIGALRM, handler)
        faulthandler.cancel_dump_traceback_later()


def _refuses(address: str) -> bool:
    """True if no process listens there. A stopped process still listens."""
    try:
        socket.create_connection(split_address(address), timeout=ANSWER_WITHIN).close()
    except ConnectionRefusedError:
        return True
    except (OSError, UnicodeError):  # UnicodeError: not a host name
        pass
    return False


def _exit(sentence: str) -> None:
    """Ends the process, whatever its main thread does, and prints the main thread's stack."""

    def say() -> None:
        cursor = "\x1b[?25h\n" if sys.stdout.isatty() else ""  # the progress bar hides it
        tell(f"{cursor}error: {sentence}")
        stack = traceback.format_stack(sys._current_frames().get(threading.main_thread().ident or 0))
        tell(f"This worker's main thread:\n{''.join(stack).rstrip()}")

    end_at_once(PeerError.exit_code, say)
