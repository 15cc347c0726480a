"""Envs that are stepped while PPO and algorithms with replay learn: which weights act what, and resumes."""

import contextlib
from unittest import mock

import numpy as np
import pytest
from learners import make, updated

from tfrl.algorithms import registry as settings
from tfrl.config.distributed import DistributedSettings
from tfrl.training.off_policy import OffPolicyLearner
from tfrl.training.on_policy import OnPolicyLearner

CARTPOLE = "--env CartPole-v1 --hidden 16 --num-envs 4"
REPLAY = "--preset default --batch-size 16 --iteration-steps 80 --total-steps 8000 --learning-starts 100"
REPLAY = f"{CARTPOLE} {REPLAY} --train-every 16 --updates-per-step 0.2 --replay-size 400 --lr 1e-2"
CATCH = "--env catch --torso linear --precision float32 --num-levels 0 --num-envs 4"
RUNS = {
    "ppo": f"{CARTPOLE} --num-steps 16 --num-minibatches 2 --epochs 2 --total-steps 6400",
    "ppo of images": f"{CATCH} --num-steps 12 --num-minibatches 2 --epochs 2 --total-steps 4800",
    "dqn": f"{REPLAY} --n-step 3 --prioritized --priority-beta 1",
    "sac": REPLAY,
    "sac of a pendulum": f"{REPLAY} --env Pendulum-v1 --noise-correlation 0.9",
}


@pytest.fixture
def learner():
    """Makes a learner, and closes it in the end."""
    with contextlib.ExitStack() as made:

        def of(name, *flags):
            algorithm = name.partition(" ")[0]
            config = settings.reader(algorithm).parse([*RUNS[name].split(), *map(str, flags)])
            kind = OnPolicyLearner if algorithm == "ppo" else OffPolicyLearner
            return made.enter_context(contextlib.closing(make(config, kind)))

        yield of


def saved(learner, folder):
    """The state of a learner, with its shards as a checkpoint has them."""
    state = learner.get_state()
    for shard in state.shards:
        shard.keep(shard.write(folder))
    return state


def assert_same(found, expected):
    for mine, theirs in zip(found[0], expected[0], strict=True):
        np.testing.assert_equal(mine, theirs)  # nan where no episode has ended
    for name, weight in expected[1].items():
        np.testing.assert_array_equal(found[1][name], weight, err_msg=name)


@pytest.mark.parametrize("name", ["ppo", pytest.param("ppo of images", marks=pytest.mark.long)])
def test_without_lag_a_thread_gives_the_results_of_plain_ppo(learner, name):
    expected = updated(learner(name, "--lag", 0), 3)
    with mock.patch.object(DistributedSettings, "is_ahead", True):
        ahead = learner(name, "--lag", 0)
    found = updated(ahead, 3)
    for metrics in found[0]:
        assert metrics.pop("train/lag") == 0
    assert_same(found, expected)


def test_the_ratio_of_ppo_is_to_the_policy_that_acted(learner):
    history, _ = updated(learner("ppo of images", "--lag", 1, "--lr", 1e-2), 3)
    errors = [metrics["train/first_ratio_error"] for metrics in history]
    assert errors[0] < 1e-5 and min(errors[1:]) > 1e-3


@pytest.mark.parametrize(
    "name, lag",
    [
        ("dqn", 1),
        *(pytest.param(*more, marks=pytest.mark.long) for more in (("dqn", 3), ("sac of a pendulum", 1))),
    ],
)
def test_rounds_are_collected_with_weights_that_are_lag_iterations_old(learner, name, lag):
    """Actions of the second round are random until --learning-starts."""
    one, slow = learner(name, "--lag", lag), learner(name)
    weights, taken, prefetched = [], [], one._prefetched
    one._prefetched = lambda prefetch: taken.append(prefetched(prefetch)) or taken[-1]
    for iteration in range(6):
        weights.append(one.weights())
        one.update()
        acted = slow.agent.network.join(weights[max(0, iteration - lag)])
        for name in slow.agent.network.acting:
            slow.agent.learning.assign(name, acted[name])
        slow.agent.acting.forget_weights()
        acting = slow.agent.acting
        expected = slow.envs.steps(acting.explore, acting.draw(iteration, range(4)))
        steps = taken[-1].steps()
        for (actions, step), (same, expected_step) in zip(steps, expected, strict=True):
            np.testing.assert_array_equal(actions, same)
            for mine, theirs in zip(step, expected_step, strict=True):
                np.testing.assert_array_equal(mine, theirs)
    assert any((weights[0][name] != weights[-1][name]).any() for name in weights[0])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("dqn", marks=[pytest.mark.long, pytest.mark.promise]),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("ppo", "sac", "sac of a pendulum")),
    ],
)
def test_a_restored_learner_continues_bit_for_bit(learner, name, tmp_path):
    """The state is taken while two rollouts are unfinished; they are repeated."""
    whole = updated(learner(name, "--lag", 2), 6)
    begun = learner(name, "--lag", 2)
    first, _ = updated(begun, 3)
    rest = learner(name, "--lag", 2)
    rest.session.step = 3
    rest.set_state(saved(begun, tmp_path))
    found, weights = updated(rest, 3)
    assert_same((first + found, weights), whole)


@pytest.mark.long
@pytest.mark.parametrize("name", ["ppo", "sac"])
def test_a_free_running_learner_continues_from_a_state(learner, name, tmp_path):
    flags = ("--free-running", "--lag", 3)
    one, other = learner(name, *flags), learner(name, *flags)
    lags = [metrics["train/lag"] for metrics in updated(one, 4)[0]]
    assert lags[0] == 0 and max(lags) <= 3
    state = saved(one, tmp_path)
    assert not [key for key in state.learner if key.startswith("acting/")]
    other.session.step = 4
    other.set_state(state)
    assert updated(other, 1)[0][0]["train/lag"] == 0


@pytest.mark.long
@pytest.mark.parametrize("name", ["ppo", "sac"])
def test_two_replicas_give_the_results_of_one(learner, name):
    (history, weights), expected = (updated(learner(name, "--lag", 1, "--replicas", r), 3) for r in (2, 1))
    for name, weight in expected[1].items():
        np.testing.assert_array_equal(weights[name], weight, err_msg=name)
    assert [metrics["train/lag"] for metrics in history] == [0, 1, 1]


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        pytest.param("ppo", "--num-steps 20", marks=[pytest.mark.long, pytest.mark.promise]),
        pytest.param("dqn", "--iteration-steps 80", marks=pytest.mark.long),
    ],
)
def test_returns_do_not_run_on_if_envs_of_a_replaced_actor_begin_new_episodes(learner, name, steps):
    run = learner(name, *["--env", "made_envs:made/Fifty-v0", "--lag", "1"], *steps.split())
    take, collector = run._prefetch.take, run._prefetch.collector

    def replaced(*arguments):
        rollout = take(*arguments)
        collector.began = collector.began._replace(first=np.ones(4, bool))
        return rollout

    with mock.patch.object(run._prefetch, "take", replaced):
        history, _ = updated(run, 4)
    assert history[-1]["rollout/longest_episode"] <= 20, "20 steps since the replacement, not 50"
