"""Which precision `auto` means where, and that a run keeps the one that it began with."""

import json

import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from processes import results, train

from resnet.train import main
from tfrl.cli.settings import SETTINGS_FILE
from tfrl.workers import machine
from tfrl.workers.strategy import resolve_precision

CATCH = "--env catch --torso linear --num-levels 0 --num-envs 8 --num-steps 16 --eval-episodes 8"
MINI = "--dataset cifar10 --model cookbook --batch-size 16 --max-steps 2"


def cpuinfo(folder, *features, name="flags", maker="GenuineIntel"):
    """A system whose two cores have these features."""
    (folder / "proc").mkdir()
    core = f"processor\t: 0\nvendor_id\t: {maker}\nmodel name\t: with amx_bf16 in its name\n"
    core += f"{name}\t\t: fpu {' '.join(features)}\n"
    (folder / "proc" / "cpuinfo").write_text(f"{core}bugs\t\t: none\n\n{core}\n")
    return folder


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        (("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile"), "bfloat16"),
        (("avx2", "avx512f", "avx512_bf16"), "float32"),  # docs/notebook/bfloat16.md: slower there
        (("avx2", "amx_tile", "amx_int8"), "float32"),
        (("avx2",), "float32"),
    ],
)
def test_on_a_cpu_with_amx_auto_means_bfloat16(tmp_path, features, expected):
    assert resolve_precision("auto", cpuinfo(tmp_path, *features)) == expected
    for fixed in ("float32", "bfloat16"):
        assert resolve_precision(fixed, tmp_path) == fixed


@pytest.mark.parametrize(("feature", "expected"), [("avx512_bf16", "bfloat16"), ("avx512f", "float32")])
def test_on_amds_cpus_avx512_bf16_means_bfloat16(tmp_path, feature, expected):
    assert resolve_precision("auto", cpuinfo(tmp_path, "avx2", feature, maker="AuthenticAMD")) == expected


def test_a_cpu_that_emulates_bfloat16_is_told_of(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(machine, "_warn", machine.tell)  # not only once in a process
    plain = cpuinfo(tmp_path, "avx2", "avx512f")
    machine.note_emulated("float32", plain)
    assert not capsys.readouterr().err
    machine.note_emulated("bfloat16", plain)
    assert "this CPU has no bfloat16" in capsys.readouterr().err
    for number, feature in enumerate(("avx512_bf16", "amx_bf16")):
        (tmp_path / str(number)).mkdir()
        machine.note_emulated("bfloat16", cpuinfo(tmp_path / str(number), feature))
    (tmp_path / "arm").mkdir()
    machine.note_emulated("bfloat16", cpuinfo(tmp_path / "arm", "bf16", name="Features"))
    assert not capsys.readouterr().err


def test_a_cpu_of_another_kind_has_no_such_features(tmp_path):
    system = cpuinfo(tmp_path, "bf16", name="Features")  # ARM's word
    assert machine.cpuinfo("flags", system) == ""
    assert resolve_precision("auto", system) == "float32"


def test_the_features_are_those_of_this_cpu():
    told = [line for line in open("/proc/cpuinfo") if line.startswith("flags")]  # noqa: SIM115, PTH123
    assert machine.cpuinfo("flags").split() == (told[0].split()[2:] if told else [])


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((9, 0), "bfloat16"), ((8, 0), "bfloat16"), ((7, 5), "float32"), (None, "float32")],
)
def test_on_a_gpu_its_compute_capability_decides(tmp_path, monkeypatch, capability, expected):
    """A fake GPU stands beside a CPU for which auto would choose otherwise."""
    details = {} if capability is None else {"compute_capability": capability}
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda _: ["gpu"])
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda _: details)
    other = ("avx2",) if expected == "bfloat16" else ("amx_bf16",)
    assert resolve_precision("auto", cpuinfo(tmp_path, *other)) == expected


def of_auto():
    """What `auto` means here, and the other one."""
    meant = resolve_precision("auto")
    return meant, "bfloat16" if meant == "float32" else "float32"


@pytest.mark.promise
@pytest.mark.long
def test_a_run_resumes_in_its_own_precision_not_in_that_of_auto(tmp_path):
    """The run began on a machine where auto meant the other precision, or with a flag."""
    folder, (meant, other) = tmp_path / "run", of_auto()
    assert train(folder, *CATCH.split(), "--total-steps", 128, "--precision", other)[0] == 0
    code, stdout, stderr = train(folder, *CATCH.split(), "--total-steps", 256)
    assert code == 0, stderr
    assert f", {other}" in stdout and "continues at" in stdout
    assert results(folder)["precision"] == other and results(folder)["env_steps"] == 256
    assert f"precision: {other}" in (folder / SETTINGS_FILE).read_text()
    code, stdout, stderr = train(folder, *CATCH.split(), "--total-steps", 384, "--precision", meant)
    assert code == 2 and f"--precision {other} there, {meant} here" in stderr


@pytest.mark.promise
@pytest.mark.long
def test_a_supervised_run_resumes_in_its_own_precision(tmp_path):
    flags, (_, other) = [*MINI.split(), "--logdir", str(tmp_path), "--run-name", "run"], of_auto()
    with tfds.testing.mock_data(num_examples=64):
        assert main([*flags, "--precision", other]) == 0
        results_file = tmp_path / "run" / "results.json"
        results_file.unlink()  # which the same command then writes again
        assert main(flags) == 0
    found = json.loads(results_file.read_text())
    assert (found["precision"], found["resumed_at"]) == (other, [32])
