"""python -m tfrl.ppo on Gymnasium's envs: two workers, a kill, and a run that ends once it is solved."""

import dataclasses
import signal

import pytest
import tensorflow  # noqa: F401 - conftest.py then splits the CPU
from processes import Training, learned, results, rows, train, train_here
from worker_pair import run_workers

from tfrl.algorithms import runs as settings
from tfrl.algorithms.runs import find_policy
from tfrl.cli.errors import UserError
from tfrl.reporting import runs
from tfrl.run.folder import BEST_FILE
from tfrl.training import callbacks as evaluator

UPDATES = 30  # enough of them for a kill in their midst
FLAGS = "--num-envs 8 --num-steps 32 --num-minibatches 4 --epochs 2 --seed 3 --eval-episodes 2"
FLAGS = [*FLAGS.split(), "--checkpoint-every", "1", "--total-steps", str(UPDATES * 256)]
SETTINGS = {
    "CartPole-v1": ["--max-episode-steps", "30", "--env-kwargs", '{"sutton_barto_reward": true}'],
    "InvertedDoublePendulum-v5": ["--torso", "mlp", "--hidden", "32,32"],
}


_DOUBLE = pytest.param("InvertedDoublePendulum-v5", marks=pytest.mark.long)


@pytest.fixture(scope="module", params=["CartPole-v1", _DOUBLE])
def alone(request, tmp_path_factory):
    """The env's flags, and the folder of its run in one process."""
    flags = ["--env", request.param, *FLAGS, *SETTINGS[request.param]]
    folder = tmp_path_factory.mktemp("logs") / "alone"
    code, stdout, stderr = train(folder, *flags)
    assert code == 0, stdout + stderr
    return flags, folder


@pytest.mark.long
def test_a_run_leaves_the_promised_files(alone):
    _, folder = alone
    found = results(folder)
    assert set(found["eval"]) == {"test"} and found["eval"]["test"]["episodes"] == 2
    assert len(rows(folder)) == UPDATES and not {name for name in rows(folder)[0] if "train/return" in name}
    assert max(float(row["train/first_ratio_error"]) for row in rows(folder)) < 1e-5


@pytest.mark.promise
@pytest.mark.long
def test_two_workers_give_the_results_of_one_process(alone, tmp_path):
    flags, folder = alone
    command = ["-m", "tfrl.ppo", *flags, "--logdir", str(tmp_path), "--run-name", "pair"]
    ends = run_workers(command, command)
    assert [code for code, _ in ends] == [0, 0], ends
    found = results(tmp_path / "pair")
    assert found["workers"] == 2 and found["weights_sha256"] == results(folder)["weights_sha256"]
    assert learned(tmp_path / "pair") == learned(folder)


@pytest.mark.promise
@pytest.mark.long  # catch and procgen are killed in test_resume.py
def test_a_killed_run_resumes_to_equal_weights(alone, tmp_path):
    flags, folder = alone
    killed = Training(tmp_path / "killed", *flags)
    killed.wait_until(2 * 256)
    killed.process.send_signal(signal.SIGKILL)
    assert killed.end()[0] == -signal.SIGKILL
    assert train(tmp_path / "killed", *flags)[0] == 0
    found = results(tmp_path / "killed")
    assert found["resumed_at"] and found["weights_sha256"] == results(folder)["weights_sha256"]
    assert learned(tmp_path / "killed") == learned(folder)


def test_a_solved_run_is_done(tmp_path):
    """CartPole pays 1 for each step, so the first 100 episodes reach the threshold of 1."""
    flags = ["--env", "CartPole-v1", *FLAGS, "--total-steps", 100_000, "--solved-at", 1]
    folder = tmp_path / "run"
    code, stdout, stderr = train_here(folder, *flags, module="tfrl.ppo")
    assert code == 0, stdout + stderr
    found, last = results(folder), rows(folder)[-1]
    assert found["env_steps"] == int(last["env_steps"]) < 100_000
    assert (found["solved"], found["solved_at"]) == (True, 1)
    told = f"of the last 100 episodes, {found['episode_return']:.2f}, has reached the threshold of 1."
    assert f"Solved after {found['env_steps']:,} env steps: the mean return {told}" in stdout
    assert float(last["rollout/episodes"]) >= 100 > float(rows(folder)[-2]["rollout/episodes"])
    assert last["eval_test/return"], "it ends like any run: evaluated, exported"
    assert (folder / "export" / "weights.npz").exists()
    before = (folder / "progress.csv").read_bytes()
    code, stdout, stderr = train_here(folder, *flags, module="tfrl.ppo")
    assert code == 0 and "is complete; with a higher --solved-at, it would" in stdout and stderr == ""
    config = dataclasses.replace(settings.from_yaml(folder / "config.yaml"), logdir=str(tmp_path))
    done = runs.load(folder)
    assert done.is_done_for(config) and not done.is_done_for(dataclasses.replace(config, solved_at=1e6))
    assert evaluator.follow(config, sleep=lambda _: pytest.fail("the evaluator waits for more")) == 0
    (folder / BEST_FILE).unlink()
    ended = (folder / "results.json").rename(folder / "ended.json")
    assert evaluator.follow(config, sleep=lambda _: ended.rename(folder / "results.json")) == 0
    assert find_policy(folder, "best").env_steps == found["env_steps"], "an evaluator keeps the best policy"
    assert (folder / "progress.csv").read_bytes() == before and results(folder) == found
    more = ["--solved-at", 1e6, "--total-steps", found["env_steps"] + 256]
    with pytest.raises(UserError, match="--total-steps"):  # the learning rate hangs on it
        train_here(folder, *flags, *more, module="tfrl.ppo")
