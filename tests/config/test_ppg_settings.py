"""PPG's settings: what they refuse, and the protocols of the paper."""

import pytest
from processes import Answer, assert_refused
from refusals import refusal

from tfrl.algorithms.registry import reader
from tfrl.workers import strategy


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--env", "Pendulum-v1"], "Pendulum-v1 has continuous ones; use ppo"),
        (
            ["--aux-minibatches", "15"],
            "--num-steps must be divisible by --aux-minibatches 15; got 256",
        ),
        (["--policy-updates", "0"], "--policy-updates must be at least 1"),
        (["--actor-timeout", "5"], "leave --actors, --actor-timeout and --lag out"),
        (["--free-running"], "leave --actors, --actor-timeout and --lag out"),
    ],
)
def test_impossible_settings_are_refused(flags, words):
    assert words in refusal(reader("ppg").parse, flags)


@pytest.mark.parametrize(("replicas", "rows"), [(1, 4), (2, 2), (3, 4), (4, 1)])
def test_auxiliary_parts_divide_the_share_of_a_replica(replicas, rows):
    flags = "--env catch --num-envs 4 --num-steps 48 --num-minibatches 8 --aux-minibatches 16 --micro-batch 4"
    config = reader("ppg").parse(flags.split())
    assert config.auxiliary_rows == 12
    assert strategy._cpu_micro_batch(config, 12, replicas) == rows


def test_help_has_learners_and_no_actors(capsys):
    with pytest.raises(SystemExit):
        reader("ppg").parse(["--help-all"])
    said = capsys.readouterr().out
    assert "--learners" in said and "--actors" not in said and "--lag" not in said


def test_the_hard_preset_of_ppg_has_no_unseen_levels():
    config = reader("ppg").parse(["--preset", "openai-hard"])
    assert (config.num_levels, config.total_steps, config.num_envs) == (0, 100_000_000, 256)
    assert config.distribution_mode == "hard" and not config.has_unseen_levels


def test_the_disk_space_of_a_phase_is_known_before_the_run():
    """32 rollouts of 64 x 256 steps, twice where checkpoints need the phase before: 12.9 GB of images."""
    assert reader("ppg").parse([]).phase_bytes == 2 * 32 * 64 * 256 * (64 * 64 * 3 + 4 + 4 * 15)
    short = reader("ppg").parse(["--total-steps", str(3 * 64 * 256)])
    assert short.phase_bytes == 3 * 64 * 256 * (64 * 64 * 3 + 4 + 4 * 15)


def test_an_unwritable_folder_is_not_reported_as_a_full_disk():
    """/proc has no free space either."""
    answer = Answer("--env", "starpilot", "--logdir", "/proc/foo", module="tfrl.ppg")
    assert_refused(answer, "cannot write in /proc for the run's folder", "choose another --logdir.")


def test_the_rollouts_of_a_phase_have_a_size():
    """The start-up summary names it, because the default settings need 13 GB of disk or of its cache."""
    config = reader("ppg").parse([])
    assert 12e9 < config.phase_bytes < 14.5e9
    assert reader("ppg").parse(["--policy-updates", "16"]).phase_bytes < config.phase_bytes
