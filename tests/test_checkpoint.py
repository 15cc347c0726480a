import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tfrl.checkpoint import (
    CheckpointError,
    CheckpointStore,
    pack_bytes,
    pack_json,
    unpack_bytes,
    unpack_json,
)
from tfrl.errors import UserError

ROOT = Path(__file__).parents[1]


def learner_arrays(update):
    rng = np.random.default_rng(update)
    return {
        "actor/torso/kernel": rng.standard_normal((64, 32)).astype(np.float32),
        "file": np.float64(np.pi * update),  # the names np.savez itself could not take
        "self": np.array([np.nan, -0.0, np.inf], np.float32),
        "fortran": np.asfortranarray(rng.standard_normal((3, 5))),
        "empty": np.zeros((0, 4), np.int64),
        "names": np.array(["coinrun", "bigfish"]),
        "first": rng.random(7) < 0.5,
    }


def part_arrays(update, worker):
    return {"observation": np.random.default_rng([update, worker]).integers(0, 256, (4, 8, 8, 3), np.uint8)}


def save(store, update, worker=0):
    store.save(
        update,
        learner=learner_arrays(update),
        worker_part=part_arrays(update, worker),
        env_steps=1000 * update,
    )


def assert_same_arrays(actual, expected):
    assert list(actual) == list(expected)
    for name, array in expected.items():
        expected_array = np.asarray(array)
        assert actual[name].dtype == expected_array.dtype and actual[name].shape == expected_array.shape
        assert actual[name].tobytes() == expected_array.tobytes(), name


def assert_checkpoint(checkpoint, update, num_workers=1):
    assert (checkpoint.update, checkpoint.env_steps) == (update, 1000 * update)
    assert_same_arrays(checkpoint.learner, learner_arrays(update))
    assert len(checkpoint.parts) == num_workers
    for worker, part in enumerate(checkpoint.parts):
        assert_same_arrays(part, part_arrays(update, worker))


def fail_on_skip(sentence):
    raise AssertionError(sentence)


def folder_names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "run" / "checkpoints", keep=3)


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "run" / "checkpoints"


def test_round_trip_is_bit_exact(store, directory):
    assert store.load(fail_on_skip) is None and store.updates() == []
    assert not directory.exists(), "reading must not create anything"
    save(store, 7)
    assert_checkpoint(store.load(fail_on_skip), 7)
    assert folder_names(directory / "update-00000007") == [
        "learner.npz",
        "manifest.json",
        "worker-00000-of-00001.npz",
    ]
    loaded = store.load(fail_on_skip).learner["actor/torso/kernel"]
    loaded += 1  # the arrays are the caller's own


def test_packing():
    value = {"seed": 1, "names": ["a", "ü"], "x": 0.1}
    assert unpack_json(pack_json(value)) == value
    for items in ([b"abc", b"", b"\x00" * 23_000], []):
        flat, lengths = pack_bytes(items)
        assert (flat.dtype, lengths.dtype) == (np.uint8, np.int64)
        assert unpack_bytes(flat, lengths) == items


def test_newest_ones_are_kept(store):
    for update in (10, 20, 30, 40, 50):
        save(store, update)
    assert store.updates() == [30, 40, 50]
    assert_checkpoint(store.load(fail_on_skip), 50)
    assert_checkpoint(store.load(fail_on_skip, update=30), 30)
    with pytest.raises(UserError, match=r"no checkpoint of update 10; there: 30, 40, 50\."):
        store.load(fail_on_skip, update=10)


def test_saving_an_update_again_replaces_it(store, directory):
    save(store, 10)
    store.save(10, learner={"x": np.ones(3)}, worker_part={}, env_steps=10)
    assert store.load(fail_on_skip).learner["x"].sum() == 3
    assert folder_names(directory) == ["update-00000010"]


def test_going_back_abandons_what_came_later(store):
    for update in (10, 20, 30):
        save(store, update)
    save(store, 25)
    assert store.updates() == [10, 20, 25]


def damage_truncate(folder):
    path = folder / "learner.npz"
    os.truncate(path, path.stat().st_size - 100)


def damage_flip_bit(folder):
    path = folder / "worker-00000-of-00001.npz"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_missing_part(folder):
    (folder / "worker-00000-of-00001.npz").unlink()


def damage_missing_manifest(folder):
    (folder / "manifest.json").unlink()


def damage_manifest_digit(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"env_steps": 20000', '"env_steps": 20001'))


def damage_manifest_syntax(folder):
    (folder / "manifest.json").write_text("[]")


def damage_moved(folder):
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("update-00000010"), folder)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_truncate, "learner.npz has .* bytes instead of"),
        (damage_flip_bit, "worker-00000-of-00001.npz does not match its checksum"),
        (damage_missing_part, "worker-00000-of-00001.npz is missing"),
        (damage_missing_manifest, "manifest.json is missing"),
        (damage_manifest_digit, "manifest.json is damaged"),
        (damage_manifest_syntax, "manifest.json is damaged"),
        (damage_moved, "its manifest is of update 10"),
    ],
)
def test_damaged_checkpoint_is_skipped(store, directory, damage, reason):
    save(store, 10)
    save(store, 20)
    damage(directory / "update-00000020")
    sentences = []
    assert_checkpoint(store.load(sentences.append), 10)
    assert len(sentences) == 1
    assert sentences[0].endswith(".") and "update-00000020 is skipped: " in sentences[0]
    assert re.search(reason, sentences[0])
    with pytest.raises(UserError, match="has no valid checkpoint of update 20;"):
        store.load(sentences.append, update=20)

    save(store, 20)
    assert_checkpoint(store.load(fail_on_skip), 20)


def test_all_damaged_is_an_error(store, directory):
    save(store, 10)
    damage_truncate(directory / "update-00000010")
    with pytest.raises(UserError, match="has no valid checkpoint;"):
        store.load(lambda _: None)


def test_arrays_that_cannot_be_stored_exactly_are_refused(store, directory):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for bad in (np.array([object()]), np.zeros(2, ml_dtypes.bfloat16)):
        with pytest.raises(CheckpointError, match="the array x has the type"):
            store.save(1, learner={"x": bad}, worker_part={}, env_steps=1)
    assert folder_names(directory) == []


KILLED_AT_EVERY_STEP = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import numpy as np
from tfrl.checkpoint import CheckpointStore

def save(update, value):
    arrays = {"x": np.full(1000, value)}, {"y": np.array([value])}
    store.save(update, learner=arrays[0], worker_part=arrays[1], env_steps=value)

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
from test_checkpoint import CheckpointStore, save
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


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a full disk needs a small tmpfs, which only root can mount")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_full_disk_keeps_the_last_checkpoint(small_disk):
    directory = small_disk / "checkpoints"
    store = CheckpointStore(directory, keep=3)
    save(store, 10)
    used = shutil.disk_usage(small_disk).used
    big = {"x": np.random.default_rng(0).integers(0, 256, 3_000_000, np.uint8)}
    for learner, part in ((big, {}), ({}, big)):
        with pytest.raises(CheckpointError) as error:
            store.save(20, learner=learner, worker_part=part, env_steps=20)
        assert "is full (" in str(error.value) and "about 3.0 MB needed)" in str(error.value)
        assert folder_names(directory) == ["update-00000010"]
        assert shutil.disk_usage(small_disk).used == used
    assert_checkpoint(store.load(fail_on_skip), 10)
    save(store, 30)
    assert store.updates() == [10, 30]


def test_read_only_disk(small_disk):
    directory = small_disk / "checkpoints"
    store = CheckpointStore(directory, keep=3)
    save(store, 10)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
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


def run_workers(directory, update, break_worker=None, num_workers=2):
    """Every worker saves in its own thread; returns the error of each."""
    barrier, votes, errors = threading.Barrier(num_workers, timeout=20), [True] * num_workers, {}

    def work(worker):
        def agree(ok):
            votes[worker] = ok
            barrier.wait()
            together = all(votes)
            barrier.wait()
            return together

        store = CheckpointStore(directory, keep=2, worker=worker, num_workers=num_workers, agree=agree)
        part = part_arrays(update, worker) if worker != break_worker else {"x": np.array([object()])}
        try:
            store.save(
                update,
                learner=learner_arrays(update) if worker == 0 else {},
                worker_part=part,
                env_steps=1000 * update,
            )
            errors[worker] = None
        except CheckpointError as error:
            errors[worker] = str(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [errors[worker] for worker in range(num_workers)]


def test_two_workers_save_one_checkpoint(directory):
    assert run_workers(directory, 10) == [None, None]
    reader = CheckpointStore(directory, keep=2)
    assert_checkpoint(reader.load(fail_on_skip), 10, num_workers=2)
    (directory / "update-00000010" / "worker-00001-of-00002.npz").unlink()
    with pytest.raises(UserError):
        reader.load(lambda _: None)


@pytest.mark.parametrize("broken", [0, 1])
def test_one_failing_worker_fails_all(directory, broken):
    assert run_workers(directory, 10) == [None, None]
    errors = run_workers(directory, 20, break_worker=broken)
    assert "the array x has the type object" in errors[broken]
    assert "another worker could not do its share" in errors[1 - broken]
    assert folder_names(directory) == ["update-00000010"]
    assert run_workers(directory, 20) == [None, None]
    assert_checkpoint(CheckpointStore(directory, keep=2).load(fail_on_skip), 20, num_workers=2)


def test_workers_that_do_not_share_a_disk(tmp_path):
    lonely = CheckpointStore(tmp_path / "elsewhere", keep=1, worker=1, num_workers=2)
    with pytest.raises(CheckpointError, match="worker 1 does not see .* all workers must share one disk"):
        save(lonely, 10, worker=1)
    assert not (tmp_path / "elsewhere").exists()


def test_manifest_is_readable(store, directory):
    save(store, 10)
    manifest = json.loads((directory / "update-00000010" / "manifest.json").read_text())
    assert manifest["topology"] == {"num_workers": 1} and manifest["env_steps"] == 10_000
