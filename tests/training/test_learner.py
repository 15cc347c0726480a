"""What the learner feeds an update with: numbers of the run's seed and of the update, rewards."""

import contextlib
import io
import re

import numpy as np
import pytest
from learners import build_actor_critic, initial_arrays, updated
from learners import make as make_learner
from refusals import refusal

from tfrl.algorithms import registry as settings
from tfrl.envs import gymnasium as family
from tfrl.envs.registry import make
from tfrl.envs.spec import EnvSpec
from tfrl.experience.normalize import RewardNormalizer
from tfrl.networks.distributions import distribution_for
from tfrl.networks.entrance import variable_name
from tfrl.run import rng
from tfrl.run.checkpoint import CheckpointStore
from tfrl.run.console import Console, Progress
from tfrl.training.off_policy import OffPolicyLearner
from tfrl.training.on_policy import OnPolicyLearner


def in_env_order(array):
    """[R, T, B] to [T, R * B], a copy."""
    return np.concatenate(list(array), axis=1)


def test_a_run_begins_with_the_weights_and_levels_of_its_seed(small, learner):
    agent = learner(small(seed=3, num_levels=5, start_level=7, replicas=2))
    specs = {"observation_spec": agent.envs.observation_spec, "action_spec": agent.envs.action_spec}
    expected = initial_arrays(build_actor_critic(**specs, torso="cookbook", share_torso=True, seed=3))
    found = agent.weights()
    assert set(found) == set(expected)
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)
    env = make(EnvSpec("catch", num_envs=8, seed=3, num_levels=5, start_level=7))
    for observations in in_env_order(agent.collect().observations):  # over the first episode, and the second
        shown = env.observe().observation
        np.testing.assert_array_equal(observations[:, :9], shown[:, :9])  # without the paddle
        env.act(np.ones(8, np.int32))


def test_actions_are_drawn_by_the_numbers_of_the_update(small, learner):
    agent = learner(small(seed=3))
    agent.session.step = 5
    rollout = agent.collect()
    draw = distribution_for(agent.envs.action_spec).draw_noise
    noise = rng.action_noise(3, 5, range(8), 16, draw)
    seen = rollout.observations[0, :-1].reshape(-1, 10, 5, 1)
    expected = agent.agent.acting.act(seen, noise.reshape(-1, 1)).reshape(16, 8)
    np.testing.assert_array_equal(rollout.actions[0], expected)
    assert np.unique(expected).size == 3


@pytest.mark.parametrize(
    ("env", "lag", "resumes"),
    [
        ("made_envs:made/Fifty-v0", 0, 1),
        pytest.param("made_envs:made/Fifty-v0", 1, 1, marks=pytest.mark.long),
        pytest.param("MountainCar-v0 --max-episode-steps 50", 1, 2, marks=pytest.mark.long),
    ],
)
def test_no_two_episodes_are_counted_as_one_after_resumes(env, lag, resumes, tmp_path, monkeypatch):
    """Iterations of 40 steps cut episodes of 50, and the envs cannot continue in the middle of an episode."""
    monkeypatch.setattr(family, "LONGEST_REPLAY", 30)
    flags = f"--env {env} --num-envs 1 --hidden 8 --batch-size 8 --iteration-steps 40 --preset default"
    flags += f" --total-steps 400 --learning-starts 10 --train-every 10 --replay-size 300 --lag {lag}"
    config = settings.reader("dqn").parse(flags.split())
    store = CheckpointStore(tmp_path, keep=1)
    for number in range(resumes + 1):
        with contextlib.closing(make_learner(config, OffPolicyLearner)) as learner:
            if number:
                learner.session.step = number
                saved = store.load(pytest.fail, verify_shards=True)
                learner.set_state(saved)
            if number < resumes:
                updated(learner, 1)
                store.save(number + 1, learner.get_state(), env_steps=0)
            else:
                for _ in range(5):
                    updated(learner, 1)
                assert learner._episodes.episodes > 2 and learner._episodes.mean_length == 50


@pytest.mark.parametrize("algorithm", ["ppo", pytest.param("dqn", marks=pytest.mark.long)])
def test_an_episode_that_could_not_go_on_is_not_counted_with_the_next_one(algorithm, tmp_path, capsys):
    """The env draws from the system's randomness, so a resumed run begins new episodes."""
    flags = "--env made_envs:made/Unseeded-v0 --num-envs 8 --hidden 8 --total-steps 4000"
    flags += {
        "ppo": " --num-steps 16 --minibatch-size 64 --normalize-rewards",
        "dqn": " --iteration-steps 128 --learning-starts 128 --batch-size 16 --replay-size 800",
    }[algorithm]
    config = settings.reader(algorithm).parse(flags.split())
    kind = OffPolicyLearner if algorithm == "dqn" else OnPolicyLearner
    with contextlib.closing(make_learner(config, kind)) as before:
        updated(before, 1)
        state = before.get_state()
        assert state.learner["episodes/lengths"].any() and state.learner["episodes/returns"].any()
        store = CheckpointStore(tmp_path, keep=1)
        store.save(1, state, env_steps=128)
    saved = store.load(pytest.fail, verify_shards=True)
    with contextlib.closing(make_learner(config, kind)) as after:
        after.set_state(saved)
        found = after.get_state().learner
        for name in ("episodes/lengths", "episodes/returns", "normalizer/returns"):
            assert not found.get(name, np.zeros(1)).any(), name
    assert "cannot be restored exactly and begin new episodes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("normalize", "scale", "shift"),
    [
        (True, 2, 0.5),
        *(
            pytest.param(*more, marks=pytest.mark.long)
            for more in ((True, 1, 0), (False, 1, 0), (False, 2, 0.5))
        ),
    ],
)
def test_the_policy_gets_transformed_rewards_and_the_statistics_raw_ones(
    small, learner, normalize, scale, shift
):
    """The order is: scale, shift, normalisation."""
    agent = learner(small(replicas=2, normalize_rewards=normalize, reward_scale=scale, reward_shift=shift))
    normalizer, ends = RewardNormalizer(8, 0.99), []
    for _ in range(2):
        rollout = agent.collect()
        rewards, first = in_env_order(rollout.rewards), in_env_order(rollout.first)
        raw = np.where(first, np.sign(rewards), 0).astype(
            np.float32
        )  # catch pays 1 or -1 at an episode's end
        learned = raw * np.float32(scale) + np.float32(shift)
        np.testing.assert_array_equal(rewards, normalizer(learned, first) if normalize else learned)
        ends += raw[first].tolist()
        metrics = agent.episode_metrics()
        assert metrics["rollout/episodes"] == len(ends) > 0
        assert metrics["rollout/episode_return"] == pytest.approx(np.mean(ends))
        assert metrics["rollout/episode_length"] == 9


@pytest.fixture(scope="module")
def trained_torso(tmp_path_factory):
    """The export of a supervised run on images of catch's size, and its torso's weights by LAYER/WEIGHT."""
    from resnet import config
    from resnet import learner as supervised

    run = tmp_path_factory.mktemp("supervised")
    classifier = config.Config(model="cookbook", seed=9)
    model = supervised.build(classifier, "float32", image_shape=(10, 5, 1), classes=3)
    weights = {variable_name(v): v.numpy() for v in model.variables}
    (run / "export").mkdir()
    np.savez(run / "export" / "weights.npz", **weights)
    return run, {k.removeprefix("torso/"): v for k, v in weights.items() if k.startswith("torso/")}


@pytest.mark.parametrize(
    ("share", "freeze"),
    [
        (True, True),
        *(
            pytest.param(*more, marks=pytest.mark.long)
            for more in ((True, False), (False, True), (False, False))
        ),
    ],
)
def test_a_frozen_torso_leaves_the_heads_to_train(small, learner, trained_torso, share, freeze):
    """Trains two updates of eight steps of Adam; torsos that are not frozen change."""
    run, trained = trained_torso
    agent = learner(small(torso_weights=str(run), freeze_torso=freeze, share_torso=share, replicas=2))
    agent.begin()
    before = {name: weight.copy() for name, weight in agent.weights().items()}
    first = agent.learn(agent.collect())
    agent.learn(agent.collect())
    after = agent.weights()
    of_torsos = [name for name in after if "torso/" in name]
    assert len(of_torsos) == len(trained) * (1 if share else 2)
    for name in of_torsos:
        np.testing.assert_array_equal(before[name], trained[name.split("torso/")[1]])
        assert np.array_equal(after[name], before[name]) == freeze, name
    heads = [name for name in after if name not in of_torsos]
    assert len(heads) == 4 and all((after[name] != before[name]).any() for name in heads)
    # The norm that is clipped is of what is trained: heads alone, or all.
    assert agent.agent.num_parameters == sum(after[n].size for n in (heads if freeze else after))
    assert first["train/grad_norm"] > 0


@pytest.mark.long
@pytest.mark.parametrize(("replicas", "done"), [(2, 3), (1, 0), (1, 3), (2, 0)])
def test_the_first_update_shows_progress_and_time_left(small, learner, replicas, done):
    """In plain lines, at the start of a run and where it goes on."""
    config = small(num_steps=256, num_minibatches=8, epochs=12, total_steps=10 * 2048, replicas=replicas)
    agent, shown = learner(config), io.StringIO()
    agent.session.step, before = done, done * 2048
    agent.session.console = Console(stream=shown, interval=0.01)
    agent.session.console.start(Progress(10 * 2048, before))
    rollout = agent.collect()
    collected = before + 2048 / 8
    agent.learn(rollout)
    agent.session.console.stop()
    lines = re.findall(r"\| ([\d,]+) / 20,480 env steps \| ETA (.*?) \| updating", shown.getvalue())
    steps, left = [int(steps.replace(",", "")) for steps, _ in lines], [left for _, left in lines]
    assert steps == sorted(steps) and len({*steps}) > 5
    assert (steps[0], left[0]) == (collected, "--"), "nothing is known before the first minibatches"
    assert steps[-1] == before + 2048
    known = [at for at, text in zip(steps, left, strict=True) if text != "--"]
    assert known[0] <= collected + 2048 / 4, "an estimate comes with the first ones"
    assert "ETA --" not in shown.getvalue().splitlines()[-1]


def test_an_update_shows_its_progress(small, learner):
    """The unit is gradient steps, or epochs if gradient steps are fast."""
    agent = learner(small(num_steps=80, epochs=5, num_minibatches=4))
    for _ in range(2):
        told = []
        agent.agent.update(agent.collect(), 0, told.append)
        assert told == sorted(told) and {4, 8, 12, 16, 20} <= {*told}
    assert told == [4, 8, 12, 16, 20]


def test_a_checkpoint_of_another_network_is_refused(small, learner, tmp_path):
    state = learner(small()).get_state()
    other = learner(small(share_torso=False, logdir=str(tmp_path)))
    assert f"{tmp_path}/small belong to another network" in refusal(other.set_state, state)
