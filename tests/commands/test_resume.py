"""A run that is killed, interrupted, damaged and extended is the one that never stopped, bit for bit."""

import random
import signal
import time
from unittest import mock

import pytest
import tensorflow  # noqa: F401 - conftest.py then splits the CPU
from processes import Training, learned, results, rows, steps_done, train, train_here
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

from tfrl.cli.errors import UserError

pytestmark = pytest.mark.promise

ENDLESS = 10_000_000
CATCH_UPDATE, STARPILOT_UPDATE = 256, 64  # env steps
CATCH = "--env catch --torso cookbook --precision float32 --num-levels 0 --num-envs 16 --num-steps 16"
CATCH = [
    *CATCH.split(),
    "--num-minibatches",
    4,
    "--epochs",
    2,
    "--checkpoint-every",
    3,
    "--eval-episodes",
    16,
]
STARPILOT = "--env starpilot --torso nature --precision float32 --num-envs 4 --num-steps 16 --epochs 2"
STARPILOT = [*STARPILOT.split(), "--num-minibatches", 2, "--checkpoint-every", 2, "--eval-episodes", 1]


def stop_after(folder, flags, env_steps, how, delay=0.0):
    """Starts the run, asks it to stop once it has done that much, and gives (code, stdout, stderr)."""
    training = Training(folder, *flags, "--total-steps", ENDLESS)
    training.wait_until(env_steps)
    time.sleep(delay)
    training.process.send_signal(how)
    return training.end()


def stop_here(folder, flags, ask):
    """Continues the run in this process, which calls `ask`: the run ends after one update."""
    from tfrl.training.on_policy import OnPolicyLearner

    update = OnPolicyLearner.update

    def stopping(learner):
        ask()
        return update(learner)

    with mock.patch.object(OnPolicyLearner, "update", stopping):
        return train_here(folder, *flags, "--total-steps", ENDLESS)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run of catch that was stopped in every way; what its processes said, by how they ended."""
    folder = tmp_path_factory.mktemp("logs") / "stopped"
    said = {"folder": folder}
    moment = random.SystemRandom()
    kill_at = moment.randint(4, 9) * CATCH_UPDATE
    said["SIGKILL"] = stop_after(folder, CATCH, kill_at, signal.SIGKILL, moment.uniform(0, 0.3))
    said["killed at"] = steps_done(folder)
    following = said["killed at"] + CATCH_UPDATE
    said["SIGTERM"] = stop_after(folder, CATCH, following, signal.SIGTERM)
    said["SIGINT"] = stop_here(folder, CATCH, lambda: signal.raise_signal(signal.SIGINT))
    newest = max((folder / "checkpoints").iterdir())
    whole = (newest / "learner.npz").read_bytes()
    (newest / "learner.npz").write_bytes(whole[: len(whole) // 2])
    said["damaged"] = newest.name
    said["stop file"] = stop_here(folder, CATCH, (folder / "stop").touch)
    said["total"] = steps_done(folder)  # to be evaluated and exported, without another update
    said["end"] = train_here(folder, *CATCH, "--total-steps", said["total"])
    return said


@pytest.fixture(scope="module")
def unbroken(stopped, tmp_path_factory):
    """The same run in this process. Its last update was added to the complete run."""
    folder = tmp_path_factory.mktemp("logs") / "unbroken"
    said = {"folder": folder, "shorter": stopped["total"] - CATCH_UPDATE}
    said["first"] = train_here(folder, *CATCH, "--total-steps", said["shorter"])
    said["first results"] = results(folder)
    said["again"] = train_here(folder, *CATCH, "--total-steps", said["shorter"])
    said["again results"] = results(folder)
    said["extended"] = train_here(folder, *CATCH, "--total-steps", stopped["total"])
    return said


def test_the_same_command_resumes_a_killed_run(stopped):
    assert stopped["SIGKILL"][0] == -signal.SIGKILL
    code, stdout, stderr = stopped["SIGTERM"]
    assert "continues at" in stdout


@pytest.mark.parametrize(("how", "expected"), [("SIGINT", 130), ("SIGTERM", 143), ("stop file", 0)])
def test_a_stopped_run_saves_and_its_exit_code_says_so(stopped, how, expected):
    code, stdout, stderr = stopped[how]
    assert code == expected
    assert "Stopped, saved at" in stdout and "Traceback" not in stdout + stderr
    assert how == "stop file" or f"{how}: saving at the end of this update" in stdout


def test_the_stop_file_is_removed(stopped):
    assert not (stopped["folder"] / "stop").exists()


def test_a_damaged_checkpoint_is_skipped_with_a_message(stopped):
    code, stdout, stderr = stopped["stop file"]
    assert stopped["damaged"] in stdout + stderr and "warning: " in stdout + stderr
    assert "Traceback" not in stdout + stderr


def test_a_stopped_run_can_be_completed_at_its_present_length(stopped):
    assert stopped["end"][0] == 0, stopped["end"]
    assert results(stopped["folder"])["eval"]["test"]["episodes"] == 16
    assert (stopped["folder"] / "export" / "weights.npz").exists()


def test_a_run_stopped_in_every_way_equals_an_undisturbed_run(stopped, unbroken):
    assert stopped["end"][0] == unbroken["extended"][0] == 0
    ours, theirs = results(stopped["folder"]), results(unbroken["folder"])
    assert ours["env_steps"] == theirs["env_steps"] == stopped["total"]
    assert ours["weights_sha256"] == theirs["weights_sha256"]
    assert ours["eval"] == theirs["eval"]
    assert ours["episode_return"] == theirs["episode_return"]
    assert learned(stopped["folder"]) == learned(unbroken["folder"])


def test_the_results_list_the_steps_of_each_resume(stopped, unbroken):
    resumed_at = results(stopped["folder"])["resumed_at"]
    # Where the damaged checkpoint's process went on is forgotten with it, unless it had saved another before.
    assert len(resumed_at) in (3, 4) and resumed_at == sorted(resumed_at)
    assert resumed_at[0] <= stopped["killed at"] and resumed_at[0] % (3 * CATCH_UPDATE) == 0
    assert resumed_at[-1] == stopped["total"]
    assert results(unbroken["folder"])["resumed_at"] == [unbroken["shorter"]]


def test_each_update_has_one_row_in_progress_csv(stopped):
    steps = [int(row["env_steps"]) for row in rows(stopped["folder"])]
    assert steps == list(range(CATCH_UPDATE, stopped["total"] + 1, CATCH_UPDATE))


@pytest.mark.parametrize("what", ["observations", "first"])
def test_restored_envs_with_other_observations_are_refused(small, tmp_path, what):
    """Another build of procgen would restore the same states with other observations."""
    from tfrl.algorithms.ppo import PPOAgent
    from tfrl.run.console import Console
    from tfrl.run.session import open_session
    from tfrl.training.on_policy import OnPolicyLearner
    from tfrl.workers import strategy
    from tfrl.workers.watchdog import Watchdog

    config = small(logdir=str(tmp_path))
    watchdog = Watchdog(tmp_path / "heartbeats", ("here",), 0, stall_timeout=0.0)
    parts = (config, strategy.make(config, None), watchdog, Console(enabled=False))
    with open_session(*parts) as session:
        learner, again = (OnPolicyLearner(config, session, PPOAgent) for _ in range(2))
        state = learner.get_state()
        again.set_state(state)
        part = state.parts[0]
        part[what] = part[what].copy()
        part[what][5] ^= 1
        with pytest.raises(UserError, match="catch is another build here"):
            again.set_state(state)


def test_a_complete_run_is_left_as_it_is(unbroken):
    assert unbroken["first"][0] == unbroken["again"][0] == 0
    assert "is complete" in unbroken["again"][1]
    assert unbroken["first results"] == unbroken["again results"]


def test_an_extended_run_keeps_its_evaluations(unbroken):
    evaluated = {
        int(row["env_steps"]): float(row["eval_test/return"])
        for row in rows(unbroken["folder"])
        if row["eval_test/return"]
    }
    ends = {
        unbroken["shorter"]: unbroken["first results"],
        steps_done(unbroken["folder"]): results(unbroken["folder"]),
    }
    assert evaluated == {
        steps: pytest.approx(found["eval"]["test"]["return"]) for steps, found in ends.items()
    }


def test_nothing_but_what_the_console_shows_is_printed(stopped, unbroken):
    ends = [stopped[k] for k in ("SIGINT", "SIGTERM", "end")]
    for said in (*ends, *(unbroken[k] for k in ("first", "again", "extended"))):
        assert said[2] == ""


@pytest.mark.long
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_interrupts_the_last_evaluation(tmp_path, signum):
    """The evaluation takes minutes. The signal comes when the last update has a checkpoint but no row."""
    folder = tmp_path / "evaluating"
    short = [*CATCH, "--total-steps", 2 * CATCH_UPDATE]
    training = Training(folder, *short, "--eval-episodes", 400_000)
    training.wait_for(lambda: (folder / "checkpoints" / "update-00000002").exists())
    training.process.send_signal(signum)
    code, stdout, stderr = training.end()
    assert (code, stderr) == (128 + signum, "")
    assert f"Stopped, saved at {2 * CATCH_UPDATE} env steps" in stdout
    assert steps_done(folder) == CATCH_UPDATE and not (folder / "results.json").exists()
    if signum == signal.SIGINT:  # once is enough
        assert train(folder, *short)[0] == 0
        assert results(folder)["eval"]["test"]["episodes"] == 16
        assert [bool(row["eval_test/return"]) for row in rows(folder)] == [False, True]
        # Killed while it exported, it evaluates once more, in place of what it wrote.
        found = results(folder)["eval"]
        (folder / "results.json").unlink()
        assert train(folder, *short)[0] == 0
        assert results(folder)["eval"] == found
        events = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
        for tag, points in (("eval_test/return", 1), ("train/policy_loss", 2)):
            assert len(events.Tensors(tag)) == points


@pytest.mark.long
def test_a_second_signal_exits_at_once_and_says_that_nothing_was_saved(tmp_path, monkeypatch):
    """Both signals come in the first update, which is slow."""
    monkeypatch.setattr(Training, "is_forked", False)  # its stdout is read while it runs
    training = Training(
        tmp_path / "ended", *CATCH, "--num-steps", 1024, "--epochs", 1000, "--total-steps", ENDLESS
    )
    lines = iter(training.process.stdout.readline, "")
    assert any(line.endswith(("| collecting\n", "| updating\n")) for line in lines)
    training.process.send_signal(signal.SIGTERM)
    assert any(line.startswith("SIGTERM: saving at the end of this update") for line in lines)
    time.sleep(3.2)  # else it repeats the first
    training.process.send_signal(signal.SIGTERM)
    code, stdout, stderr = training.end()
    assert (code, stderr) == (143, ""), stdout
    assert stdout.endswith("Ended without saving; there is no checkpoint yet.\n")
    assert not list((tmp_path / "ended").glob("checkpoints/*"))


# Procgen


@pytest.fixture(scope="module")
def starpilot(tmp_path_factory):
    """A killed and continued run, and the same one in one go. Episodes are short, as evaluations are."""
    killed, whole = (tmp_path_factory.mktemp("logs") / name for name in ("killed", "whole"))
    moment = random.SystemRandom()
    kill_at = moment.randint(3, 6) * STARPILOT_UPDATE
    stop_after(killed, STARPILOT, kill_at, signal.SIGKILL, moment.uniform(0, 0.2))
    total = steps_done(killed) + 2 * STARPILOT_UPDATE
    ends = [train(killed, *STARPILOT, "--total-steps", total)]
    ends.append(train(whole, *STARPILOT, "--total-steps", total))
    return killed, whole, ends


@pytest.mark.long
def test_a_killed_run_of_procgen_resumes_bit_for_bit(starpilot):
    killed, whole, ends = starpilot
    assert [end[0] for end in ends] == [0, 0]
    ours, theirs = results(killed), results(whole)
    assert len(ours["resumed_at"]) == 1 and theirs["resumed_at"] == []
    assert ours["weights_sha256"] == theirs["weights_sha256"]
    assert ours["eval"] == theirs["eval"]
    assert learned(killed) == learned(whole)


@pytest.mark.long
def test_procgen_prints_no_noise(starpilot):
    assert [end[2] for end in starpilot[2]] == ["", ""]
