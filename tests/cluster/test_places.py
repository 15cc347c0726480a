"""Where workers run: the shares of one machine, and the names of others."""

import contextlib
import os
from types import SimpleNamespace

import pytest

from cluster import launch
from tfrl.cli.errors import UserError
from tfrl.training.command import _Here
from tfrl.workers import tf_config


def test_a_users_own_thread_counts_are_kept():
    chosen = launch.local_places(2, None, {"OMP_NUM_THREADS": "7"})
    assert [place.environment["OMP_NUM_THREADS"] for place in chosen] == ["7", "7"]


@pytest.mark.parametrize(
    ("cores", "workers", "shares"),
    [(2, 2, [1, 1]), (8, 3, [3, 3, 2]), (1, 2, [1, 1]), (7, 1, [7]), (5, 4, [2, 1, 1, 1])],
)
def test_cores_are_shared_out_among_workers(cores, workers, shares):
    assert launch.thread_shares(cores, workers) == shares


def test_a_driver_that_hangs_is_not_waited_for(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setattr(launch, "GPUS_WITHIN", 0.2)
    with pytest.raises(UserError, match="`nvidia-smi -L` has not answered for 0.2 s: a GPU or its driver"):
        launch.visible_gpus({"PATH": f"{tmp_path}:{os.environ['PATH']}"})


def test_gpus_are_shared_out(tmp_path, capsys):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\nfor i in 0 1 2 3; do echo \"GPU $i: H (UUID: GPU-$i)\"; done\necho '  MIG 1g'\n"
    )
    tool.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert launch.visible_gpus(environ) == ["0", "1", "2", "3"]
    assert launch.visible_gpus({**environ, "CUDA_VISIBLE_DEVICES": "3,1"}) == ["3", "1"]
    assert launch.visible_gpus({**environ, "CUDA_VISIBLE_DEVICES": "-1"}) == []
    assert launch.visible_gpus({"PATH": "/nowhere"}) == []
    mine = [place.environment["CUDA_VISIBLE_DEVICES"] for place in launch.local_places(4, None, environ)]
    assert mine == ["0", "1", "2", "3"]
    assert launch.gpu_shares(["0", "1", "2", "3"], 2) == ["0,1", "2,3"]
    assert launch.gpu_shares([], 2) == []
    assert capsys.readouterr().err == ""
    assert launch.gpu_shares(["5", "1", "2", "3"], 3) == ["5", "1", "2"], "workers must have equally many"
    assert capsys.readouterr().err == "launch: 3 workers get 1 GPU(s) each; not used: 3\n"
    with pytest.raises(UserError, match="3 workers are more than the GPUs"):
        launch.gpu_shares(["0", "1"], 3)


def test_learners_on_the_cpu_need_no_gpus(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: H (UUID: GPU-0)'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for device in ("cpu", "auto"):
        config = SimpleNamespace(learners=2, actors=0, device=device)
        refused = pytest.raises(UserError, match="2 workers are more than the GPUs here")
        with contextlib.nullcontext() if device == "cpu" else refused:
            assert len(_Here(config).find(lambda: False, print)) == 2


@pytest.mark.parametrize(
    ("host", "target", "address"),
    [
        ("a", "a", "a:2222"),
        ("me@a", "me@a", "a:2222"),
        ("a:7", "a", "a:7"),
        ("me@[::1]:7", "me@::1", "[::1]:7"),
        ("[::1]", "::1", "[::1]:2222"),
    ],
)
def test_hosts_are_read_with_users_and_ports(host, target, address):
    (place,) = launch.remote_places([host], 2222)
    assert (place.host, tf_config.read(place.environment).workers) == (target, (address,))
