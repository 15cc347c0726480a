"""PPG's settings: what they refuse, the disk that a phase takes, the protocols of the paper."""

import dataclasses
import json
import types

import pytest
from processes import Answer, assert_refused
from refusals import refusal

from tfrl.algorithms import ppg
from tfrl.cli.words import size
from tfrl.run import files
from tfrl.training import command, phase


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--env", "Pendulum-v1"], "Pendulum-v1 has continuous actions; use ppo"),
        (
            ["--aux-minibatches", "15"],
            "--num-steps must be divisible by --aux-minibatches 15; got 256; use 240 or 360",
        ),
        (["--policy-updates", "0"], "--policy-updates must be at least 1"),
        (["--actor-timeout", "5"], "leave --actors, --actor-timeout and --lag out"),
        (["--free-running"], "leave --actors, --actor-timeout and --lag out"),
    ],
)
def test_impossible_settings_are_refused(flags, words):
    assert words in refusal(ppg.READER.parse, flags)


def test_a_phase_that_the_disk_does_not_hold_is_refused(small_disk):
    place = small_disk("2m")
    config = ppg.READER.parse(["--logdir", str(place), "--run-name", "a"])
    assert config.phase_bytes == 32 * 64 * 256 * (64 * 64 * 3 + 4 + 4 * 15)
    words = refusal(command.check, config)
    assert "up to 64 rollouts of --policy-updates 32 need 13 GB of disk space" in words
    assert "has 2.1 MB; lower --policy-updates, --checkpoint-every or --keep-checkpoints, or choose" in words
    phase.check_disk(dataclasses.replace(config, env="catch", num_envs=2, num_steps=32))
    config.run_dir.mkdir()  # of a run that is complete
    (config.run_dir / "results.json").write_text(json.dumps({"env_steps": config.run_steps}))
    command.check(config)
    assert "need 13 GB" in refusal(command.check, dataclasses.replace(config, total_steps=30_000_000))
    solved = dataclasses.replace(config, total_steps=30_000_000, solved_at=5.0)
    (config.run_dir / "results.json").write_text(json.dumps({"env_steps": 16_384, "episode_return": 5.5}))
    command.check(solved)


def test_a_resumed_run_needs_disk_space_only_for_its_rest(tmp_path, monkeypatch):
    """Of 70 updates the last 6 are a phase of their own; the rollouts of earlier phases are gone."""
    settings = ["--logdir", str(tmp_path), "--total-steps", str(70 * 16_384)]
    config = ppg.READER.parse(settings)
    each = config.phase_bytes // 32
    monkeypatch.setattr(phase.shutil, "disk_usage", lambda place: types.SimpleNamespace(free=4 * each))
    assert phase.rollouts_ahead(config) == 64
    for update, ahead in ((66, 6), (60, 38)):
        (config.run_dir / "checkpoints" / f"update-{update:08d}").mkdir(parents=True)
        (config.run_dir / "checkpoints" / f"update-{update:08d}" / "manifest.json").touch()
        assert phase.rollouts_ahead(config) == ahead
    (config.run_dir / "phase").mkdir()
    assert f"up to 38 rollouts of --policy-updates 32 need {size(38 * each)}" in refusal(
        phase.check_disk, config
    )
    with (config.run_dir / "phase" / "observations.npy").open("wb") as file:
        file.truncate(34 * each)
    phase.check_disk(config)


def test_a_file_that_vanishes_during_the_check_counts_nothing(tmp_path):
    """Of a phase that another process has ended."""
    there, gone = tmp_path / "there.npy", tmp_path / "gone.npy"
    there.write_bytes(bytes(7))
    assert files.total_size([gone, there]) == 7


@pytest.mark.parametrize(("replicas", "rows"), [(1, 4), (2, 2), (3, 4), (4, 1)])
def test_auxiliary_parts_divide_the_share_of_a_replica(replicas, rows):
    flags = "--env catch --num-envs 4 --num-steps 48 --num-minibatches 8 --aux-minibatches 16 --micro-batch 4"
    step = ppg.READER.parse(flags.split()).auxiliary_step(replicas)
    assert (step.rows_per_step, step.micro_batch) == (12, rows)
    assert step.rows_per_step // replicas % step.micro_batch == 0


@pytest.mark.parametrize(
    ("flags", "rollouts"),
    [
        ([], 64),
        (["--policy-updates", "4"], 16),
        (["--policy-updates", "4", "--checkpoint-every", "2", "--keep-checkpoints", "9"], 24),
    ],
)
def test_the_disk_holds_the_phases_of_all_checkpoints(flags, rollouts):
    assert ppg.READER.parse(flags).rollouts_on_disk == rollouts


def test_help_has_learners_and_no_actors(capsys):
    with pytest.raises(SystemExit):
        ppg.READER.parse(["--help-all"])
    said = capsys.readouterr().out
    assert "--learners" in said and "--actors" not in said and "--lag" not in said


def test_the_authors_protocol_of_hard_levels_has_none_that_are_unseen():
    config = ppg.READER.parse(["--preset", "openai-hard"])
    assert (config.num_levels, config.total_steps, config.num_envs) == (0, 100_000_000, 256)
    assert config.distribution_mode == "hard" and not config.has_unseen_levels


def test_an_unwritable_folder_is_not_reported_as_a_full_disk():
    """/proc has no room either."""
    answer = Answer("--env", "starpilot", "--logdir", "/proc/foo", module="tfrl.ppg")
    assert_refused(answer, "cannot write in /proc for the run's folder", "choose another --logdir.")
