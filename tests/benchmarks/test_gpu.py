"""The check of a GPU machine, on the CPU: every part runs, and what it computes is right."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from processes import PATIENCE, ROOT

from benchmarks import device_measures
from benchmarks.gpu import Options, _Checks


def _measure(*flags, seconds=PATIENCE):
    words = [sys.executable, "-m", "benchmarks.gpu", *flags]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    return subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=seconds)


@pytest.mark.long
def test_a_machine_without_a_gpu_is_refused():
    answer = _measure()
    assert answer.returncode == 2
    assert answer.stderr.splitlines()[-1].startswith("error: TensorFlow sees no GPU here")


@pytest.mark.long
def test_all_checks_run_on_the_cpu(tmp_path):
    file = tmp_path / "found.json"
    flags = ["--device", "cpu", "--updates", "2", "--num-envs", "8", "--num-steps", "32", "--seconds", "0.1"]
    answer = _measure(*flags, "--out", str(file), seconds=1500)
    assert answer.returncode == 0, answer.stderr
    assert "PPO bfloat16 (" in answer.stdout  # as soon as it was there
    found = json.loads(file.read_text())
    assert [name for name, result in found.items() if "failed" in result] == []
    assert found["device"]["gpus"] == 0
    # A CPU adds in one order, so all these runs are the same one.
    assert set(found["differences"].values()) == {0.0}
    assert found["small"]["first_ratio_error"] == 0.0
    assert found["gradients"]["cosine"] > 0.998
    assert found["network bfloat16"]["keras"] > 0
    assert found["PPO bfloat16"]["env_steps_per_second"] > 0
    assert sum(share for _, share in found["profile"]["parts"]) == pytest.approx(1.0)
    assert found["profile"]["seconds"] > 0
    assert "Conv2D" in " ".join(name for name, _ in found["profile"]["parts"][:10])


def test_a_check_that_fails_is_named_and_the_next_one_runs(tmp_path, capfd):
    found = {}
    checks = _Checks(Options(device="cpu"), found, str(tmp_path))
    assert checks.take("wrong", "difference", "nowhere.npz", "nowhere.npz") is None
    assert "nowhere.npz" in found["wrong"]["failed"]
    assert "wrong failed" in capfd.readouterr().err


def test_results_are_written_at_once_and_no_check_begins_after_the_time(tmp_path, capfd):
    file, found = tmp_path / "found.json", {}
    checks = _Checks(Options(device="cpu", minutes=-1, out=str(file)), found, str(tmp_path))
    assert checks.take("late", "device") is None
    np.savez(tmp_path / "one.npz", a=np.ones(4))
    run = {"weights": str(tmp_path / "one.npz")}
    checks.compare("two runs", run, run)
    checks.compare("a run that failed", run, None)
    assert json.loads(file.read_text()) == found
    assert found == {"late": {"failed": "no time was left"}, "differences": {"two runs": 0.0}}
    assert "two runs: 0" in capfd.readouterr().out


def test_the_difference_of_weights_is_relative(tmp_path):
    np.savez(tmp_path / "one.npz", a=np.full((2, 2), 3.0), b=np.zeros(3))
    np.savez(tmp_path / "two.npz", a=np.full((2, 2), 2.0), b=np.zeros(3))
    one, two = str(tmp_path / "one.npz"), str(tmp_path / "two.npz")
    assert device_measures.difference(one, two) == pytest.approx(0.5)
    assert device_measures.difference(one, one) == 0.0


def _trace(plane_name, events, stats=()):
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    plane = space.planes.add(name=plane_name)
    line = plane.lines.add(name="stream")
    for number, name in enumerate(stats, start=1):
        plane.stat_metadata[number].name = name
    for number, (name, begin, duration, op) in enumerate(events, start=1):
        plane.event_metadata[number].name = name
        event = line.events.add(metadata_id=number, offset_ps=begin, duration_ps=duration)
        if op:
            event.stats.add(metadata_id=1, str_value=op)
    return space.SerializeToString()


def test_shares_of_a_profile_count_each_moment_once():
    events = [
        ("a/conv:Conv2D", 0, 60, ""),
        ("b/relu:Relu", 10, 20, ""),
        ("ExecutorState::Process", 0, 100, ""),
    ]
    found = device_measures.busy_shares(_trace("/host:CPU", events))
    assert found["busy_seconds"] == pytest.approx(60e-12)
    assert found["parts"] == [["Conv2D", pytest.approx(2 / 3)], ["Relu", pytest.approx(1 / 3)]]


def test_kernels_of_a_profile_are_named_by_their_operation():
    events = [("void cutlass<1>", 0, 30, "x/conv:Conv2D"), ("some_kernel", 30, 10, "")]
    found = device_measures.busy_shares(_trace("/device:GPU:0", events, ["tf_op"]))
    assert found["parts"] == [["Conv2D", pytest.approx(0.75)], ["some_kernel", pytest.approx(0.25)]]
