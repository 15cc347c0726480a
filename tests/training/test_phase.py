"""The files of a phase: rows of several workers' files, memory, what is removed and what is damaged."""

import os
import shutil

import numpy as np
import pytest
from refusals import refusal

from tfrl.training.phasic import PhaseFiles

WORKERS = (range(0, 4), range(4, 6))


@pytest.fixture
def array():
    """Of three updates, uint8 [updates, B, T, ...]."""
    return np.random.default_rng(0).integers(0, 256, (3, 6, 5, 2)).astype(np.uint8)


@pytest.fixture
def folder(tmp_path, array):
    """The files that two workers wrote of it, from update 7 on."""
    for envs in WORKERS:
        part = PhaseFiles(tmp_path / "phase", envs)
        for update in range(3):
            part.add("observations", 7 + update, array[update, envs.start : envs.stop])
    return tmp_path / "phase"


@pytest.mark.parametrize("envs", [range(6), range(3, 5), range(4, 6)])
def test_files_of_two_workers_are_read_by_any(folder, array, envs):
    files = PhaseFiles(folder, envs)
    steps = np.random.default_rng(1).integers(0, 15, (len(envs), 9))
    expected = np.stack([array[:, i].reshape(15, 2)[steps[k]] for k, i in enumerate(envs)])
    np.testing.assert_array_equal(files.take("observations", range(7, 10), steps), expected)
    np.testing.assert_array_equal(files.stretch("observations", 8, 1, 4), array[1, envs, 1:4])


def test_unused_rollouts_are_not_read_into_memory(folder):
    """Also if the rows are in files of several workers."""
    opened = PhaseFiles(folder, range(6)).get("observations", 7)
    assert [len(part) for part in opened] == [4, 2]
    assert all(isinstance(part, np.memmap) for part in opened)


def test_unneeded_files_are_deleted_and_foreign_files_stay(folder):
    (folder / "notes-of-mine.npy").touch()
    shutil.copy(next(folder.glob("*-00000008-*")), folder / "targets-00000008-envs-0000000-0000004.npy")
    for update in (8, 9):
        (folder / f".observations-{update:08d}-envs-0000000-0000004.npy.tmp.npy").touch()
    PhaseFiles(folder, range(6)).keep(lambda kind, update: kind == "observations" and update == 8)
    names = sorted(path.name.split("-envs")[0] for path in folder.iterdir())
    assert names == sorted((".observations-00000008", *["observations-00000008"] * 2, "notes-of-mine.npy"))


@pytest.mark.parametrize("size", [0, 50, 150, 4 * 5 * 2 + 127])
def test_a_damaged_file_gives_a_one_sentence_error(folder, size):
    path = folder / "observations-00000008-envs-0000000-0000004.npy"
    assert path.stat().st_size > size
    os.truncate(path, size)
    words = refusal(PhaseFiles(folder, range(6)).get, "observations", 8)
    assert f"{path} is damaged" in words
    path.write_bytes(b"no array" * 30)
    assert "is damaged" in refusal(PhaseFiles(folder, range(6)).get, "observations", 8)


@pytest.mark.parametrize("place", [20, 128, 140, -5, -1])
def test_a_flipped_bit_is_detected(folder, place):
    """The bit is in the header, in the array, or in the checksum."""
    path = folder / "observations-00000008-envs-0000000-0000004.npy"
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)
    assert f"{path} is damaged" in refusal(PhaseFiles(folder, range(6)).get, "observations", 8)
