"""IMPALA's command: it learns, goes on after kills bit for bit, and refuses what cannot work."""

import json
import random
import signal

import pytest
from processes import Answer, Training, assert_refused, learned, results, rows, steps_done
from worker_pair import THREADS, run_workers

CATCH = "--env catch --torso linear --precision float32 --num-levels 0 --gamma 0.9 --no-normalize-rewards"
CATCH = CATCH.split()
LEARNS = "--num-envs 32 --num-steps 9 --num-minibatches 1 --optimizer rmsprop --epsilon 1e-6 --lr 4e-2"
LEARNS += " --lr-schedule linear --max-grad-norm 5 --vtrace-lambda 1 --total-steps 70000 --eval-greedy"
UPDATE = 8 * 12
SHORT = "--num-envs 8 --num-steps 12 --num-minibatches 2 --lr 1e-2 --eval-episodes 8 --checkpoint-every 2"
SHORT = [*CATCH, *SHORT.split()]
UPDATES = 12


class Impala(Training):
    """A training process of IMPALA."""

    module = "tfrl.impala"


def train(folder, *flags):
    return Impala(folder, *flags).end()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a short run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("logs") / "whole"
    code, stdout, stderr = train(folder, *SHORT, "--total-steps", UPDATES * UPDATE)
    assert (code, stderr) == (0, ""), stdout + stderr
    return folder


@pytest.mark.long
def test_catch_is_learned(tmp_path):
    folder = tmp_path / "learned"
    code, stdout, stderr = train(folder, *CATCH, *LEARNS.split(), "--checkpoint-every", 100)
    assert (code, stderr) == (0, ""), stdout + stderr
    found = results(folder)
    assert found["eval"]["test"]["return"] >= 0.9
    assert found["seconds"] < 180  # on a busy machine; 18 s of processor time
    assert (found["algorithm"], found["actors"], found["lag"]) == ("impala", 0, 1)
    assert "The learner waited " in stdout
    assert 0 <= found["learner_wait_fraction"] < 1 and 0 <= found["actor_wait_fraction"] < 1
    row = rows(folder)[-1]
    assert 0.5 < float(row["train/vtrace_rho"]) < 1
    assert float(row["train/lag"]) == 1
    assert float(rows(folder)[0]["train/lag"]) == 0
    for name in ("time/learner_wait_fraction", "time/actor_wait_fraction"):
        assert 0 <= float(row[name]) < 1


@pytest.mark.promise
@pytest.mark.long
def test_a_killed_and_stopped_run_ends_with_undisturbed_weights(whole, tmp_path):
    folder, moment = tmp_path / "killed", random.SystemRandom()
    ended = []
    for kill, at in ((signal.SIGKILL, moment.randint(1, 4)), (signal.SIGTERM, moment.randint(5, 8))):
        training = Impala(folder, *SHORT, "--total-steps", 1000 * UPDATE)
        training.wait_until(at * UPDATE)
        training.process.send_signal(kill)
        ended.append(training.end())
    assert [code for code, _, _ in ended] == [-signal.SIGKILL, 143]
    total = steps_done(folder) + UPDATE
    for one in (folder, whole):
        code, stdout, stderr = train(one, *SHORT, "--total-steps", max(total, UPDATES * UPDATE))
        assert (code, stderr) == (0, ""), stdout + stderr
    assert results(folder)["weights_sha256"] == results(whole)["weights_sha256"]
    assert without_times(learned(folder)) == without_times(learned(whole))


def without_times(found):
    return [{name: cell for name, cell in row.items() if not name.startswith("time/")} for row in found]


@pytest.mark.promise
@pytest.mark.long
def test_two_workers_give_the_results_of_one_process(whole, tmp_path):
    flags = [*SHORT, "--total-steps", UPDATES * UPDATE, "--logdir", tmp_path, "--run-name", "two"]
    command = ["-m", "tfrl.impala", *map(str, flags)]
    for code, output in run_workers(command, command, **THREADS):
        assert code == 0, output
    mine = json.loads((tmp_path / "two" / "results.json").read_text())
    assert mine["workers"] == 2
    first = [row for row in rows(tmp_path / "two") if int(row["env_steps"]) <= UPDATES * UPDATE]
    expected = without_times(learned(whole))[: len(first)]
    for found, same in zip(without_times(learned(tmp_path / "two")), expected, strict=True):
        assert found == same


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--num-envs", 10], ["--num-envs must be divisible by --num-minibatches 8; got 10"]),
        (
            ["--num-envs", 24, "--replicas", 2],
            ["by the number of replicas, 2, times --num-minibatches 8; got 24"],
        ),
        (["--lag", 65], ["--lag must be at least 0 and at most 64"]),
        (["--num-envs", 24, "--actors", 16], ["--num-envs must be divisible by --actors 16; got 24"]),
        (["--ray-address", "auto"], ["--ray-address needs --actors"]),
        (["--env", "coinrun", "--normalize-observations"], ["--normalize-observations is for vectors"]),
    ],
)
def test_impossible_settings_give_a_one_sentence_error(flags, parts):
    assert_refused(Answer(*flags, module="tfrl.impala"), *parts)


def test_the_presets_are_taken_by_the_env():
    for flags, preset in ((["--env", "CartPole-v1"], "gymnasium"), ([], "procgen")):
        answer = Answer("--print-config", *flags, module="tfrl.impala")
        assert answer.code == 0 and f"\npreset: {preset}\n" in answer.stdout
