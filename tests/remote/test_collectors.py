"""Learners whose envs are stepped on Ray take the same steps, on any number of actors, whoever dies."""

import contextlib
import http.server
import os
import random
import signal
import threading

import numpy as np
import pytest
from launching import until
from learners import make, updated
from processes import Answer, assert_refused

from benchmarks.process_tree import alive
from tfrl.algorithms import registry as settings
from tfrl.cli.errors import UserError
from tfrl.config import distributed
from tfrl.experience.collector import Versioned
from tfrl.training.off_policy import OffPolicyLearner
from tfrl.training.on_policy import OnPolicyLearner

pytestmark = pytest.mark.promise

CATCH = "--env catch --torso linear --precision float32 --num-levels 0 --gamma 0.9 --num-envs 8"
CATCH += " --num-steps 12 --num-minibatches 2 --lr 1e-2 --total-steps 100_000"
REPLAY = "--num-envs 8 --batch-size 16 --iteration-steps 80 --total-steps 8000 --preset default"
REPLAY += " --learning-starts 100 --train-every 16 --updates-per-step 0.2 --replay-size 400"
RUNS = {
    "impala": CATCH + " --lag 1 --memory gru --memory-size 16 --memory-inputs",
    "ppo": CATCH + " --lag 2 --epochs 2 --memory lstm --memory-size 16 --memory-inputs --sequence-length 4",
    "impact": CATCH + " --lag 1 --epochs 2",
    "drac": CATCH + " --lag 1 --epochs 2 --memory gru --memory-size 16",
    "daac": "--env bigfish --torso linear --precision float32 --num-levels 20 --level-replay --num-envs 8"
    " --num-steps 32 --num-minibatches 2 --value-epochs 2 --order-coef 0.01 --lag 1 --total-steps 100_000",
    "dqn": f"--env catch --torso linear --num-levels 0 --n-step 3 --lag 1 {REPLAY}",
    "sac": f"--env Pendulum-v1 --hidden 16 --lag 2 --noise-correlation 0.9 {REPLAY}",
}
UPDATES = 5


def parsed(algorithm, *more):
    return settings.reader(algorithm).parse([*RUNS[algorithm].split(), *map(str, more)])


def learner(algorithm, *more):
    config = parsed(algorithm, *more)
    kind = OffPolicyLearner if algorithm in ("dqn", "sac") else OnPolicyLearner
    return contextlib.closing(make(config, kind))


def assert_same(found, expected):
    for mine, theirs in zip(found[0], expected[0], strict=True):
        np.testing.assert_equal(mine, theirs)  # nan where no episode has ended
    for name, weight in expected[1].items():
        np.testing.assert_array_equal(found[1][name], weight, err_msg=name)


@pytest.fixture(scope="module")
def alone():
    """Gives what some updates come to where a thread steps the envs."""
    made = {}

    def of(algorithm, updates=UPDATES):
        if (algorithm, updates) not in made:
            with learner(algorithm) as one:
                made[algorithm, updates] = updated(one, updates)
        return made[algorithm, updates]

    return of


@pytest.mark.parametrize(
    ("needs", "words"),
    [({"--observers": 8}, "--observers 8 need 8"), ({"--learners": 2, "--actors": 6}, "--learners 2 and")],
)
def test_a_ray_with_too_few_cpus_says_how_many_are_needed_and_by_which_flags(node, needs, words):
    from tfrl.remote.cluster import Cluster

    until(lambda: not node.actors(), 60)  # of other tests
    with pytest.raises(UserError, match=f"^{words}.* CPUs, and the Ray at .* has 6 of its 6 CPUs free"):
        Cluster(node.address, needs, 0)


@pytest.mark.parametrize(
    ("algorithm", "count"),
    [
        ("impala", 4),
        *((name, 2) for name in ("dqn", "ppo", "impact", "drac", "daac", "sac")),
    ],
)
@pytest.mark.long
def test_any_number_of_actors_gives_equal_results(node, alone, algorithm, count):
    with learner(algorithm, "--actors", count, "--ray-address", node.address) as one:
        found = updated(one, UPDATES)
    assert_same(found, alone(algorithm))
    lags = [metrics["train/lag"] for metrics in found[0]]
    lag = parsed(algorithm).lag
    assert lags == [min(update, lag) for update in range(UPDATES)]


@pytest.mark.long
@pytest.mark.parametrize("kills", [1, 3])
def test_actors_are_killed_and_one_hangs_and_the_run_is_the_same(node, alone, kills):
    """Kills actors at random moments: starting, acting, waiting, twice in a row, all at once."""
    moment, done = random.SystemRandom(), threading.Event()
    signals = [signal.SIGKILL] * kills

    def disturb():
        while signals and not done.wait(moment.uniform(0, 2)):
            with contextlib.suppress(ProcessLookupError, IndexError):
                os.kill(moment.choice(node.actors()), signals[-1])
                signals.pop()

    updates = 30
    with learner("impala", "--actors", 2, "--ray-address", node.address, "--actor-timeout", 20) as one:
        thread = threading.Thread(target=disturb)
        thread.start()
        parts = [updated(one, 1)[0][0] for _ in range(10)]
        while thread.is_alive() and len(parts) < updates - 5:  # as many updates as it takes to kill all
            parts += updated(one, 1)[0]
            thread.join(1)
        done.set()
        thread.join()
        for actor in node.actors():  # all that are left, if any: the run takes their places as it next asks
            with contextlib.suppress(ProcessLookupError):
                os.kill(actor, signal.SIGKILL)
        parts += updated(one, 3)[0]
        os.kill(node.actors()[0], signal.SIGSTOP)
        found, weights = updated(one, updates - len(parts))
    assert not signals
    assert_same((parts + found, weights), alone("impala", updates))


@pytest.mark.long
def test_a_new_actors_envs_that_cannot_go_on_begin_new_episodes_in_the_replay_too(node, capsys):
    """Otherwise a transition would lead from the old episode to the new one."""
    flags = (
        f"--env tests.made_envs:made/Unseeded-v0 --hidden 8 --actors 2 --ray-address {node.address} {REPLAY}"
    )
    with contextlib.closing(make(settings.reader("dqn").parse(flags.split()), OffPolicyLearner)) as one:
        updated(one, 2)
        end, before = one.replay.steps - 1, one.replay._first.copy()
        for actor in node.actors():
            os.kill(actor, signal.SIGKILL)
        updated(one, 3)
        ended = one.replay._first[[end, end + 10]]  # a round may have been done as they died
    assert ended.all(axis=1).any() and not before[end].all()
    assert "cannot be restored exactly and begin new episodes" in capsys.readouterr().err


@pytest.mark.long
def test_running_free_no_rollout_is_older_than_the_limit(node):
    """Also if an actor asks for weights that do not exist yet."""
    with learner("impala", "--actors", 2, "--ray-address", node.address, "--lag", 3, "--free-running") as one:
        collector, weights = one.envs, one.agent.get_weights()
        collector.offer(Versioned(0, weights))
        collector.begin(5, None)
        threading.Timer(2, collector.offer, [Versioned(2, weights)]).start()
        assert collector.take().version == 2
        lags = [metrics["train/lag"] for metrics in updated(one, 8)[0]]
        stopped = node.actors()[0]
        os.kill(stopped, signal.SIGSTOP)
    assert max(lags) <= 3 and max(lags) > 0
    until(lambda: not alive(stopped), 60)  # which could not hear that it was to end


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("127.0.0.1:1", "there is no Ray to join at --ray-address 127.0.0.1:1: Connection refused."),
        ("ray://there:10001", "--ray-address must be HOST:PORT"),
        ("10..0.5:6379", "at --ray-address 10..0.5:6379: not the name of a host."),
    ],
)
def test_an_address_without_a_ray_is_refused_at_once(node, address, sentence):
    answer = Answer("--env", "catch", "--actors", 2, "--ray-address", address, module="tfrl.impala")
    assert_refused(answer, sentence)


def test_an_address_where_another_program_answers_is_refused_at_once(node):
    """Ray itself would try for minutes."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{other.server_port}"
        answer = Answer("--env", "catch", "--actors", 2, "--ray-address", address, module="tfrl.impala")
        other.shutdown()
    assert_refused(answer, f"no Ray to join at --ray-address {address}: another program answers")
    distributed.check_ray(parsed("impala", "--actors", 2, "--ray-address", node.address))
