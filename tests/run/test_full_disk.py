"""On a full disk every command ends with one sentence, and what was there before stays."""

import contextlib
import dataclasses
import shutil

import pytest
from scripted import Acting
from small_run import SMALL

from tfrl import evaluate, record, report, sac
from tfrl.cli.errors import TrainingError, UserError
from tfrl.cli.settings import to_yaml
from tfrl.run.folder import read_results
from tfrl.training import callbacks

# What a library leaves unfinished must not complain once more when it is collected.
pytestmark = [
    pytest.mark.promise,
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
]

FULL = "No space left on device"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run's settings."""
    from learners import train  # TensorFlow

    folder = tmp_path_factory.mktemp("logs")
    config = dataclasses.replace(SMALL, logdir=str(folder), total_steps=256, eval_episodes=2)
    assert train(config) == 0
    return config


@pytest.fixture
def run(finished, small_disk):
    """Settings of a copy of it, on a disk that it fits on, and of how many kB are left when it is full."""

    def make(left=0, without=()):
        disk = small_disk("6m")
        config = dataclasses.replace(finished, logdir=str(disk))
        shutil.copytree(finished.run_dir, config.run_dir, ignore=shutil.ignore_patterns(*without))
        (config.run_dir / "config.yaml").write_text(to_yaml(config))
        litter = disk / "litter"
        with contextlib.suppress(OSError), litter.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        with litter.open("r+b") as file:
            file.truncate(litter.stat().st_size - 1024 * left)
        return config

    return make


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (evaluate, ["--episodes", "2"]),
        (record, ["--max-steps", "20"]),
        (record, ["--max-steps", "20", "--format", "gif"]),
        (report, []),
    ],
)
def test_a_command_says_so_and_leaves_nothing(run, command, flags):
    config = run()
    before = content(config.run_dir)
    with pytest.raises(UserError, match=f"^cannot write .*{FULL}.$"):
        command.main([str(config.run_dir), *flags])
    assert content(config.run_dir) == before


# None of it, some, and nearly all of it fits.
@pytest.mark.parametrize(
    "left", [0, 300, 560, *(pytest.param(left, marks=pytest.mark.long) for left in (64, 420))]
)
def test_a_run_that_cannot_be_exported_says_so_and_goes_on_once_there_is_room(run, left):
    from learners import train  # TensorFlow

    config = run(left, without=("results.json", "export"))
    with pytest.raises(TrainingError, match=f"^cannot write the results in {config.run_dir}: {FULL}$"):
        train(config)
    names = {path.name for path in config.run_dir.rglob("*")}
    assert "results.json" not in names and not any(".tmp" in name for name in names)
    (config.run_dir.parent / "litter").unlink()
    assert train(config) == 0
    assert (config.run_dir / "results.json").exists()


def test_a_supervised_run_that_cannot_be_exported_says_so(small_disk):
    from test_resnet_train import run as supervised

    disk = small_disk("1m")
    for free_kb in (0, 100, 250):
        with pytest.raises(TrainingError, match=f"^cannot write the results in .*: {FULL}$"):
            supervised(disk, f"run-{free_kb}", epochs=1)


def test_a_video_in_training_costs_a_warning_once(run, learner):
    config = run()
    session = learner(config).session
    told = []
    session.console.warn = told.append
    shown = callbacks.Videos(config, session)
    for steps in (1, 2):
        shown.record(Acting(lambda observations, noise: (noise[:, 0] * 3).astype("int32")), steps)
    assert len(told) == 1 and FULL in told[0] and told[0].endswith("Training continues.")


def test_a_run_without_its_last_checkpoint_says_so_at_its_end(small_disk, capfd):
    disk = small_disk("1m")
    flags = ["--env", "Pendulum-v1", "--hidden", "160,160", "--total-steps", "64", "--learning-starts", "32"]
    flags += ["--num-envs", "2", "--batch-size", "16", "--updates-per-step", "0.1", "--checkpoint-every", "1"]
    flags += ["--eval-episodes", "1", "--logdir", str(disk), "--run-name", "run"]
    assert sac.main(flags) == 0
    found = read_results(disk / "run")
    assert found["missing"] == [f"the checkpoint of update {found['updates']} (there is no checkpoint yet)"]
    said = capfd.readouterr()
    last = (said.out + said.err).splitlines()[-1]
    assert last.endswith(f"{disk / 'run'} lacks {found['missing'][0]}.")
