"""Shards: written once, kept while a checkpoint needs them, checked, safe from kills and full disks."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from tfrl.cli.errors import UserError
from tfrl.run.checkpoint import CheckpointError, CheckpointShard, CheckpointStore, State


def shard(number, size=10):
    return CheckpointShard({"number": number}, {"x": np.full(size, number, np.int64)})


def save(store, update, shards):
    part = {"y": np.array(update)}
    store.save(update, State({}, [part], shards), env_steps=update)


def numbers(found):
    for each in found.shards:
        np.testing.assert_array_equal(each.load()["x"], each.about["number"])
    return [each.about["number"] for each in found.shards]


def files_of(directory):
    return sorted(path.name for path in (directory / "shards").iterdir())


def test_a_shard_is_written_once_and_kept_while_a_checkpoint_needs_it(store, directory):
    shards = []
    for update in range(1, 8):
        shards = [*shards[-1:], shard(update)]  # the last one and a new one
        before = {p: p.stat().st_mtime_ns for p in (directory / "shards").glob("*")}
        save(store, update, shards)
        assert all(p.is_saved and p.arrays is None for p in shards)
        kept = {p: p.stat().st_mtime_ns for p in (directory / "shards").glob("*")}
        assert all(kept[p] == before[p] for p in kept.keys() & before.keys())
    # Three checkpoints are kept: of 5, 6 and 7, and 4 is needed by the one of 5.
    assert len(files_of(directory)) == 4
    for update in (5, 6, 7):
        assert numbers(store.load(pytest.fail, update, verify_shards=True)) == [update - 1, update]
    assert store.load(pytest.fail).shards == []  # who only wants weights reads none


def test_a_run_resumed_from_an_older_checkpoint_keeps_only_needed_shards(store, directory):
    for update in (1, 2, 3):
        save(store, update, [shard(update)])
    shards = store.load(pytest.fail, 1, verify_shards=True).shards
    save(store, 2, [*shards, shard(20)])
    assert numbers(store.load(pytest.fail, verify_shards=True)) == [1, 20]
    assert len(files_of(directory)) == 2
    assert store.updates() == [1, 2]


def test_shards_stay_while_a_manifest_cannot_be_read(store, directory):
    """A file server may be away for a moment."""
    save(store, 1, [shard(1)])
    manifest = next(directory.glob("update-*1/manifest.json"))
    kept = manifest.rename(manifest.with_suffix(".kept"))
    manifest.symlink_to(manifest)  # which the system refuses to read
    save(store, 2, [shard(2)])
    assert len(files_of(directory)) == 2
    kept.replace(manifest)
    assert numbers(store.load(pytest.fail, 1, verify_shards=True)) == [1]
    manifest.unlink()  # is damage
    save(store, 3, [shard(3)])
    assert len(files_of(directory)) == 2


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_checkpoint_with_a_damaged_shard_is_skipped(store, directory, damage):
    save(store, 1, [shard(1)])
    (first,) = files_of(directory)
    save(store, 2, [shard(2)])
    (second,) = set(files_of(directory)) - {first}
    path = directory / "shards" / second
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:-1])
    else:
        path.unlink()
    said = []
    found = store.load(said.append, verify_shards=True)
    assert found.update == 1 and numbers(found) == [1]
    assert len(said) == 1 and second[:8] in said[0]
    assert store.load(pytest.fail).update == 2  # its weights are whole
    shutil.rmtree(directory / "update-00000001")
    with pytest.raises(UserError, match="no valid checkpoint"):
        store.load(said.append, verify_shards=True)


def test_a_full_disk_leaves_shards_to_be_written_again(small_disk):
    directory = small_disk("1m") / "checkpoints"
    store = CheckpointStore(directory, keep=3)
    save(store, 1, [shard(1, 1000)])
    blocker = directory.parent / "blocker"
    blocker.write_bytes(bytes(700_000))
    large = shard(2, 60_000)
    with pytest.raises(CheckpointError, match="full"):
        save(store, 2, [large])
    assert not large.is_saved and large.arrays is not None
    assert len(files_of(directory)) == 1 and numbers(store.load(pytest.fail, verify_shards=True)) == [1]
    blocker.unlink()
    save(store, 2, [large])
    assert numbers(store.load(pytest.fail, verify_shards=True)) == [2]


def test_killed_anywhere_every_checkpoint_has_its_shards(tmp_path):
    """SIGKILL comes before each call that creates, moves or deletes a file."""
    script = textwrap.dedent(
        """
        import os, signal, sys
        from pathlib import Path
        import numpy as np
        from tfrl.run.checkpoint import CheckpointShard, CheckpointStore, State

        left = int(sys.argv[2])
        def dying(call):
            def wrapped(*args, **kwargs):
                global left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **kwargs)
            return wrapped
        os.rename, os.replace, os.unlink, os.fsync = map(dying, (os.rename, os.replace, os.unlink, os.fsync))
        store = CheckpointStore(Path(sys.argv[1]), keep=2)
        found = store.load(print, verify_shards=True)
        shards = [] if found is None else found.shards
        for update in range(1 if found is None else found.update + 1, 5):
            new = CheckpointShard({"number": update}, {"x": np.full(10, update)})
            shards = [*shards[-1:], new]
            store.save(update, State({}, [{}], shards), env_steps=update)
        """
    )
    directory, killed = tmp_path / "checkpoints", 0
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    for at in [*range(1, 60, 4), 0]:
        command = [sys.executable, "-c", script, str(directory), str(at)]
        code = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert code.returncode in (0, -signal.SIGKILL), code.stderr
        killed += code.returncode != 0
        store = CheckpointStore(directory, keep=2)
        for update in store.updates():
            found = store.load(pytest.fail, update, verify_shards=True)
            assert numbers(found) == [n for n in (update - 1, update) if n > 0]
        if code.returncode == 0:
            assert store.updates() == [3, 4] and len(files_of(directory)) == 3
            shutil.rmtree(directory)
    assert killed >= 8
