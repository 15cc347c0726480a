"""Two workers' sessions, in threads: who tells what went wrong with a checkpoint?"""

import contextlib
import io
import shutil
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tfrl.cli.endings import StopRequest
from tfrl.cli.errors import PeerError
from tfrl.run.checkpoint import State
from tfrl.run.console import Console
from tfrl.workers.watchdog import Watchdog


class Pair:
    """The collectives of two workers, one of which may spoil something before it takes part in one."""

    def __init__(self):
        self._barrier, self._given = threading.Barrier(2, timeout=20), [None, None]

    def runtime(self, worker, after_each=lambda: None):
        def gather(value):
            self._given[worker] = value
            self._barrier.wait()
            given = list(self._given)
            self._barrier.wait()
            after_each()
            return given

        return types.SimpleNamespace(
            worker=worker,
            num_workers=2,
            is_chief=worker == 0,
            all_agree=lambda ok: all(gather(ok)),
            sum_over_workers=lambda values: sum(gather(values)),
        )


@pytest.fixture
def workers(tmp_path):
    """Makes the two sessions, with folders of their own if need be, and gives them and the chief's screen."""
    from tfrl.run.session import Session  # TensorFlow

    def make(folders=(tmp_path, tmp_path), **spoils):
        pair, screen = Pair(), io.StringIO()
        consoles = Console(stream=screen), Console(enabled=False)
        sessions = []
        for worker, (folder, console) in enumerate(zip(folders, consoles, strict=True)):
            config = types.SimpleNamespace(run_dir=folder, keep_checkpoints=3, step_name="update")
            watchdog = Watchdog(folder / "heartbeats", ("here",), worker, stall_timeout=0.0)
            runtime = pair.runtime(worker, **(spoils if worker == 1 else {}))
            stop = StopRequest(folder / "stop")
            sessions.append(Session(config, runtime, console, stop, watchdog))
        return sessions, screen

    return make


def both(sessions, call):
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(call, sessions))


def save(session, part=None):
    session.step += 1
    session.save(session.step, State({"weights": np.ones(2)}, [part or {"envs": np.zeros(3)}]), {})


def test_numbers_of_workers_arrive_without_a_rounding(workers):
    sessions, _ = workers()
    for numbers in ([3, 4], [1 / 3, 0.1 + 0.2]):
        shown = both(sessions, lambda session, of=numbers: session.of_workers(of[session.runtime.worker]))
        assert [each.tolist() for each in shown] == [numbers] * 2


def test_a_worker_that_cannot_write_its_part_says_why(workers, tmp_path, capsys):
    part = tmp_path / "checkpoints" / "update-00000001.tmp" / "worker-00001-of-00002.npz"

    def occupy():  # as soon as there is a place for the part
        with contextlib.suppress(OSError):
            part.mkdir()

    sessions, screen = workers(after_each=occupy)
    both(sessions, save)
    assert not any(session.is_saved for session in sessions)
    assert "its output says why. Training continues." in screen.getvalue()
    said = capsys.readouterr().err
    assert said.startswith("warning: The checkpoint of update 1 was not saved: ")
    assert said.endswith(f"cannot write {part} (Is a directory). Training continues.\n")
    assert said.count("\n") == 1


def test_only_the_chief_reports_that_it_cannot_write(workers, tmp_path, capsys):
    (tmp_path / "checkpoints").touch()
    sessions, screen = workers()
    both(sessions, save)
    assert "warning: The checkpoint of update 1 was not saved: cannot write " in screen.getvalue()
    assert capsys.readouterr().err == ""


def test_every_checkpoint_that_a_full_disk_costs_is_reported(workers, tmp_path, small_disk):
    disk = small_disk("100k")
    sessions, screen = workers((disk, disk))
    for full in (False, True, True, True, False):
        with contextlib.suppress(OSError), (disk / "litter").open("wb", buffering=0) as litter:
            while full:
                litter.write(bytes(1024))
        both(sessions, save)
        assert [session.is_saved for session in sessions] == [not full] * 2
    lines = screen.getvalue().splitlines()
    expected = [f"update {update} was not saved: the disk" for update in (2, 3, 4)]
    assert len(lines) == 3 and all(part in line for part, line in zip(expected, lines, strict=True))


def test_old_checkpoints_that_make_room_are_reported_once(workers, tmp_path, small_disk, capsys):
    disk = small_disk("200k")
    sessions, screen = workers((disk, disk))
    part = {"envs": np.zeros(40_000, np.uint8)}
    for _ in range(6):
        both(sessions, lambda session: save(session, part if session.runtime.is_chief else {}))
        assert all(session.is_saved for session in sessions)
    assert screen.getvalue().count("old checkpoints are removed to make room") == 1
    assert len(screen.getvalue().splitlines()) == 1 and capsys.readouterr().err == ""
    assert sorted(path.name for path in (disk / "checkpoints").iterdir())[-1] == "update-00000006"


def damage(folder):
    path = folder / "checkpoints" / "update-00000002" / "learner.npz"
    path.write_bytes(path.read_bytes()[:-1])


def saved_twice(workers):
    sessions, _ = workers()
    for _ in range(2):
        both(sessions, save)


def test_a_damaged_checkpoint_is_reported_once(workers, tmp_path, capsys):
    saved_twice(workers)
    damage(tmp_path)
    sessions, screen = workers()
    assert [found.update for found in both(sessions, lambda session: session.restore())] == [1, 1]
    assert screen.getvalue().count("update-00000002 is skipped: ") == 1
    assert capsys.readouterr().err == ""


def test_a_worker_that_alone_cannot_read_a_checkpoint_says_why(workers, tmp_path, capsys):
    saved_twice(workers)
    other = shutil.copytree(tmp_path, tmp_path / "as another disk shows it")
    damage(other)
    sessions, screen = workers((tmp_path, other))
    assert [found.update for found in both(sessions, lambda session: session.restore())] == [1, 1]
    assert screen.getvalue() == ""
    said = capsys.readouterr().err
    assert said.startswith(f"warning: The checkpoint {other}/checkpoints/update-00000002 is skipped: ")


def test_no_worker_begins_again_where_another_sees_a_checkpoint(workers, tmp_path):
    saved_twice(workers)
    other = tmp_path / "a disk of its own"
    sessions, _ = workers((tmp_path, other))

    def refused(session):
        with pytest.raises(PeerError) as caught:
            session.restore()
        return str(caught.value)

    def sentence(folder):
        words = f"worker 1 sees no checkpoint in {folder}, and worker 0 sees that of update 2"
        return f"{words}: all workers must share one disk"

    assert both(sessions, refused) == [sentence(tmp_path), sentence(other)]
    assert not other.exists()
