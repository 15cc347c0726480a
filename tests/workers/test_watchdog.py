"""Who has stalled? Two watchdogs over one folder, ticked by hand: no clock and no thread is involved."""

import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from processes import PATIENCE, ROOT, unread_pipe

from tfrl.algorithms.registry import reader
from tfrl.workers import watchdog
from tfrl.workers.strategy import join
from tfrl.workers.watchdog import Watchdog

LIMIT = 10.0


class Still(Watchdog):
    """Shows no sign of life, as one that hangs does: the main thread here is the test's, which moves."""

    def _note_life(self):
        pass


def unmeasured(folder, kind=Still):
    """Two watchdogs before the first update."""
    return [kind(folder / "new", ["a:1", "b:2"], w, stall_timeout=LIMIT) for w in (0, 1)]


@pytest.fixture
def pair(tmp_path):
    made = [Still(tmp_path / "heartbeats", ["a:1", "b:2"], w, stall_timeout=LIMIT) for w in (0, 1)]
    for dog in made:
        dog.measured(100.0)  # the first update, which traces
        dog.measured(0.1)
        for phase in ("collecting", "updating", "collecting"):
            dog.beat(phase, 4)
    return made


def ticks(dogs, count):
    """The verdicts of so many seconds, without the Nones."""
    return [said for _ in range(count) for dog in dogs if (said := dog.tick()) is not None]


def test_progress_prevents_the_verdict_of_a_stall(pair):
    for _ in range(100):
        for dog in pair:
            dog.beat()
        assert ticks(pair, 1) == []


def test_waiting_for_a_working_peer_is_no_stall(pair):
    pair[0].beat("updating")
    for _ in range(100):
        pair[1].beat()
        assert ticks(pair, 1) == []


def test_the_slowest_worker_is_named_with_its_phase_and_place(pair):
    pair[0].beat("updating")
    said = ticks(pair, 12)
    assert said
    for sentence in said:  # the one that hangs says the same of itself
        assert "worker 1 (b:2) is stuck in update 5, collecting, at " in sentence
        assert "; worker 0 (a:1) waits in update 5, updating, at " in sentence
        assert "no worker has made a step for" in sentence


def test_workers_that_wait_in_different_calls_are_named_with_their_calls(pair):
    for dog, calls in zip(pair, (3, 2), strict=True):
        dog.beat("updating")
        for _ in range(calls):
            dog.beat()
    for sentence in (said := ticks(pair, 12)):
        assert re.search(r"worker 1 \(b:2\) is stuck in update 5, updating, at .* \(call 3\);", sentence)
        assert re.search(r"worker 0 \(a:1\) waits in update 5, updating, at .* \(call 4\);", sentence)
    assert said


def test_a_stopped_process_is_distinguished_from_a_waiting_one(pair):
    assert ticks(pair, 2) == []
    said = ticks(pair[:1], 20)
    assert "worker 1 (b:2) has fallen silent in update 5, collecting, at " in said[0]


def test_no_stall_is_reported_before_the_limit(pair):
    assert ticks(pair, int(LIMIT) - 1) == []


def test_a_worker_without_a_heartbeat_is_named(pair):
    said = ticks(pair[:1], 20)
    assert "worker 1 (b:2) has fallen silent (it has left no heartbeat)" in said[0]


def test_workers_at_the_same_place_are_named_together(pair):
    assert "all of them are in update 5, collecting" in ticks(pair, 15)[0]


class Living(Watchdog):
    """Shows a sign of life at each tick, as one that traces does."""

    def _note_life(self):
        self._own.signs += 1
        self._last_sign = self._clock


@pytest.mark.parametrize("begin", ["collecting", "connecting"])
def test_a_hang_before_the_first_measured_update_is_found_in_minutes(tmp_path, begin):
    dogs = unmeasured(tmp_path)
    dogs[0].beat("updating")
    for dog in dogs:
        dog.measured(400.0)
        dog.beat(begin)
    dogs[0].beat("updating")
    assert ticks(dogs, int(watchdog.LIFELESS) - 1) == []
    assert f"worker 1 (b:2) is stuck in update 1, {begin}, at " in ticks(dogs, 10)[0]


def test_long_tracing_is_allowed_for_half_an_hour(tmp_path):
    dogs = unmeasured(tmp_path, Living)
    assert ticks(dogs, int(watchdog.UNMEASURED) - 1) == []
    assert ticks(dogs, 10)


def test_a_connecting_worker_is_not_blamed(tmp_path):
    hanging, mute = unmeasured(tmp_path)
    for dog in (hanging, mute):
        dog.beat(watchdog.CONNECTING)
    ticks([mute], 1)
    assert "all of them are in update 1, connecting, at " in ticks([hanging], 2 * int(watchdog.LIFELESS))[0]


def test_workers_wait_for_a_tracing_worker(tmp_path):
    waiting, tracing = unmeasured(tmp_path)[0], unmeasured(tmp_path, Living)[1]
    waiting.beat("updating")
    assert ticks([waiting, tracing], int(watchdog.UNMEASURED) - 1) == []


def test_the_first_time_of_a_phase_may_take_longer(pair):
    for dog in pair:
        dog.beat("evaluating on train levels")
    assert ticks(pair, int(watchdog.LIFELESS) - 1) == []
    assert ticks(pair, 5)


def test_phases_without_a_limit_are_not_stalls(tmp_path):
    dogs = unmeasured(tmp_path)
    with dogs[1].unhurried():
        assert ticks(dogs, 3000) == []
    assert ticks(dogs, int(watchdog.LIFELESS) + 10)


def test_computing_and_moving_are_signs_of_life_and_sleeping_is_none(tmp_path):
    dog = unmeasured(tmp_path, Watchdog)[0]
    release, asleep = threading.Event(), threading.Event()

    def rest():
        asleep.set()
        release.wait()

    sleeper = threading.Thread(target=rest)
    sleeper.start()
    asleep.wait()
    dog._main = sleeper.ident
    ticks([dog], 1)
    dog._clock += 1000.0  # so that what this test computes itself is no tenth of a core
    ticks([dog], 1)
    before = dog._own.signs
    ticks([dog], 10)
    assert dog._own.signs == before
    end = time.process_time() + watchdog.LIFE_OVER * watchdog.LIFE_SHARE
    while time.process_time() < end:
        pass
    ticks([dog], int(watchdog.LIFE_OVER))
    assert dog._own.signs == before + 1
    dog._main = threading.main_thread().ident
    ticks([dog], 1)
    assert dog._own.signs > before + 1
    release.set()
    sleeper.join()


def test_the_default_is_a_multiple_of_the_update_and_a_minute_at_least(tmp_path):
    dog = Watchdog(tmp_path, ["a:1", "b:2"], 0, stall_timeout=0.0)
    dog.measured(100.0)
    for seconds, limit in ((0.5, 60), (30.0, 300)):
        dog.measured(seconds)
        for _ in range(3):
            dog.beat("updating")
        assert ticks([dog], limit - 1) == []
        assert ticks([dog], 2)


STALLS = """
import sys, time
from pathlib import Path
from tfrl.workers import watchdog
watchdog.TICK = 0.05
dog = watchdog.Watchdog(Path(sys.argv[1]), ["a:1", "b:2"], 0, stall_timeout=0.1)
dog.measured(0.1)  # the first update, which traces
dog.measured(0.1)
for _ in range(2):
    dog.beat("updating")
dog.start()
time.sleep(600)
"""


@pytest.mark.parametrize("kind", ["read", "broken", "full"])
def test_a_stalled_worker_ends_also_if_nobody_reads_its_stderr(tmp_path, kind):
    pipe = contextlib.nullcontext(subprocess.PIPE) if kind == "read" else unread_pipe(kind)
    with pipe as stderr:
        command = [sys.executable, "-c", STALLS, str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, stderr=stderr, text=True, timeout=60)
    assert done.returncode == 75
    if kind == "read":
        assert done.stderr.startswith("error: no worker has made a step for ")
        assert done.stderr.endswith("in <module>\n")  # where the main thread is


def test_the_last_worker_removes_the_heartbeats(pair, tmp_path):
    ticks(pair, 1)
    for dog in pair:
        dog.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_half_written_is_no_heartbeat(pair, tmp_path):
    pair[0].beat("updating")
    (tmp_path / "heartbeats").mkdir()
    (tmp_path / "heartbeats" / "worker-1.json").write_text('{"phases": 3, ')
    assert "(it has left no heartbeat)" in ticks(pair[:1], 20)[0]


def test_a_lost_connection_names_the_dead_worker(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as here, socket.create_server(("127.0.0.1", 0)) as closed:
        names = [f"127.0.0.1:{s.getsockname()[1]}" for s in (here, closed)]
        closed.close()
        dog = Watchdog(tmp_path, names, 0, stall_timeout=LIMIT)
        assert dog.missing() == f"worker 1 ({names[1]}) is gone"


def deaf(held):
    """The address of a program that takes no more connections, like a machine that is gone: none answers."""
    listener = held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
    for _ in range(2):
        waiting = held.enter_context(socket.socket())
        waiting.setblocking(False)
        waiting.connect_ex(listener.getsockname())
    return f"127.0.0.1:{listener.getsockname()[1]}"


def test_other_workers_are_asked_in_parallel(tmp_path):
    """Twelve workers without an answer take no longer than one, and the dead one is named."""
    with contextlib.ExitStack() as held, socket.create_server(("127.0.0.1", 0)) as closed:
        names = ["a:1", *(deaf(held) for _ in range(12)), f"127.0.0.1:{closed.getsockname()[1]}"]
        closed.close()
        dog = Watchdog(tmp_path, names, 0, stall_timeout=LIMIT)
        began = time.monotonic()
        assert dog.missing() == f"worker 13 ({names[13]}) is gone"
        assert 0.5 < time.monotonic() - began < 4


def test_a_lost_connection_names_the_frozen_worker(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog.time, "sleep", lambda seconds: None)
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        names = [f"127.0.0.1:{s.getsockname()[1]}" for s in (first, second)]
        dogs = [Watchdog(tmp_path, names, w, stall_timeout=LIMIT) for w in (0, 1)]
        ticks(dogs, 1)
        assert f"worker 1 ({names[1]}) has fallen silent in update 1, starting" in dogs[0].missing()


def test_a_single_worker_has_no_watchdog(tmp_path):
    config = reader("ppo").of_values({"env": "catch", "logdir": str(tmp_path)})
    threads = set(threading.enumerate())  # one of an earlier test may end meanwhile
    with join(config, None) as (_, dog):
        dog.beat("collecting", 0)
        with dog.unhurried():
            dog.measured(1.0)
        assert not isinstance(dog, Watchdog) and threads.issuperset(threading.enumerate())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize(("seconds", "code"), [(0.2, -signal.SIGALRM), (60.0, 0)])
def test_a_deadline_ends_a_process_whose_other_threads_cannot_run(seconds, code, in_thread):
    # A sleep in C that keeps the interpreter to itself, as TensorFlow does while it connects.
    program = (
        "import ctypes, threading\nfrom tfrl.workers.watchdog import deadline\n"
        "def connect():\n"
        f"    with deadline({seconds}):\n        ctypes.PyDLL(None).usleep(3_000_000)\n    print('done')\n"
        + ("threading.Thread(target=connect).start()" if in_thread else "connect()")
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == code
    assert ("line 5 in connect" in done.stderr) == (done.stdout == "") == (code != 0)


def test_a_deadline_in_a_thread_leaves_the_alarm_of_the_program_alone():
    came, before = [], signal.signal(signal.SIGALRM, lambda *_: came.append(1))

    def connect():
        with watchdog.deadline(60.0):
            came.append(signal.getitimer(signal.ITIMER_REAL)[0])

    try:
        thread = threading.Thread(target=connect)
        thread.start()
        thread.join()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert came == [0.0]
