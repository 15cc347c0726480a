"""Checkpoints when processes are killed at any moment and disks are full: the last one stays whole."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from checkpoints import assert_checkpoint, fail_on_skip, folder_names, save
from processes import ROOT

from tfrl.run.checkpoint import CheckpointError, CheckpointShard, CheckpointStore, State

KILLED_AT_EVERY_STEP = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import numpy as np
from tfrl.run.checkpoint import CheckpointStore, State

def save(update, value):
    arrays = {"x": np.full(1000, value)}, {"y": np.array([value])}
    store.save(update, State(arrays[0], [arrays[1]]), env_steps=value)

def die_at(event_number):
    count = 0
    def hook(name, args):
        nonlocal count
        if name in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.scandir"):
            count += 1
            if count == event_number:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

store = CheckpointStore(Path(sys.argv[2]), keep=int(sys.argv[3]))
save(10, value=0)
survivals = deaths = 0
for event_number in range(1, 1000):
    pid = os.fork()
    if pid == 0:
        die_at(event_number)
        save(10, value=event_number)       # over the last one ...
        save(20, value=event_number)       # ... and a new one, which prunes
        os._exit(0)
    killed = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
    found = store.load(lambda sentence: sys.exit(f"event {event_number}: {sentence}"))
    assert found is not None, event_number
    assert (found.learner["x"] == found.env_steps).all() and found.parts[0]["y"][0] == found.env_steps
    assert found.env_steps in (event_number, event_number - 1), (event_number, found.env_steps)
    save(10, value=event_number)
    assert store.updates() == [10] and len(os.listdir(sys.argv[2])) == 1, os.listdir(sys.argv[2])
    deaths += killed
    if not killed:
        print(deaths)
        sys.exit(0)
"""


@pytest.mark.parametrize("keep", [1, 2])
def test_sigkill_before_every_file_operation(directory, keep):
    script = [sys.executable, "-c", KILLED_AT_EVERY_STEP, str(ROOT), str(directory), str(keep)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


SAVES_FOR_EVER = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
from checkpoints import save
from tfrl.run.checkpoint import CheckpointStore
store = CheckpointStore(Path(sys.argv[3]), keep=2)
update = int(sys.argv[4])
while True:
    for _ in range(2):
        save(store, update)
    print(update, flush=True)
    update += 1
"""


def test_sigkill_at_random_moments(store, directory):
    rng, last = np.random.default_rng(0), 0
    for _ in range(8):
        command = [sys.executable, "-c", SAVES_FOR_EVER, str(ROOT), str(ROOT / "tests"), str(directory)]
        with subprocess.Popen([*command, str(last + 1)], stdout=subprocess.PIPE, text=True) as child:
            said = int(child.stdout.readline())
            time.sleep(rng.uniform(0, 0.1))
            child.send_signal(signal.SIGKILL)
            said = int(child.stdout.read().split("\n")[-2:][0] or said)
        checkpoint = store.load(fail_on_skip)
        assert checkpoint.update >= said
        assert_checkpoint(checkpoint, checkpoint.update)
        last = checkpoint.update


def test_full_disk_keeps_the_last_checkpoint(small_disk):
    disk = small_disk("2m")
    directory = disk / "checkpoints"
    store = CheckpointStore(directory, keep=3)
    save(store, 10)
    used = shutil.disk_usage(disk).used
    big = {"x": np.random.default_rng(0).integers(0, 256, 3_000_000, np.uint8)}
    for learner, part in ((big, {}), ({}, big)):
        with pytest.raises(CheckpointError) as error:
            store.save(20, State(learner, [part]), env_steps=20)
        assert "is full (" in str(error.value) and "about 3.0 MB needed)" in str(error.value)
        assert folder_names(directory) == ["update-00000010"]
        assert shutil.disk_usage(disk).used == used
    assert_checkpoint(store.load(fail_on_skip), 10)
    save(store, 30)
    assert store.updates() == [10, 30]


def hold(values):
    """Arrays of 300 kB."""
    return {"x": np.random.default_rng(values).integers(0, 256, 300_000, np.uint8)}


def test_on_a_full_disk_the_oldest_make_room(small_disk):
    """The disk has room for two checkpoints and not for three."""
    disk = small_disk("800k")
    store = CheckpointStore(disk / "checkpoints", keep=3)
    for update, dropped in ((10, 0), (20, 0), (30, 1), (40, 1), (50, 1)):
        assert store.save(update, State(hold(update), [{}]), env_steps=update) == dropped
        assert store.updates() == [10, 20][: update // 10] if update < 30 else [update - 10, update]
        found = store.load(fail_on_skip)
        assert found.update == update and (found.learner["x"] == hold(update)["x"]).all()


def test_a_damaged_shard_is_replaced_by_the_run_that_writes_it_again(tmp_path):
    store, first = CheckpointStore(tmp_path / "checkpoints", keep=2), CheckpointShard({"n": 1}, hold(1))
    store.save(1, State({}, [{}], [first]), env_steps=1)
    store.save(2, State({}, [{}], [first, CheckpointShard({"n": 2}, hold(2))]), env_steps=2)
    newest = max((tmp_path / "checkpoints/shards").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    skipped = []
    found = store.load(skipped.append, verify_shards=True)
    assert found.update == 1 and "does not match its checksum" in skipped[0]
    again = [*found.shards, CheckpointShard({"n": 2}, hold(2))]  # the same rows, computed again
    store.save(2, State({}, [{}], again), env_steps=2)
    store.save(3, State({}, [{}], again), env_steps=3)
    assert store.load(pytest.fail, verify_shards=True).update == 3


def test_the_shards_of_the_oldest_make_room_as_well(small_disk):
    """A replay that is full: each checkpoint adds a shard of 300 kB, and needs the last three."""
    disk = small_disk("2m")
    store, shards = CheckpointStore(disk / "checkpoints", keep=3), []
    for update in range(1, 8):
        if update == 5:  # another program fills the disk
            (disk / "other").write_bytes(bytes(shutil.disk_usage(disk).free - 100_000))
        shards = [*shards[-2:], CheckpointShard({"n": update}, hold(update))]
        store.save(update, State({}, [{}], shards), env_steps=update)
        assert store.updates()[-1] == update


def test_a_full_disk_keeps_a_checkpoint_to_resume_from(small_disk):
    """The newer checkpoint is damaged, so the run needs the older one."""
    disk = small_disk("800k")
    store = CheckpointStore(disk / "checkpoints", keep=3)
    for update in (10, 20):
        store.save(update, State(hold(update), [{}]), env_steps=update)
    damaged = disk / "checkpoints" / "update-00000020" / "learner.npz"
    damaged.write_bytes(bytes(damaged.stat().st_size))
    with pytest.raises(CheckpointError, match="is full"):
        store.save(30, State(hold(30), [{}]), env_steps=30)
    assert store.load(lambda _: None).update == 10


def test_checkpoints_are_kept_if_deleting_them_makes_too_little_room(small_disk):
    disk = small_disk("1m")
    store = CheckpointStore(disk / "checkpoints", keep=3)
    for update in (10, 20):
        save(store, update)
    big = {"x": np.random.default_rng(0).integers(0, 256, 3_000_000, np.uint8)}
    with pytest.raises(CheckpointError, match="is full"):
        store.save(30, State(big, [{}]), env_steps=30)
    assert store.updates() == [10, 20]


def test_a_read_only_disk_keeps_the_last_checkpoint(small_disk):
    disk = small_disk("2m")
    directory = disk / "checkpoints"
    store = CheckpointStore(directory, keep=3)
    save(store, 10)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(
        CheckpointError, match=r"cannot write .*update-00000020.tmp \(Read-only file system\)"
    ):
        save(store, 20)
    assert_checkpoint(store.load(fail_on_skip), 10)


@pytest.mark.parametrize("failing", ["write_array", "fsync", "rename"])
def test_disk_full_at_any_call(store, directory, monkeypatch, failing):
    save(store, 10)
    before = folder_names(directory)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device", str(args[0]))

    with monkeypatch.context() as patch:
        module = {"write_array": np.lib.format, "fsync": os, "rename": Path}[failing]
        patch.setattr(module, failing, full)
        for update in (10, 20):  # replacing one, and a new one
            with pytest.raises(CheckpointError, match="is full"):
                save(store, update)
    assert folder_names(directory) == before
    assert_checkpoint(store.load(fail_on_skip), 10)
