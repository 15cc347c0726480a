"""What a trainer writes last vouches for what it wrote before, also after a power failure."""

import re
import shutil
import subprocess
import sys

import pytest
from processes import PATIENCE, ROOT

from tfrl.run import files

CATCH = "--env catch --torso cookbook --precision float32 --num-levels 0 --num-envs 8 --num-steps 16"
CATCH += " --num-minibatches 1 --epochs 1 --total-steps 128 --eval-episodes 2 --run-name run --logdir"
SUPERVISED = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
from test_resnet_train import run
run(Path(sys.argv[1]), "run", epochs=1)
"""
PROGRAMS = {
    "tfrl.ppo_procgen": ["-m", "tfrl.ppo_procgen", *CATCH.split()],
    "resnet.train": ["-c", SUPERVISED.format(paths=[str(ROOT / p) for p in ("", "tests", "tests/resnet")])],
}
CALLS = "write,writev,pwrite64,fsync,fdatasync,rename,renameat,renameat2"


def system_calls(folder, command, log):
    """What a process did to files below a folder: ("sync", path), ("write", path) or ("rename", old, new)."""
    if shutil.which("strace") is None:
        pytest.skip("no strace to see the order of system calls with")
    trace = ["strace", "-f", "--seccomp-bpf", "-y", "-s", "0", "-e", f"trace={CALLS}", "-o", str(log)]
    subprocess.run([*trace, *command], cwd=ROOT, capture_output=True, timeout=PATIENCE, check=True)
    done = []
    for line in log.read_text(errors="replace").splitlines():
        if str(folder) not in line or " = -1 " in line:
            continue
        _, call, rest = re.match(r"(\d+) +(\w+)\((.*)", line).groups()
        if "rename" in call:
            done.append(("rename", *re.findall(r'"([^"]+)"', rest)))
        else:
            kind = "sync" if "sync" in call else "write"
            done.append((kind, re.match(r"\d+<([^>]*)>", rest)[1]))
    return done


@pytest.mark.promise
@pytest.mark.long
@pytest.mark.parametrize("program", ["tfrl.ppo_procgen", "resnet.train"])
def test_the_export_is_on_the_disk_before_the_results_that_vouch_for_it(program, tmp_path):
    """All files and their folders are synced."""
    run = tmp_path / "logs" / "run"
    command = [sys.executable, *PROGRAMS[program], str(run.parent)]
    done = system_calls(run.parent, command, tmp_path / "log")
    renamed = {what[2]: (moment, what[1]) for moment, what in enumerate(done) if what[0] == "rename"}

    def last(kind, name, end):
        return max((moment for moment in range(end) if done[moment] == (kind, name)), default=-1)

    vouched, staged = renamed[str(run / "results.json")]
    assert last("write", staged, vouched) < last("sync", staged, vouched)
    assert ("sync", str(run)) in done[vouched:]
    for folder in (run, run.parent):  # they were made for this run
        assert last("sync", str(folder), vouched) >= 0
    export = run / "export"
    assert {"weights.npz"} < {path.name for path in export.iterdir()}
    for entry in export.iterdir():
        put, staged = renamed[str(entry)]
        assert last("sync", str(export), vouched) > put
        for path in (entry, *entry.rglob("*")):
            name = staged + str(path).removeprefix(str(entry))
            inside = [last("sync", f"{name}/{inner.name}", put) for inner in path.glob("*")]
            assert max(-1, last("write", name, put), *inside) < last("sync", name, put), name


def test_a_folder_takes_the_place_of_another_whole_or_not_at_all(tmp_path):
    path = tmp_path / "policy"
    for content in ("old", "new"):
        with files.replacing(path) as staged:
            staged.mkdir()
            (staged / content).touch()
        assert [file.name for file in path.iterdir()] == [content]
    with pytest.raises(KeyboardInterrupt), files.replacing(path) as staged:
        staged.mkdir()
        raise KeyboardInterrupt
    assert [path, path / "new"] == list(tmp_path.rglob("*"))


def test_leftovers_of_a_killed_process_are_not_used(tmp_path):
    for name in (".policy.tmp", ".policy.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "litter").touch()
    with files.replacing(tmp_path / "policy") as staged:
        staged.mkdir()
    assert [path.name for path in tmp_path.rglob("*")] == ["policy"]
