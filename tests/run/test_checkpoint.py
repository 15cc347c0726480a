"""Checkpoints: what goes in comes back bit for bit, damage is found, and all workers save one."""

import json
import os
import re
import shutil
import threading

import numpy as np
import pytest
from checkpoints import (
    assert_checkpoint,
    fail_on_skip,
    folder_names,
    learner_arrays,
    part_arrays,
    save,
)

from tfrl.cli.errors import UserError
from tfrl.run import checkpoint
from tfrl.run.checkpoint import (
    CheckpointError,
    CheckpointStore,
    State,
    pack_bytes,
    pack_json,
    unpack_bytes,
    unpack_json,
)


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


def test_arrays_are_packed_and_unpacked_exactly():
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
    with pytest.raises(UserError, match=r"no checkpoint of update 10; its checkpoints: 30, 40, 50\."):
        store.load(fail_on_skip, update=10)


def test_saving_an_update_again_replaces_it(store, directory):
    save(store, 10)
    store.save(10, State({"x": np.ones(3)}, [{}]), env_steps=10)
    assert store.load(fail_on_skip).learner["x"].sum() == 3
    assert folder_names(directory) == ["update-00000010"]


def test_a_save_after_going_back_removes_later_checkpoints(store):
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
        (damage_moved, "its manifest belongs to update 10"),
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


def test_a_checkpoint_of_another_format_is_skipped(store, monkeypatch):
    save(store, 10)
    with monkeypatch.context() as later:
        later.setattr(checkpoint, "FORMAT", checkpoint.FORMAT + 1)
        save(store, 20)
    sentences = []
    assert_checkpoint(store.load(sentences.append), 10)
    assert len(sentences) == 1
    mine = checkpoint.FORMAT
    assert f"it has format {mine + 1}, and this version of tfrl reads format {mine}" in sentences[0]


def test_all_damaged_is_an_error(store, directory):
    save(store, 10)
    damage_truncate(directory / "update-00000010")
    with pytest.raises(UserError, match="has no valid checkpoint;"):
        store.load(lambda _: None)


def test_arrays_that_cannot_be_stored_exactly_are_refused(store, directory):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for bad in (np.array([object()]), np.zeros(2, ml_dtypes.bfloat16)):
        with pytest.raises(CheckpointError, match="the array x has the type"):
            store.save(1, State({"x": bad}, [{}]), env_steps=1)
    assert folder_names(directory) == []


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
            state = State(learner_arrays(update) if worker == 0 else {}, [part])
            store.save(update, state, env_steps=1000 * update)
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
    assert "another worker could not save its part" in errors[1 - broken]
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
