"""REINFORCE's command: it learns, ends when solved, and goes on after kills bit for bit."""

import signal

import pytest
import tensorflow  # noqa: F401 - conftest.py then splits the CPU
from processes import Answer, Training, assert_refused, learned, results, rows, steps_done, train_here

SHORT = "--observers 0 --num-envs 8 --hidden 8 --eval-episodes 4 --checkpoint-every 2 --precision float32"
SHORT = SHORT.split()


class Reinforce(Training):
    """A training process of REINFORCE."""

    module = "tfrl.reinforce"


def train(folder, *flags):
    code, stdout, stderr = Reinforce(folder, *flags).end()
    assert (code, stderr) == (0, ""), stdout + stderr
    return results(folder)


def test_reinforce_learns_and_ends_when_solved(tmp_path):
    folder = tmp_path / "run"
    flags = ("--observers", 0, "--solved-at", 150, "--eval-episodes", 16)
    code, stdout, stderr = train_here(folder, *flags, module="tfrl.reinforce")
    assert (code, stderr) == (0, ""), stdout + stderr
    found = results(folder)
    assert found["episode_return"] >= 150 and found["eval"]["test"]["return"] > 150
    assert found["env_steps"] < 200_000 and (found["algorithm"], found["observers"]) == ("reinforce", 0)
    assert all(float(row["train/first_ratio_error"]) < 1e-4 for row in rows(folder))
    again = train_here(folder, *flags, module="tfrl.reinforce")
    assert again[0] == 0 and "is complete" in again[1]


@pytest.mark.promise
@pytest.mark.long
def test_a_killed_and_stopped_run_ends_with_undisturbed_weights(tmp_path):
    folder = tmp_path / "killed"
    for kill, more, code in ((signal.SIGKILL, 1000, -signal.SIGKILL), (signal.SIGTERM, 1500, 143)):
        training = Reinforce(folder, *SHORT, "--total-steps", 10**8, "--dropout", 0.3)
        training.wait_until(steps_done(folder) + more)
        training.process.send_signal(kill)
        assert training.end()[0] == code
    total = steps_done(folder) + 1
    killed = train(folder, *SHORT, "--total-steps", total, "--dropout", 0.3)
    whole = train(tmp_path / "whole", *SHORT, "--total-steps", total, "--dropout", 0.3)
    assert killed["weights_sha256"] == whole["weights_sha256"]
    assert killed["env_steps"] == whole["env_steps"] >= total and len(killed["resumed_at"]) == 2
    assert learned(folder) == learned(tmp_path / "whole")


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--num-envs", 10, "--observers", 4], ["--num-envs must be divisible by --observers 4; got 10"]),
        (["--ray-address", "auto", "--observers", 0], ["--ray-address needs --observers"]),
        (["--replicas", 2], ["REINFORCE learns in one process"]),
        (["--dropout", 1], ["--dropout must be at least 0"]),
    ],
)
def test_impossible_settings_give_a_one_sentence_error(flags, parts):
    assert_refused(Answer(*flags, module="tfrl.reinforce"), *parts)


def test_the_env_has_its_own_threshold_and_the_tutorial_its_settings():
    answer = Answer("--print-config", "--preset", "tutorial", module="tfrl.reinforce")
    for line in ("solved_at: 475.0", "hidden: '128'", "activation: relu", "dropout: 0.6", "lr: 0.01"):
        assert f"\n{line}\n" in answer.stdout
