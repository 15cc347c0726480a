"""PPO on Gymnasium's envs: one run on any number of replicas, and advantages where episodes are cut off."""

import numpy as np
import pytest
from learners import Present

from tfrl.algorithms.registry import reader

READER = reader("ppo")


FLAGS = "--num-envs 8 --num-steps 48 --num-minibatches 4 --epochs 2 --seed 3 --total-steps 100_000"
LIMITED = "made_envs:made/Hidden-v0"  # ends by chance, or after 60 steps; rewards from -0.2 to 0.2


def of(env, *flags):
    return READER.parse(["--env", env, *FLAGS.split(), *flags])


def state(learner):
    """All that decides how the run goes on, by name, copied; the envs' part in the order of the envs."""
    found = learner.get_state()
    part, order = found.parts[0], np.argsort(found.parts[0]["indices"])
    arrays = found.learner | {name: part[name][order] for name in ("observations", "first")}
    return {name: np.array(array) for name, array in arrays.items()}


@pytest.mark.parametrize(
    ("env", "counts"),
    [
        (LIMITED, (1, 2)),
        *(
            pytest.param(env, (1, 2, 4), marks=pytest.mark.long)
            for env in ("CartPole-v1", "InvertedDoublePendulum-v5", LIMITED)
        ),
    ],
)
def test_1_2_and_4_replicas_give_equal_results(learner, env, counts):
    """Three updates have equal weights, optimizers, moments of rewards and observations, and episodes."""
    runs, cut = [], 0
    for replicas in counts:
        made = learner(of(env, "--replicas", str(replicas)))
        for _ in range(3):
            made.update()
            cut += len(made.rollout.final_observations)
        runs.append(state(made))
        made.close()
    assert "observations/mean" in runs[0] and runs[0]["observations/count"] == 3 * 48 * 8
    assert cut > 0 or env != LIMITED
    for found in runs[1:]:
        assert set(found) == set(runs[0])
        for name, expected in runs[0].items():
            np.testing.assert_array_equal(found[name], expected, err_msg=name)


def slow_gae(rollout, values, last_values, final_values, gamma, lam):
    """Of one replica, a loop in float64: an episode that is cut off goes on with the value of its last state.

    Schulman et al. 2016, arXiv:1506.02438, eq. 16; Pardo et al. 2018, arXiv:1712.00378, eq. 6.
    """
    steps, envs = rollout.rewards.shape[1:]
    advantages = np.zeros((steps, envs))
    for env in range(envs):
        following, running = float(last_values[env]), 0.0
        for t in reversed(range(steps)):
            ended = bool(rollout.first[0, t, env])
            if ended:
                cut = bool(rollout.truncated[0, t, env])
                following, running = (final_values[t, env] if cut else 0.0), 0.0
            value = float(values[t, env])
            running = float(rollout.rewards[0, t, env]) + gamma * following - value + gamma * lam * running
            advantages[t, env], following = running, value
    return advantages, advantages + values


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), marks=pytest.mark.long),
        ("--normalize-advantages", "batch", "--gae-lambda", "0.5"),
    ],
)
def test_advantages_of_a_rollout_whose_episodes_end_or_are_cut_off(learner, flags):
    made = learner(of(LIMITED, "--num-steps", "128", *flags))
    rollout, agent, config = made.collect(), made.agent, of(LIMITED, *flags)
    assert rollout.truncated.sum() > 2 and (rollout.first & ~rollout.truncated).sum() > 2
    assert set(rollout.final_observations) == set(zip(*np.nonzero(rollout.truncated), strict=True))
    for (_, t, env), shown in rollout.final_observations.items():
        assert shown[1] == 60, "the step of its episode, which the env shows"
        assert rollout.observations[0, t + 1, env, 1] == 0, "already the next episode's first"

    def values_of(observations):
        _, values = Present(agent)(observations.reshape(-1, 2))
        return np.float64(values).reshape(observations.shape[:-1])

    final_values = np.zeros(rollout.rewards.shape[1:])
    for (_, t, env), shown in rollout.final_observations.items():
        final_values[t, env] = values_of(shown[None])[0]
    values = np.float64(rollout.extras["value"][0])
    np.testing.assert_allclose(values, values_of(rollout.observations[0, :-1]), rtol=1e-4, atol=1e-5)
    last_values = values_of(rollout.observations[0, -1])
    expected = slow_gae(rollout, values, last_values, final_values, config.gamma, config.gae_lambda)

    rows = made.session.runtime.per_replica(agent._minibatches(0))
    with_last = np.concatenate([rollout.extras["value"], agent.last_values(rollout)[:, None]], axis=1)
    estimated = agent._estimates(rollout, with_last, rows)
    advantages, targets, moments = (np.asarray(made.session.runtime.first(x)) for x in estimated[:3])
    np.testing.assert_allclose(advantages.reshape(128, 8), expected[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(targets.reshape(128, 8), expected[1], rtol=1e-4, atol=1e-5)
    if flags:  # all minibatches have the moments of the whole
        np.testing.assert_allclose(
            moments, np.tile([expected[0].mean(), expected[0].std()], (8, 1)), rtol=1e-4
        )


def test_training_uses_the_normalisation_of_the_rollout(learner):
    """The first ratio of an update is 1, although mean and deviation have changed since the last rollout."""
    made = learner(of("InvertedDoublePendulum-v5"))
    for number in range(3):
        scale = made.weights()["observations/scale"].copy()
        metrics = made.update()
        assert metrics["train/first_ratio_error"] < 1e-5
        assert (made.weights()["observations/scale"].copy() != scale).any(), number


def test_constants_of_random_steps_stay_as_they_are(learner):
    flags = ("--normalize-random-steps", "200")
    made, other = learner(of("CartPole-v1", *flags)), learner(of("CartPole-v1", *flags, "--replicas", "2"))
    before = made.weights()["observations/scale"].copy()
    np.testing.assert_array_equal(before, other.weights()["observations/scale"].copy())
    assert (before != 1).all()
    made.update()
    np.testing.assert_array_equal(made.weights()["observations/scale"].copy(), before)
    assert (
        learner(of("CartPole-v1", *flags, "--seed", "4")).get_state().learner["observations/mean"][0]
        != (made.get_state().learner["observations/mean"][0])
    )
