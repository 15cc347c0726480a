"""Who has stalled? Two watchdogs over one folder, ticked by hand: no clock and no thread is involved."""

import socket

import pytest

from tfrl import watchdog
from tfrl.watchdog import Watchdog

LIMIT = 10.0


@pytest.fixture
def pair(tmp_path):
    made = [
        Watchdog(tmp_path / "heartbeats", ["a:1", "b:2"], w, stall_timeout=LIMIT, on_stall=pytest.fail)
        for w in (0, 1)
    ]
    for dog in made:
        dog.measured(0.1)
        for phase in ("collecting", "updating", "collecting"):
            dog.beat(phase, 4)
    return made


def ticks(dogs, count):
    """The verdicts of so many seconds, without the Nones."""
    return [said for _ in range(count) for dog in dogs if (said := dog.tick()) is not None]


def test_steps_keep_it_quiet(pair):
    for _ in range(100):
        for dog in pair:
            dog.beat()
        assert ticks(pair, 1) == []


def test_waiting_for_one_who_works_is_no_stall(pair):
    pair[0].beat("updating")
    for _ in range(100):
        pair[1].beat()
        assert ticks(pair, 1) == []


def test_the_one_behind_is_named_with_its_phase_and_place(pair):
    pair[0].beat("updating")
    said = ticks(pair, 12)
    assert said
    for sentence in said:  # the one that hangs says the same of itself
        assert "worker 1 (b:2) is stuck in update 5, collecting, at " in sentence
        assert "worker 0" not in sentence
        assert "no worker has made a step for" in sentence


def test_a_process_that_does_not_run_is_told_from_one_that_waits(pair):
    assert ticks(pair, 2) == []
    said = ticks(pair[:1], 20)
    assert "worker 1 (b:2) has fallen silent in update 5, collecting, at " in said[0]


def test_no_verdict_before_the_limit(pair):
    assert ticks(pair, int(LIMIT) - 1) == []


def test_a_worker_without_a_heartbeat_is_named(pair):
    said = ticks(pair[:1], 20)
    assert "worker 1 (b:2) has fallen silent (it has left no heartbeat)" in said[0]


def test_all_at_the_same_place(pair):
    assert "all of them are in update 5, collecting" in ticks(pair, 15)[0]


def test_the_first_update_and_the_first_time_of_a_phase_may_take_long(tmp_path, pair):
    new = Watchdog(tmp_path / "new", ["a:1", "b:2"], 0, stall_timeout=LIMIT, on_stall=pytest.fail)
    new.beat("collecting")
    assert ticks([new], int(watchdog.UNMEASURED) - 1) == []
    for dog in pair:
        dog.beat("evaluating on train levels")
    assert ticks(pair, int(watchdog.FIRST_TIME) - 1) == []
    assert ticks(pair, 5)


def test_the_default_is_a_multiple_of_the_update_and_a_minute_at_least(tmp_path):
    dog = Watchdog(tmp_path, ["a:1", "b:2"], 0, stall_timeout=0.0, on_stall=pytest.fail)
    for seconds, limit in ((0.5, 60), (30.0, 300)):
        dog.measured(seconds)
        for _ in range(3):
            dog.beat("updating")
        assert ticks([dog], limit - 1) == []
        assert ticks([dog], 2)


def test_heartbeats_go_with_the_last_worker(pair, tmp_path):
    ticks(pair, 1)
    for dog in pair:
        dog.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_half_written_is_no_heartbeat(pair, tmp_path):
    pair[0].beat("updating")
    (tmp_path / "heartbeats").mkdir()
    (tmp_path / "heartbeats" / "worker-1.json").write_text('{"phases": 3, ')
    assert "(it has left no heartbeat)" in ticks(pair[:1], 20)[0]


def test_who_is_gone_after_a_lost_connection(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as here, socket.create_server(("127.0.0.1", 0)) as closed:
        names = [f"127.0.0.1:{s.getsockname()[1]}" for s in (here, closed)]
        closed.close()
        dog = Watchdog(tmp_path, names, 0, stall_timeout=LIMIT, on_stall=pytest.fail)
        assert dog.missing() == f"worker 1 ({names[1]}) is gone"


def test_who_is_frozen_after_a_lost_connection(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog.time, "sleep", lambda seconds: None)
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        names = [f"127.0.0.1:{s.getsockname()[1]}" for s in (first, second)]
        dogs = [Watchdog(tmp_path, names, w, stall_timeout=LIMIT, on_stall=pytest.fail) for w in (0, 1)]
        ticks(dogs, 1)
        assert f"worker 1 ({names[1]}) has fallen silent in update 1, starting" in dogs[0].missing()


def test_one_worker_watches_nobody(tmp_path):
    dog = Watchdog(tmp_path / "run" / "heartbeats", ["here"], 0, stall_timeout=LIMIT, on_stall=pytest.fail)
    dog.start()
    dog.beat("collecting", 0)
    dog.close()
    assert list(tmp_path.iterdir()) == []
