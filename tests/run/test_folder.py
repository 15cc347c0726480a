"""Whether a run may be written where it is told to: nothing of an old one is ever lost."""

import dataclasses
import resource

import numpy as np
import pytest
from refusals import refusal

from tfrl.algorithms.ppo import Config
from tfrl.algorithms.registry import reader
from tfrl.cli.settings import to_yaml
from tfrl.run import folder
from tfrl.run.checkpoint import CheckpointStore, State
from tfrl.run.files import write
from tfrl.run.folder import check_run_folder

from_yaml = reader("ppo_procgen").from_yaml
parse = reader("ppo_procgen").parse


def check_run(config):
    return folder.check_run(config, from_yaml)


def run_of(folder, *argv: str, checkpoint: bool = True) -> Config:
    """Settings of a run that stands in `folder` as the trainer would leave it."""
    config = parse(["--logdir", str(folder), *argv])
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "config.yaml").write_text(to_yaml(config))
    if checkpoint:
        arrays = {"step": np.array(10)}
        store = CheckpointStore(config.run_dir / "checkpoints", keep=1)
        store.save(10, State(arrays, [arrays]), env_steps=10 * config.steps_per_update)
    return config


def test_a_new_run_leaves_no_trace_before_it_starts(tmp_path):
    check_run(parse(["--logdir", str(tmp_path / "a" / "b")]))
    check_run(parse(["--logdir", str(tmp_path), "--resume", "never"]))
    assert not list(tmp_path.iterdir())


def test_the_same_command_goes_on_with_its_run(tmp_path):
    config = run_of(tmp_path)
    check_run(config)
    check_run(dataclasses.replace(config, resume="must"))
    free = {"total_steps": 50_000_000, "replicas": 2, "micro_batch": 512, "keep_checkpoints": 9}
    check_run(dataclasses.replace(config, **free))


def test_a_run_of_an_earlier_version_is_refused(tmp_path):
    config = run_of(tmp_path)
    file = config.run_dir / "config.yaml"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if not line.startswith("# Written by tfrl ")))
    assert refusal(check_run, config) == (
        f"{config.run_dir} holds a run of tfrl 0.1.0, and only tfrl 0.1.0 can resume it; choose "
        "another --run-name."
    )


def test_a_run_that_is_annealed_over_its_length_keeps_it(tmp_path):
    config = run_of(tmp_path, "--anneal-lr")
    longer = dataclasses.replace(config, total_steps=50_000_000)
    sentence = refusal(check_run, longer)
    assert "--total-steps 25000000 there, 50000000 here (its schedules follow it). Give" in sentence
    check_run(dataclasses.replace(config, replicas=2))


def test_other_settings_do_not_touch_a_run(tmp_path):
    config = run_of(tmp_path)
    other = dataclasses.replace(config, lr=1e-3, share_torso=False)
    sentence = refusal(check_run, other)
    assert "--lr 0.0005 there, 0.001 here; --share-torso True there, False here." in sentence
    assert "--run-name" in sentence and "gamma" not in sentence


def test_a_run_from_before_a_setting_existed_has_its_default(tmp_path):
    config = run_of(tmp_path)
    settings = config.run_dir / "config.yaml"
    older = settings.read_text().replace("torso_width: 1\n", "")
    assert "torso_width" not in older
    settings.write_text(older)
    check_run(config)
    wider = dataclasses.replace(config, torso_width=2)
    assert "--torso-width 1 there, 2 here" in refusal(check_run, wider)


@pytest.mark.parametrize(("there", "here"), [("auto", "bfloat16"), ("bfloat16", "auto")])
def test_auto_precision_keeps_the_precision_of_the_run(tmp_path, there, here):
    config = run_of(tmp_path, "--precision", there)
    found = check_run(dataclasses.replace(config, precision=here, total_steps=50_000_000))
    assert found == dataclasses.replace(config, precision="bfloat16", total_steps=50_000_000)


def test_another_fixed_precision_is_refused(tmp_path):
    config = run_of(tmp_path, "--precision", "float32")
    assert "--precision" in refusal(check_run, dataclasses.replace(config, precision="bfloat16"))


def test_resume_never_refuses_an_existing_run(tmp_path):
    config = run_of(tmp_path, checkpoint=False)
    assert "already holds a run" in refusal(check_run, dataclasses.replace(config, resume="never"))


def test_resume_never_lets_a_launcher_start_its_run_again(tmp_path, monkeypatch):
    config = dataclasses.replace(run_of(tmp_path), resume="never")
    monkeypatch.setenv("TFRL_RESTARTED", "1")
    check_run(config)


def test_resume_must_refuses_a_run_without_checkpoint(tmp_path):
    absent = parse(["--logdir", str(tmp_path), "--resume", "must"])
    assert "found no checkpoint" in refusal(check_run, absent)
    started = run_of(tmp_path, checkpoint=False)
    assert "found no checkpoint" in refusal(check_run, dataclasses.replace(started, resume="must"))


@pytest.mark.parametrize(
    "name",
    ["events.out.tfevents.1700000000.host.7.0.v2", "export", "videos", "plots", "eval.json", "levels.csv"],
)
def test_a_folder_that_other_programs_write_in_is_left_alone(tmp_path, name):
    config = parse(["--logdir", str(tmp_path), "--run-name", "mine"])
    config.run_dir.mkdir()
    (config.run_dir / "notes.txt").touch()
    (config.run_dir / "stop").touch()  # as one may be told before it begins
    check_run(config)
    (config.run_dir / name).touch()
    for resume in ("auto", "never"):
        sentence = refusal(check_run, dataclasses.replace(config, resume=resume))
        assert (
            f"{config.run_dir} holds files that belong to no run ({name});" in sentence
            and "--run-name" in sentence
        )


def test_a_damaged_run_is_left_alone(tmp_path):
    config = run_of(tmp_path)
    settings = config.run_dir / "config.yaml"
    settings.write_text("env: [")
    assert "is not valid YAML" in refusal(check_run, config)
    settings.unlink()
    assert "without its config.yaml" in refusal(check_run, config)


def touch(path):
    path.parent.mkdir(exist_ok=True)
    path.touch()


@pytest.mark.parametrize("left", ["results.json", "export/weights.npz", "checkpoints/best.npz"])
def test_results_of_a_run_without_checkpoints_are_not_overwritten(tmp_path, left):
    config = run_of(tmp_path, checkpoint=False)
    touch(config.run_dir / left)
    sentence = refusal(check_run, config)
    assert f"without checkpoints, but with {left.removesuffix('/weights.npz')}, so it" in (sentence)
    assert "--run-name" in sentence


def test_an_empty_export_folder_does_not_block_a_new_start(tmp_path):
    config = run_of(tmp_path, checkpoint=False)
    (config.run_dir / "export").mkdir()
    check_run(config)
    touch(config.run_dir / "checkpoints/best.npz")
    assert "but with checkpoints/best.npz, so it cannot be resumed; choose" in refusal(check_run, config)


@pytest.mark.parametrize("every", [10, 3])
def test_a_run_may_begin_again_that_was_killed_before_its_first_checkpoint(tmp_path, every):
    config = run_of(tmp_path, "--checkpoint-every", str(every), checkpoint=False)
    check_run(config)
    progress, most = config.run_dir / "progress.csv", every * config.steps_per_update
    progress.write_text(f"env_steps,a\n{most},1\n")
    check_run(dataclasses.replace(config, checkpoint_every=1))  # what counts is how it was begun
    progress.write_text(f"env_steps,a\n{most},1\n{most + config.steps_per_update},1\n")
    sentence = refusal(check_run, dataclasses.replace(config, checkpoint_every=100))
    assert f"with {most + config.steps_per_update:,} steps in its progress.csv, so it" in sentence


def test_an_unwritable_logdir_is_refused(tmp_path):
    file = tmp_path / "file"
    file.touch()
    nowhere = tmp_path / "link"
    nowhere.symlink_to(tmp_path / "gone")
    for logdir in (file, file / "below", nowhere, "/proc"):
        config = dataclasses.replace(Config(), logdir=str(logdir))
        assert "choose another --logdir" in refusal(check_run_folder, config)


def test_a_failed_write_of_a_text_keeps_the_previous_one(tmp_path):
    path = tmp_path / "config.yaml"
    write(path, "old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # writing fails as on a full disk
    try:
        with pytest.raises(OSError, match="File too large"):
            write(path, "new" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("config.yaml", "old")]
