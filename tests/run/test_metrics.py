import csv
import inspect
import math
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tfrl.run.metrics import EventFile, MetricsWriter, NullMetricsWriter, first_values

ROOT = Path(__file__).parents[2]
COLUMNS = ["rollout/episode_return", "train/policy_loss", "eval_test/return"]


def no_warning(sentence):
    raise AssertionError(sentence)


def make_writer(directory, resume_at=None, warn=no_warning):
    return MetricsWriter(directory, COLUMNS, resume_at=resume_at, warn=warn)


def write_updates(writer, steps):
    for step in steps:
        writer.write(step, {"rollout/episode_return": step / 10, "train/policy_loss": -step})


def read_rows(directory):
    with (directory / "progress.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def read_steps(directory):
    return [int(row["env_steps"]) for row in read_rows(directory)]


def read_events(directory):
    """The run as TensorBoard itself reads it."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"tensors": 0})
    return events.Reload()


def read_curve(events, tag):
    from tensorboard.util.tensor_util import make_ndarray

    return [(point.step, make_ndarray(point.tensor_proto).item()) for point in events.Tensors(tag)]


def event_files(directory):
    return sorted(directory.glob("events.out.tfevents.*"))


def rename_event_file(directory, name):
    """As if its process had started earlier: the name holds the second and the process."""
    (newest,) = [path for path in event_files(directory) if "tfevents.0" not in path.name]
    newest.rename(directory / f"events.out.tfevents.0{name}{newest.suffix}")


def test_a_row_and_its_curves_have_the_same_values(tmp_path):
    writer = make_writer(tmp_path)
    writer.write(16_384, {"rollout/episode_return": math.nan, "train/policy_loss": np.float32(0.1)})
    writer.write(32_768, {"train/policy_loss": 2, "eval_test/return": 3.5, "rollout/episode_return": 1e-12})
    # Nothing is closed or flushed: all of it must already be there.
    assert (tmp_path / "progress.csv").read_text() == (
        "env_steps,rollout/episode_return,train/policy_loss,eval_test/return\n"
        "16384,,0.100000001,\n"
        "32768,1e-12,2,3.5\n"
    )
    events = read_events(tmp_path)
    assert read_curve(events, "train/policy_loss") == [(16_384, pytest.approx(0.1)), (32_768, 2.0)]
    assert [step for step, _ in read_curve(events, "rollout/episode_return")] == [32_768]
    assert len(event_files(tmp_path)) == 1
    writer.close()


def test_texts_are_written_for_tensorboard(tmp_path):
    from tensorboard.util.tensor_util import make_ndarray

    writer = make_writer(tmp_path)
    writer.text("settings", "| a | b |\n|---|---|", 0)
    writer.close()
    events = read_events(tmp_path)
    assert make_ndarray(events.Tensors("settings")[0].tensor_proto).item() == b"| a | b |\n|---|---|"
    assert events.SummaryMetadata("settings").plugin_data.plugin_name == "text"


def test_the_return_over_env_steps_is_tensorboards_first_card(tmp_path):
    writer = make_writer(tmp_path)
    for step in (100, 200):
        writer.write(step, {"eval_test/return": 1.0, "rollout/episode_return": step / 100})
    writer.close()
    events = read_events(tmp_path)
    first = min(events.Tags()["tensors"])
    assert first == "Return/episode_return" and read_curve(events, first) == [(100, 1.0), (200, 2.0)]


def test_hyperparameters_are_those_of_a_trial_of_its_own(tmp_path):
    from tensorboard.plugins.hparams import plugin_data_pb2

    writer = make_writer(tmp_path)
    writer.hyperparameters({"gamma": 0.999, "critic_lr": None, "env_kwargs": {}})
    writer.close()
    content = read_events(tmp_path).SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    start = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    assert start.group_name.startswith(f"{tmp_path.name} in ")
    assert start.hparams["gamma"].number_value == 0.999
    texts = [start.hparams[name].string_value for name in ("critic_lr", "env_kwargs")]
    assert texts == ["None", "{}"]


def test_text_has_the_command_and_the_settings(tmp_path, monkeypatch):
    from tensorboard.util.tensor_util import make_ndarray

    typed = ["/usr/bin/python3.11", "-m", "tfrl.ppo_procgen", "--run-name", "the first"]
    monkeypatch.setattr(sys, "orig_argv", typed)
    writer = make_writer(tmp_path)
    writer.describe("env: coinrun")
    writer.close()
    events = read_events(tmp_path)
    command, settings = (
        make_ndarray(events.Tensors(tag)[0].tensor_proto).item().decode() for tag in ("command", "settings")
    )
    assert command == "```\npython -m tfrl.ppo_procgen --run-name 'the first'\n```"
    assert settings == "```\nenv: coinrun\n```"


def test_scalars_add_points_and_no_row(tmp_path):
    writer = make_writer(tmp_path)
    write_updates(writer, [100])
    writer.scalars(100, {"eval_test/return": 3.0, "eval_train/return": float("nan")})
    writer.close()
    assert read_steps(tmp_path) == [100]
    events = read_events(tmp_path)
    assert read_curve(events, "eval_test/return") == [(100, 3.0)]
    assert "eval_train/return" not in events.Tags()["tensors"]


def test_a_file_of_another_process_leaves_out_a_nan_as_well(tmp_path):
    EventFile(tmp_path).scalars(100, {"eval_test/return": 3.0, "eval/generalization_gap": math.nan})
    assert read_events(tmp_path).Tags()["tensors"] == ["eval_test/return"]


def test_a_resume_drops_rows_after_the_checkpoint(tmp_path):
    writer = make_writer(tmp_path)
    writer.text("settings", "here", 0)
    write_updates(writer, [100, 200, 300, 400])
    writer.close()
    rename_event_file(tmp_path, "1")

    write_updates(make_writer(tmp_path, resume_at=200), [300, 400, 500])
    rename_event_file(tmp_path, "2")
    write_updates(make_writer(tmp_path, resume_at=200), [300])
    assert read_steps(tmp_path) == [100, 200, 300]
    curve = read_curve(read_events(tmp_path), "train/policy_loss")
    assert curve == [(100, -100), (200, -200), (300, -300)]
    assert len(read_events(tmp_path).Tensors("settings")) == 1


@pytest.mark.parametrize("torn_bytes", [1, 3, 11, 30, 60])
def test_incomplete_last_rows_are_dropped(tmp_path, torn_bytes):
    writer = make_writer(tmp_path)
    write_updates(writer, [100, 200, 300])
    writer.close()
    rename_event_file(tmp_path, "1")
    (events,) = event_files(tmp_path)
    for path in (events, tmp_path / "progress.csv"):
        cut = torn_bytes if path == events else min(torn_bytes, len("300,30,-300,\n") - 1)
        path.write_bytes(path.read_bytes()[:-cut])

    write_updates(make_writer(tmp_path, resume_at=300), [400])
    assert read_steps(tmp_path) == [100, 200, 400]
    assert [step for step, _ in read_curve(read_events(tmp_path), "train/policy_loss")] == [100, 200, 400]


def test_zeros_after_a_power_failure_are_dropped(tmp_path):
    write_updates(make_writer(tmp_path), [100])
    rename_event_file(tmp_path, "1")
    for path in (*event_files(tmp_path), tmp_path / "progress.csv"):
        path.write_bytes(path.read_bytes() + bytes(64))
    write_updates(make_writer(tmp_path, resume_at=100), [200])
    assert read_steps(tmp_path) == [100, 200]
    assert [step for step, _ in read_curve(read_events(tmp_path), "train/policy_loss")] == [100, 200]


def test_a_new_start_drops_all_rows(tmp_path):
    write_updates(make_writer(tmp_path), [100, 200])
    rename_event_file(tmp_path, "1")
    other = MetricsWriter(tmp_path, ["train/entropy"], resume_at=None, warn=no_warning)
    other.write(50, {"train/entropy": 1})
    assert (tmp_path / "progress.csv").read_text() == "env_steps,train/entropy\n50,1\n"
    events = read_events(tmp_path)
    points = {tag: read_curve(events, tag) for tag in events.Tags()["tensors"]}
    assert {tag: curve for tag, curve in points.items() if curve} == {"train/entropy": [(50, 1.0)]}


@pytest.mark.parametrize("resume_at", [None, 100])
def test_files_of_other_programs_are_left_alone(tmp_path, resume_at):
    import tensorflow as tf

    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        tf.summary.scalar("loss", 1.0, step=1000)
    write_updates(make_writer(tmp_path), [100, 200])
    (other,) = [path for path in event_files(tmp_path) if path.suffix == ".v2"]
    before = other.read_bytes()
    make_writer(tmp_path, resume_at=resume_at).close()
    assert other.read_bytes() == before
    assert read_steps(tmp_path) == ([100] if resume_at else [])
    (loss,) = read_events(tmp_path).Tensors("loss")
    assert loss.step == 1000


def test_a_run_keeps_its_columns(tmp_path):
    write_updates(make_writer(tmp_path), [100])
    writer = MetricsWriter(tmp_path, ["train/new", *COLUMNS], resume_at=100, warn=no_warning)
    writer.write(200, {"train/new": 1, "train/policy_loss": 2})
    assert read_rows(tmp_path)[-1]["train/policy_loss"] == "2"
    assert (200, 1) in read_curve(read_events(tmp_path), "train/new")


KILLED = """
import sys
sys.path[:0] = sys.argv[1:3]
from pathlib import Path
from test_metrics import make_writer, write_updates
writer = make_writer(Path(sys.argv[3]))
step = 0
while True:
    step += 1
    write_updates(writer, [step])
    print(step, flush=True)
"""


def test_a_kill_loses_at_most_the_row_being_written(tmp_path):
    command = [sys.executable, "-c", KILLED, str(ROOT), str(Path(__file__).parent), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        for _ in range(200):
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        said = max([200, *map(int, child.stdout.read().split("\n")[:-1])])
    assert read_steps(tmp_path)[:said] == list(range(1, said + 1))
    curve = read_curve(read_events(tmp_path), "train/policy_loss")
    assert curve[:said] == [(step, -step) for step in range(1, said + 1)]


def test_full_disk_warns_once_and_goes_on(small_disk):
    place = small_disk("64k")
    sentences = []
    writer = make_writer(place, warn=sentences.append)
    write_updates(writer, [1, 2])
    litter = place / "litter"
    with litter.open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(1024))
    write_updates(writer, range(3, 600))
    assert len(sentences) == 1 and "cannot be written (No space left on device)" in sentences[0]
    rows_before = len(read_rows(place))
    assert rows_before < 599

    litter.unlink()
    write_updates(writer, [600, 601])
    writer.close()
    assert read_steps(place)[-2:] == [600, 601] and len(read_rows(place)) == rows_before + 2
    steps = [step for step, _ in read_curve(read_events(place), "train/policy_loss")]
    assert steps[:2] == [1, 2] and steps[-2:] == [600, 601]


def test_null_writer_takes_all_calls_and_writes_nothing(tmp_path, monkeypatch):
    """Workers other than the chief use it."""
    monkeypatch.chdir(tmp_path)
    writer = NullMetricsWriter()
    for name, method in inspect.getmembers(MetricsWriter, inspect.isfunction):
        if not name.startswith("_"):
            inspect.signature(getattr(writer, name)).bind(*list(inspect.signature(method).parameters)[1:])
    writer.write(1, {"a": 1.0})
    writer.close()
    assert not list(tmp_path.iterdir()) and not writer.has_gap


def test_importing_is_cheap():
    script = (
        "import sys, tfrl.run.metrics; sys.exit(not {'tensorflow', 'tensorboard'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0


def test_the_first_number_of_a_column_is_found(tmp_path):
    path = tmp_path / "progress.csv"
    assert first_values(path, ["a"]) == {}
    path.write_text("env_steps,a,b,c\n0,,2.5,\n100,1.5,3,\n200,2,4,\n300,1.")
    assert first_values(path, ["a", "b", "c", "d"]) == {"a": 1.5, "b": 2.5}
