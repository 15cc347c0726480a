"""Numbers of learners that cannot work are refused in a sentence, before anything starts."""

import json

import pytest
from processes import Answer, assert_refused

from tfrl.algorithms import registry as settings
from tfrl.cli.errors import UserError
from tfrl.config import distributed

CLUSTER = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}


@pytest.mark.parametrize("algorithm", ["impala", "ppo", "drac", "sac"])
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--num-envs 8 --learners 3", "--num-envs must be divisible by the number of replicas, 3"),
        (
            "--num-envs 8 --learners 2 --actors 1",
            "--actors must be divisible by the number of learners, 2",
        ),
        ("--num-envs 8 --learners 2 --actors 4 --replicas 8", "divisible by the number of replicas, 16"),
        ("--num-envs 8 --learners 0", "--learners must be at least 1"),
        (
            "--num-envs 8 --learners 2 --strategy mirrored",
            "needs --strategy multi-worker or auto; got mirrored",
        ),
    ],
)
def test_numbers_that_do_not_divide_are_refused(algorithm, flags, sentence):
    env = {"sac": "Pendulum-v1", "drac": "coinrun"}.get(algorithm, "catch")
    slices = ["--num-minibatches", "4"] if algorithm == "impala" else []  # of envs, which 8 of them allow
    with pytest.raises(UserError, match=sentence):
        settings.reader(algorithm).parse(["--env", env, *slices, *flags.split()])


def test_learners_and_tf_config_exclude_each_other(tmp_path, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps(CLUSTER))
    answer = Answer("--env", "catch", "--learners", 2, "--logdir", tmp_path, module="tfrl.impala")
    assert_refused(answer, "--learners 2 starts its own workers, but TF_CONFIG")
    assert not list(tmp_path.iterdir())


def test_single_learners_and_started_learners_start_no_workers(monkeypatch):
    parse = settings.reader("impala").parse
    two = parse(["--env", "catch", "--learners", "2"])
    assert distributed.leads(two) and not distributed.leads(parse(["--env", "catch"]))
    monkeypatch.setenv(distributed.LEARNER, "127.0.0.1:6379")
    assert not distributed.leads(two) and distributed.ray_address(two) == "127.0.0.1:6379"
    assert not distributed.leads(settings.reader("ppg").parse(["--env", "catch"]))
