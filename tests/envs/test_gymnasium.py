"""Gymnasium's envs: a loop by hand shows the same, exact states in a fresh process, slices, conversions."""

import importlib.util
import json
import subprocess
import sys

import gymnasium
import made_envs
import numpy as np
import pytest
from made_envs import digest, made, play, vector

from tfrl.config.run import Task
from tfrl.envs import gymnasium as family
from tfrl.envs import registry
from tfrl.envs.facts import find_facts
from tfrl.envs.images import Layout
from tfrl.envs.making import action_spec, make_env
from tfrl.envs.spec import ArraySpec, Box, Discrete


def needs(package):
    return pytest.mark.skipif(not importlib.util.find_spec(package), reason=f"{package} is not installed")


ATARI = pytest.param("ALE/Breakout-v5", marks=needs("ale_py"))
DM_CONTROL = pytest.param("shimmy:dm_control/cartpole-swingup-v0", marks=needs("dm_control"))
BOX2D = pytest.param("LunarLander-v3", marks=needs("Box2D"))
CLASSIC = ["CartPole-v1", "Pendulum-v1", "MountainCarContinuous-v0", "Acrobot-v1"]
MUJOCO = [f"{name}-v5" for name in ("InvertedDoublePendulum", "HalfCheetah", "Hopper", "Ant", "Humanoid")]
EXACT = [*CLASSIC, *MUJOCO, made("Hidden"), made("Both"), made("Limit"), ATARI, DM_CONTROL, BOX2D]


class Halving(made_envs.Spaced):
    """Rewards an action, and halves it in place."""

    def __init__(self):
        super().__init__(gymnasium.spaces.Box(-9, 9, (2,)), gymnasium.spaces.Box(-1, 1, (2,)))

    def step(self, action):
        reward = float(action.sum())
        action /= 2
        return self.show(), reward, False, False, {}


class Sharing(made_envs.Hidden):
    """Shows the same array as all of these envs."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    shown = np.zeros(2, np.float32)

    def show(self):
        self.shown[:] = self.place, self.time
        return self.shown


def same(one, other):
    return all(
        (a is None and b is None) or (a.dtype == b.dtype and np.array_equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


def by_hand(name, index, actions, seed=3):
    """(reward, shown, first, truncated, final) of one env after each action, as one writes it."""
    env = gymnasium.make(name)
    space, episode = env.action_space, 0

    def reset():
        block = np.random.SeedSequence(seed, spawn_key=(index, episode // 64))
        return env.reset(seed=int(block.generate_state(64)[episode % 64] >> 1))[0]

    rows = [(0.0, reset(), True, False, None)]
    for action in actions:
        if not isinstance(space, gymnasium.spaces.Discrete):
            action = (space.low + space.high) / 2 + (space.high - space.low) / 2 * action
        shown, reward, terminated, truncated, _ = env.step(action)
        final = shown
        if terminated or truncated:
            episode += 1
            shown = reset()
        cut = truncated and not terminated
        rows.append((reward, shown, terminated or truncated, cut, final if cut else None))
    return rows


@pytest.mark.filterwarnings("ignore")  # Gymnasium's checker's
@pytest.mark.parametrize(
    "name", [*CLASSIC[:2], "InvertedDoublePendulum-v5", "HalfCheetah-v5", made("Hidden")]
)
def test_the_vector_env_equals_a_loop_over_gymnasiums_envs(name):
    env = vector(name, [0, 5])
    steps = [env.observe(), *play(env, 210)]
    generator, spec = np.random.default_rng(0), env.action_spec
    actions = np.array(
        [
            generator.integers(3 if "Hidden" in name else 2, size=2)
            if isinstance(spec, Discrete)
            else generator.uniform(-1, 1, (2, *spec.shape)).astype(np.float32)
            for _ in range(210)
        ]
    )
    for column, index in enumerate([0, 5]):
        for step, row in zip(steps, by_hand(name, index, actions[:, column]), strict=True):
            reward, shown, first, cut, final = row
            assert step.reward[column] == np.float32(reward)
            np.testing.assert_array_equal(step.observation[column], shown.astype(np.float32))
            assert (step.first[column], step.truncated[column]) == (first, cut)
            if cut:
                k = step.truncated[:column].sum()
                np.testing.assert_array_equal(step.final_observation[k], final.astype(np.float32))
    ends = np.array([step.first.sum() for step in steps[1:]])
    assert ends.sum() > 0 or name == "HalfCheetah-v5"


@pytest.mark.parametrize("name", EXACT)
def test_a_state_goes_into_other_envs_and_repeats_300_steps(name):
    env = vector(name, [0, 1, 2])
    assert env.exact_state
    play(env, 211)
    states, shown = env.get_state(), env.observe()
    expected = play(env, 300, seed=1)
    other = vector(name, [7, 8, 9], seed=99)
    play(other, 3)
    other.set_state(states)
    assert other.exact_state and same(other.observe(), shown)
    assert other.get_state() == states
    assert all(same(*pair) for pair in zip(play(other, 300, seed=1), expected, strict=True))
    env.set_state(states[::-1])
    assert same(env.observe()[:4], [x[::-1] for x in shown[:4]])


def test_a_state_is_exact_in_a_fresh_process(tmp_path):
    names = [*CLASSIC, *MUJOCO, made("Hidden")]
    saved, expected = {}, {}
    for name in names:
        env = vector(name, [0, 4])
        play(env, 200 if name == "Pendulum-v1" else 150)  # Pendulum shows a truncation
        saved[name] = [state.hex() for state in env.get_state()]
        expected[name] = [True, digest([env.observe(), *play(env, 300, seed=1)])]
    run = [sys.executable, made_envs.__file__, str(tmp_path / "digests")]
    subprocess.run(run, input=json.dumps(saved), text=True, check=True, cwd=tmp_path)
    assert json.loads((tmp_path / "digests").read_text()) == expected


@pytest.mark.parametrize("steps", [0, 1, 59, 60, 61])
def test_a_state_is_exact_at_the_edges_of_an_episode(steps):
    env, other = vector(made("Hidden"), [0, 1]), vector(made("Hidden"), [0, 1])
    play(env, steps)
    other.set_state(env.get_state())
    assert same(env.observe(), other.observe()) and (env.solved() == other.solved()).all()
    other.set_state(other.get_state())  # twice in a row
    assert all(same(*pair) for pair in zip(play(env, 100, 1), play(other, 100, 1), strict=True))


@pytest.mark.parametrize("indices", [[0, 1, 2], [5, 0], [2]])
@pytest.mark.parametrize("name", ["CartPole-v1", "Hopper-v5", made("Hidden")])
def test_a_slice_of_the_global_vector_is_the_same_envs(name, indices):
    whole, part = vector(name, range(6)), vector(name, indices)
    generator, spec = np.random.default_rng(0), whole.action_spec
    assert same(part.observe()[:4], [x[indices] for x in whole.observe()[:4]])
    for _ in range(80):
        shape = (6, *spec.shape)
        action = (
            generator.integers(2, size=shape) if spec.dtype == "int32" else generator.uniform(-1, 1, shape)
        )
        whole.act(action)
        part.act(action[indices])
        all_of, some = whole.observe(), part.observe()
        assert same(some[:4], [x[indices] for x in all_of[:4]])


def test_a_seed_and_an_index_decide_everything():
    shown = {
        (seed, i): vector("CartPole-v1", [i], seed=seed).observe().observation.tobytes()
        for seed in (0, 1, 2**63)
        for i in range(3)
    }
    assert len(set(shown.values())) == len(shown)
    episodes = [step.observation[0].tobytes() for step in play(vector(made("Limit"), [0]), 200)]
    assert len(set(episodes)) == 200  # each begins by a seed of its own


def test_later_steps_do_not_change_a_step():
    env = vector("Pendulum-v1", range(2))
    steps = play(env, 199)
    kept = [[None if x is None else x.copy() for x in step] for step in [*steps, *play(env, 1)]]
    steps.append(env.observe())
    assert steps[-1].truncated.all() and steps[-1].final_observation.shape == (2, 3)
    play(env, 5)
    env.set_state(env.get_state())
    assert all(same(*pair) for pair in zip(steps, kept, strict=True))
    assert env.observe() is env.observe()


def test_terminated_and_truncated_at_once_counts_as_terminated():
    """Env 0 terminates (by action 0), env 1 is cut off (1), env 2 does both (2), env 3 is cut off (1)."""
    env = vector(made("Both"), range(4))
    seen = []
    for time in range(1, 21):
        env.act(np.array([0, 1, 2, 1]))
        step = env.observe()
        if step.first.any():
            seen.append(
                (time, step.first.tolist(), (step.first & ~step.truncated).tolist(), step.truncated.tolist())
            )
            if step.truncated.any():
                assert step.final_observation[:, 1].tolist() == [15.0] * step.truncated.sum()
                assert step.observation[step.truncated, 1].tolist() == [0.0, 0.0]
            else:
                assert step.final_observation is None
    none, at_10, at_15, at_20 = (np.isin(range(4), who).tolist() for who in ([], [0], [1, 3], [0, 2]))
    assert seen == [(10, at_10, at_10, none), (15, at_15, none, at_15), (20, at_20, at_20, none)]


def test_final_observations_come_in_the_order_of_the_envs():
    env = vector("Pendulum-v1", range(3))
    play(env, 150)
    states = env.get_state()
    env = vector("Pendulum-v1", range(3))
    play(env, 100)
    env.set_state([states[0], env.get_state()[1], states[2]])  # envs 0 and 2 are 50 steps ahead
    step = play(env, 50)[-1]
    assert step.truncated.tolist() == [True, False, True] and step.final_observation.shape == (2, 3)
    again = vector("Pendulum-v1", range(3), seed=8)
    again.set_state(env.get_state())
    assert same(again.observe(), step)
    lone = vector("Pendulum-v1", [2])
    lone.set_state([env.get_state()[2]])
    np.testing.assert_array_equal(lone.observe().final_observation[0], step.final_observation[1])


@pytest.mark.parametrize("name", ["Unseeded", "Counting", "LateUnseeded"])
def test_an_env_that_a_seed_does_not_repeat_begins_a_new_episode(name):
    """The old episode counts as truncated at its last observation, so a learner bootstraps from it."""
    env = vector(made(name), [4])
    running = 0
    while running < 45:  # LateUnseeded is itself for 40 steps
        running = 0 if play(env, 1)[0].first[0] else running + 1
    step, states = env.observe(), env.get_state()
    other = vector(made(name), [0])
    play(other, 7)
    other.set_state(states)
    anew = other.observe()
    assert not other.exact_state
    assert anew.first.all() and anew.truncated.all()
    np.testing.assert_array_equal(anew.final_observation, step.observation)
    np.testing.assert_array_equal(anew.reward, step.reward)
    assert not np.array_equal(anew.observation, step.observation)
    again = vector(made(name), [0])
    again.set_state(other.get_state())  # the episode that has just begun, and the end of the last one
    assert same(again.observe()[2:], anew[2:])
    assert len(play(again, 70)) == 70


def test_an_episode_too_long_to_replay_begins_anew_and_its_state_stays_small(monkeypatch):
    monkeypatch.setattr(family, "LONGEST_REPLAY", 40)
    env = vector(made("Lopsided"), [0, 1])  # its episodes never end
    play(env, 40)
    other = vector(made("Lopsided"), [0, 1])
    other.set_state(env.get_state())
    assert other.exact_state and same(other.observe(), env.observe())
    for vec in (env, other):  # one more is too many, in an env that was replayed, too
        play(vec, 1)
        third = vector(made("Lopsided"), [0, 1])
        third.set_state(vec.get_state())
        assert not third.exact_state and third.observe().truncated.all()
    size = max(map(len, env.get_state()))
    third.set_state(vector(made("Lopsided"), [0, 1]).get_state())
    assert third.exact_state  # it speaks of the last set_state
    play(env, 100)
    assert max(map(len, env.get_state())) <= size + 8  # digits


def test_a_long_episode_does_not_affect_other_envs(monkeypatch):
    monkeypatch.setattr(family, "LONGEST_REPLAY", 70)
    env, ahead, other = (vector("Pendulum-v1", [0, 1]) for _ in range(3))
    play(ahead, 60)
    env.set_state([ahead.get_state()[0], env.get_state()[1]])
    shown = play(env, 30)[-1]  # env 0 has played 90 steps, env 1 30
    other.set_state(env.get_state())
    step = other.observe()
    assert not other.exact_state and step.truncated.tolist() == [True, False]
    np.testing.assert_array_equal(step.final_observation[0], shown.observation[0])
    for one, two in zip(play(env, 100, seed=1), play(other, 100, seed=1), strict=True):
        np.testing.assert_array_equal(one.observation[1], two.observation[1])


def test_actions_and_observations_are_converted():
    """Ints start at 5 there; a Box from 0 to 0.5 and -3 to 1 is acted upon in [-1, 1]; pixels stay pixels."""
    ints = vector(made("Ints"), [0, 1])
    assert (ints.observation_spec, ints.action_spec) == (ArraySpec((3,), "float32"), Discrete(3, start=5))
    ints.act(np.array([0, 2], np.int32))
    assert ints.observe().observation.tolist() == [[5.0] * 3, [7.0] * 3]
    box = vector(made("Lopsided"), [0, 1, 2])
    assert box.action_spec == Box((0.0, -3.0), (0.5, 1.0), "float64") and box.action_spec.shape == (2,)
    assert box.action_spec.env_dtype == "float64" and box.action_spec == Box((0.0, -3.0), (0.5, 1.0))
    box.act(np.array([[-1, -1], [1, 1], [0, 0.5]], np.float32))
    assert box.observe().observation.tolist() == [[0, -3], [0.5, 1], [0.25, 0]]
    box.act(np.full((3, 2), 1.0000001, np.float32))
    assert box.observe().observation.tolist() == [[0.5, 1]] * 3
    for name, most in (("Wide", 1e38), ("Half", 65504)):  # whose width overflows, or nearly so
        spec = action_spec(name, make_env(made(name)).action_space)
        given = spec.as_env_takes(np.array([[-1, 1], [0, 0.5]], np.float32))
        np.testing.assert_allclose(given, np.float32([[-most, most], [0, most / 2]]), rtol=1e-3)
    frames, shown = vector(made("Frames"), [0]), make_env(made("Frames")).reset(seed=0)[0]
    assert frames.observation_spec == ArraySpec(
        (20, 20, 4), "uint8", Layout("CHW", (4, 20, 20), "uint8", 255)
    )
    np.testing.assert_array_equal(frames.observe().observation[0], np.moveaxis(shown, 0, -1))
    pixels = vector(made("Pixels"), [0])
    assert pixels.observation_spec == ArraySpec((8, 6, 3), "uint8")
    assert play(pixels, 1)[0].observation.dtype == np.uint8
    assert find_facts("Pendulum-v1")[:2] == (ArraySpec((3,), "float32"), Box((-2.0,), (2.0,)))


def test_a_skip_of_frames_sums_rewards_to_the_end_of_the_episode():
    steps = play(vector(made("Fifty"), [0], frame_skip=3), 18)
    assert [step.reward[0] for step in steps] == [3.0] * 16 + [2.0, 3.0]
    assert [step.first[0] for step in steps] == [False] * 16 + [True, False]


def test_a_skip_of_frames_repeats_an_action_that_the_env_changes():
    env = vector(registry.name_of(Halving), [0, 1], frame_skip=3)
    env.act(np.array([[1, 1], [0.5, 0]], np.float32))
    assert env.observe().reward.tolist() == [6.0, 1.5]


def test_envs_that_share_an_array_begin_with_their_own_observations():
    name = registry.name_of(Sharing)
    env, alone = vector(name, range(3)), [vector(name, [i]) for i in range(3)]
    shown = np.concatenate([each.observe().observation for each in alone])
    np.testing.assert_array_equal(env.observe().observation, shown)
    assert len(set(shown[:, 0])) == 3


@pytest.mark.parametrize("settings", [{"max_episode_steps": 25}, {"max_episode_steps": 25, "frame_skip": 3}])
def test_a_time_limit_takes_the_place_of_the_registered_one(settings):
    """Replaces CartPole's 500 steps and a made env's 60; the state is exact at each step."""
    env = vector(made("Hidden"), [0, 1, 2], **settings)
    plain = vector(made("Hidden"), [0, 1, 2], frame_skip=settings.get("frame_skip"))
    for one, two in zip(play(env, 7), play(plain, 7), strict=True):
        assert same(one, two)
    lengths = np.full(3, 7)
    for step in range(60):
        other = vector(made("Hidden"), [5, 6, 7], seed=9, **settings)
        other.set_state(env.get_state())
        assert other.exact_state and same(other.observe(), env.observe())
        after = play(env, 1, seed=step)[0]
        assert same(play(other, 1, seed=step)[0], after)
        lengths += 1
        assert (after.truncated == (lengths == 25)).all() or (after.first & ~after.truncated).any()
        lengths[after.first] = 0
    assert vector("CartPole-v1", [0], max_episode_steps=501)._envs[0].spec.max_episode_steps is None


@needs("ale_py")
@pytest.mark.parametrize("settings", [{"max_episode_steps": 30}, {"max_episode_steps": 30, "frame_skip": 2}])
def test_a_time_limit_of_atari_is_in_its_state(settings):
    env, other = vector("ALE/Pong-v5", [0, 1], **settings), vector("ALE/Pong-v5", [3, 4], **settings)
    play(env, 25)
    other.set_state(env.get_state())
    steps, again = play(env, 40, seed=1), play(other, 40, seed=1)
    assert all(same(*pair) for pair in zip(steps, again, strict=True))
    assert [i for i, step in enumerate(steps) if step.truncated.all()] == [4, 34]


@needs("ale_py")
@pytest.mark.parametrize("name", ["ALE/Breakout-v5", "ALE/Pong-v5"])
def test_a_state_of_atari_is_exact_with_sticky_actions(name):
    """The emulator repeats a quarter of the actions; only the first episode has a seed."""
    settings = {"max_episode_steps": 25}
    env, other = vector(name, [0, 1], **settings), vector(name, [3, 4], seed=8, **settings)
    for seed, steps in enumerate([0, 7, 13, 5, 1, 9, 20, 4, 6, 17]):
        play(env, steps, seed=seed)
        other.set_state(env.get_state())
        assert other.exact_state and same(other.observe(), env.observe())
        for pair in zip(play(env, 10, seed=seed + 100), play(other, 10, seed=seed + 100), strict=True):
            assert same(*pair)


def test_success_is_what_the_env_says_of_its_last_episode():
    env, other, said = vector(made("Hidden"), [0, 1]), vector(made("Hidden"), [0, 1]), []
    assert not env.solved().any()
    for seed in range(300):
        said.extend(env.solved()[play(env, 1, seed)[0].first].tolist())
        if seed % 10 == 0:
            other.set_state(env.get_state())
            assert other.solved().tolist() == env.solved().tolist()
    assert set(said) == {True, False}


@needs("ale_py")
def test_atari_has_the_usual_preprocessing():
    assert find_facts("ALE/Pong-v5")[:2] == (ArraySpec((84, 84, 4), "uint8"), Discrete(6))
    assert find_facts("ALE/Pong-v5") == find_facts("PongNoFrameskip-v4")
    rates = [registry.frames_per_second(Task(env="ALE/Pong-v5", frame_skip=skip)) for skip in (None, 4, 2)]
    assert rates == [15, 15, 30]
    steps = play(vector("ALE/Pong-v5", [0]), 20)
    for before, after in zip(steps, steps[1:], strict=False):  # frames move through the stack
        np.testing.assert_array_equal(after.observation[..., :3], before.observation[..., 1:])
