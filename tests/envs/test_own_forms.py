"""Users' envs as they are: images of any layout, masks from anywhere, actions of any shape, and advice."""

import dataclasses
import os
import re

import formed_envs
import gymnasium
import numpy as np
import packed_envs
import pytest
import tensorflow as tf
from formed_envs import byte_box
from gymnasium import spaces
from made_envs import vector
from processes import ROOT

import tfrl
from tfrl.algorithms.registry import reader
from tfrl.cli.errors import EnvError
from tfrl.envs import registry
from tfrl.envs.facts import find_facts
from tfrl.envs.making import observation_spec
from tfrl.envs.spec import Discrete, EnvSpec
from tfrl.experience.recorded import Spaces
from tfrl.networks.entrance import Entrance

os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")))

LAYOUTS = [  # a space, the axes in it, the shape of the network's image
    (byte_box(4, 64, 64, 3), "NHWC", (64, 64, 12)),
    (byte_box(4, 3, 64, 48), "NCHW", (64, 48, 12)),
    (byte_box(4, 84, 84, 1), "NHWC", (84, 84, 4)),
    (byte_box(64, 64, 3, 4), "HWCN", (64, 64, 12)),
    (byte_box(4, 7, 7, 3), "NHWC", (7, 7, 12)),
    (byte_box(84, 84), "HW", (84, 84, 1)),
    (byte_box(3, 64, 48), "CHW", (64, 48, 3)),
    (byte_box(8, 8, 12, high=1), "HWC", (8, 8, 12)),
    (spaces.Box(0, 1, (64, 64, 3), np.float32), "HWC", (64, 64, 3)),
    (spaces.Box(0, 1, (3, 64, 64), np.float64), "CHW", (64, 64, 3)),
    (spaces.Box(0, 255, (64, 48, 3), np.float32), "HWC", (64, 48, 3)),
    (spaces.Box(0, 255, (64, 48, 3), np.int64), "HWC", (64, 48, 3)),
    (spaces.Box(0, 1, (4, 64, 64, 3), np.float32), "NHWC", (64, 64, 12)),
]
NUMBERS = [  # no images
    byte_box(6, 7),
    byte_box(19, 19, high=2),
    byte_box(32, 32, 32, 1),
    spaces.Box(0, 1, (8, 8, 1), np.float32),
    spaces.Box(0, 1, (20, 30), np.float32),
    spaces.Box(-1, 1, (64, 64, 3), np.float32),
    spaces.Box(0, 1, (64, 64, 3), np.int8),
]


def by_hand(shown, space, axes):
    """The image of a network, by loops."""
    sizes = dict(zip(axes, space.shape, strict=True))
    frames, channels = sizes.get("N", 1), sizes.get("C", 1)
    image = np.zeros((sizes["H"], sizes["W"], frames * channels), np.float64)
    for n in range(frames):
        for c in range(channels):
            at = {"N": n, "C": c, "H": slice(None), "W": slice(None)}
            image[:, :, n * channels + c] = shown[tuple(at[axis] for axis in axes)]
    return np.rint(image * (255 / float(space.high.flat[0]))).astype(np.uint8)


@pytest.mark.parametrize(("space", "axes", "shape"), LAYOUTS, ids=lambda x: str(x)[:28])
def test_an_image_of_any_layout_is_an_image(space, axes, shape):
    spec = observation_spec("It-v0", space)
    assert (spec.shape, spec.dtype, spec.env_shape) == (shape, "uint8", space.shape)
    env = formed_envs.Shown(space)
    shown = np.stack([env.reset(seed=seed)[0] for seed in range(3)])
    expected = np.stack([by_hand(one, space, axes) for one in shown])
    store = spec.store()
    np.testing.assert_array_equal(np.stack([store(one) for one in shown]), expected)
    np.testing.assert_array_equal(Entrance(spec).rows([tf.constant(shown)]), expected)
    inside = observation_spec("It-v0", spaces.Dict(seen=space, more=spaces.Discrete(3)))
    rows = np.stack([inside.store()({"seen": one, "more": 1}) for one in shown])
    np.testing.assert_array_equal(Entrance(inside).inputs(tf.constant(rows))[0], expected)
    exported = [tf.constant(shown), tf.constant([1, 1, 1])]
    np.testing.assert_array_equal(Entrance(inside).rows(exported), rows)
    assert str(list(space.shape)) in str(spec)
    alone, both = Spaces(spec, Discrete(2)), Spaces(inside, Discrete(2))
    np.testing.assert_array_equal(alone.observations(expected, "It"), expected)  # a set of tfrl
    if (shape, np.uint8) != (space.shape, space.dtype):  # and one of another program
        np.testing.assert_array_equal(alone.observations(shown, "It"), expected)
        given = {"seen": shown, "more": np.ones(3, np.int64)}
        np.testing.assert_array_equal(both.observations(given, "It"), rows)


@pytest.mark.parametrize("space", NUMBERS, ids=str)
def test_an_array_that_may_be_no_image_stays_numbers(space):
    spec = observation_spec("It-v0", space)
    assert not spec.image_shapes and spec.num_numbers == np.prod(space.shape)


def test_numbers_beyond_the_bounds_of_an_image_give_a_one_sentence_error():
    store = observation_spec("It-v0", spaces.Box(0, 1, (20, 20, 3), np.float32)).store()
    with pytest.raises(ValueError, match="numbers from 255 to 255 where its observation_space says 0 to 1"):
        store(np.full((20, 20, 3), 255.0, np.float32))
    assert (store(np.full((20, 20, 3), 1.00001)) == 255).all()


SMALL = {"num_envs": 4, "num_steps": 16, "num_minibatches": 2, "epochs": 1, "eval_episodes": 4, "seed": 3}
SMALL |= {"total_steps": 128, "hidden": "8", "eager": True}  # few steps, and tracing takes longer


def trained(tmp_path, env, **settings):
    return tfrl.train("ppo", env=env, **SMALL | settings, logdir=str(tmp_path), run_name="run")


def signature(run):
    saved = tf.saved_model.load(str(run.folder / "export" / "policy"))
    return saved.signatures["serving_default"]


def test_policies_and_exports_take_images_as_the_env_shows_them(tmp_path):
    own = {name: value for name, value in SMALL.items() if name != "hidden"}
    run = tfrl.train("ppo", env="formed_envs:make_float_stack", torso="linear", logdir=str(tmp_path), **own)
    policy, made = tfrl.load(run.folder), formed_envs.make_float_stack()
    shown = np.stack([made.reset(seed=seed)[0] for seed in range(5)])
    actions = policy(shown)
    assert [policy(one) for one in shown] == actions.tolist()
    np.testing.assert_array_equal(signature(run)(tf.constant(shown))["action"], actions)
    assert len(tfrl.evaluate(policy, episodes=4, seed=1).returns) == 4
    with pytest.raises(tfrl.SettingsError, match=r"takes observations of \[2, 3, 20, 24\]"):
        policy(np.moveaxis(shown[0], 1, -1))
    with pytest.raises(tfrl.SettingsError, match="numbers from 0 to 255 where .* says 0 to 1"):
        policy(255 * (shown > 0.5).astype(np.float32))


@pytest.mark.parametrize("name", ["MaskInside", "make_many_inside", "MaskMethod", "make_masked_below"])
def test_a_mask_in_the_observation_or_by_a_method_is_used(name):
    """The envs fail if a forbidden action is taken."""
    task = EnvSpec(f"formed_envs:{name}", num_envs=6, seed=5)
    observation, action = registry.specs(task)
    assert observation.num_actions == action.mask_size and observation.vector_size == 2
    for processes in (0, 2):
        env = registry.make(dataclasses.replace(task, num_processes=processes))
        generator = np.random.default_rng(0)
        for _ in range(40):
            allowed = observation.allowed(env.observe().observation)
            assert not allowed.all()
            numbers = generator.random((6, max(1, len(action.shape) and action.shape[0])), np.float32)
            env.act(action.from_uniform(numbers, allowed))
        states, expected = env.get_state(), env.observe()
        env.set_state(states)
        assert env.exact_state
        np.testing.assert_array_equal(env.observe().observation, expected.observation)
        env.close()
    without, _ = registry.specs(dataclasses.replace(task, action_masks="never"))
    inside = "Inside" in name or "inside" in name
    assert not without.num_actions and without.vector_size == (2 + action.mask_size if inside else 2)


@pytest.mark.parametrize("name", ["MaskInside", pytest.param("MaskMethod", marks=pytest.mark.long)])
def test_a_policy_obeys_a_mask_in_the_observation_or_by_a_method(name, tmp_path, capfd):
    run = trained(tmp_path, f"formed_envs:{name}", env_processes=2)
    assert "".join(capfd.readouterr()).count("note: ") == 1
    policy, env = tfrl.load(run.folder), getattr(formed_envs, name)()
    shown, _ = env.reset(seed=4)
    for _ in range(30):
        mask = None if name == "MaskInside" else env.action_masks()
        action = policy.sample(shown, action_mask=mask)
        shown, _, terminated, truncated, _ = env.step(action)  # fails if it is forbidden
        if terminated or truncated:
            shown, _ = env.reset()
    tfrl.evaluate(policy, episodes=4, seed=1)
    if name == "MaskInside":
        batch = {key: tf.constant(np.stack([array] * 2)) for key, array in shown.items()}
        assert signature(run)(**batch)["action"].numpy().tolist() == [policy(shown)] * 2
        whole = {key: np.stack([array] * 2) for key, array in shown.items()}
        assert policy(whole).tolist() == [policy(shown)] * 2
        check_masks(policy, whole)


def check_masks(policy, batch):
    """A mask allows an action, and has as many rows as the batch of 2; a batch may be empty."""
    none = {key: array[:0] for key, array in batch.items()}
    for choose in (policy, policy.sample):
        assert choose(none).shape == (0,) and choose(none).dtype == np.int32
    for mask, said in (
        ([[1, 1, 1, 1, 1]] * 3, "an observation of 2 row(s) with an action_mask of [3, 5]."),
        ([[1, 0], [1]], "an action_mask with parts of different lengths."),
        ("all", "an action_mask with other numbers than 1 for allowed and 0 for forbidden actions."),
    ):
        with pytest.raises(tfrl.SettingsError, match=re.escape(said)):
            policy(batch, action_mask=mask)
    one = {key: array[0] for key, array in batch.items()}
    said = "action_mask forbids every action; it must allow at least one."
    with pytest.raises(tfrl.SettingsError, match=said):
        policy(one, action_mask=[0] * 5)
    # Gymnasium's vector envs ignore the action at the last observation of an episode.
    chosen = policy(batch, action_mask=[[0, 1, 0, 0, 0], [0] * 5])
    assert chosen.tolist() == [policy(one, action_mask=mask) for mask in ([0, 1, 0, 0, 0], [1] * 5)]


def test_a_part_of_an_action_without_allowed_values_is_named():
    env = vector("formed_envs:ZeroPart", [0])
    with pytest.raises(EnvError, match="forbids every value of part 1 of the action in its info"):
        for _ in range(9):
            allowed = env.observation_spec.allowed(env.observe().observation)
            env.act(env.action_spec.from_uniform(np.zeros((1, 2), np.float32), allowed))


def test_none_in_place_of_a_mask_gives_the_true_reason():
    sentence = 'gives info["action_mask"] = None, in reset(seed=..., options=...): give an array of 5 flags'
    with pytest.raises(EnvError, match=re.escape(sentence)):
        find_facts("formed_envs:NoMask")


@pytest.mark.parametrize("said", ["no", None, 2, np.array([True, False])])
@pytest.mark.parametrize("at", [0, 3])
def test_an_end_that_is_no_bool_gives_a_one_sentence_error(said, at):
    kwargs = {"terminated": said, "at": at}
    name = registry.name_of(lambda: formed_envs.Ends(**kwargs))
    with pytest.raises(EnvError, match=r"gave terminated = .*, in step\(action\): it must be True or False"):
        env = vector(name, [0, 1])
        for _ in range(5):
            env.act(np.zeros(2, np.int32))


@pytest.mark.parametrize("said", [np.True_, 1, np.array([True])])
def test_an_end_may_be_any_one_bool(said):
    env = vector(registry.name_of(lambda: formed_envs.Ends(said)), [0])
    env.act(np.zeros(1, np.int32))
    step = env.observe()
    assert step.first[0] and not step.truncated[0]


FORMS = ("make_switches", "make_table", "make_arms", "make_knob")


@pytest.mark.parametrize("name", FORMS)
def test_an_env_gets_actions_of_several_axes_in_its_own_form(name):
    """The env fails if an action is not in its space, with its shape and dtype."""
    env, generator = vector(f"formed_envs:{name}", range(3)), np.random.default_rng(0)
    for _ in range(20):
        env.act(env.action_spec.uniform(generator, 3))
    states, expected = env.get_state(), env.observe()
    env.set_state(states)
    assert env.exact_state == (name != "make_switches")  # its wrapper has a state
    if env.exact_state:
        np.testing.assert_array_equal(env.observe().observation, expected.observation)


@pytest.mark.parametrize("name", [FORMS[0], *(pytest.param(n, marks=pytest.mark.long) for n in FORMS[1:])])
def test_policies_give_actions_of_several_axes_in_the_envs_form(name, tmp_path, capfd):
    run = trained(tmp_path, f"formed_envs:{name}")
    warned = "".join(capfd.readouterr()).count("warning: the wrapper NormalizeReward in the env")
    assert warned == (name == "make_switches")
    policy, env = tfrl.load(run.folder), getattr(formed_envs, name)()
    shown = np.stack([env.reset(seed=seed)[0] for seed in range(3)])
    env.step(policy(shown[0]))
    env.step(policy.sample(shown[0], seed=1))
    actions = policy(shown)
    assert actions.shape == (3, *env.action_space.shape)
    exported = signature(run)(tf.constant(shown))["action"].numpy()
    np.testing.assert_allclose(exported, actions, rtol=1e-6)
    if name not in ("make_arms", "make_knob"):  # the exported policy gives float32
        assert all(map(env.action_space.contains, exported))


@pytest.mark.parametrize(
    ("space", "sentence"),
    [
        (spaces.Dict(a=spaces.Discrete(2)), "takes a Dict, which is not supported: actions must be Discrete"),
        (spaces.Tuple([spaces.Discrete(2)]), "a wrapper that flattens it to one of these helps"),
        (spaces.Box(0, 3, (2,), np.int64), "MultiDiscrete fits whole numbers"),
    ],
)
def test_other_action_spaces_give_a_one_sentence_error(space, sentence):
    name = registry.name_of(lambda: formed_envs.Shown(spaces.Box(0, 1, (2,), np.float32), space))
    with pytest.raises(ValueError, match=re.escape(sentence)):
        find_facts(name)


ADVICE = {
    "make_wide": ["actions go from -10000 to 10000; if the env clips them to less"],
    "make_flat": ["observation, float32 [32, 32, 32], is flattened to 32,768 numbers for an mlp"],
    "make_normalized": [
        "the wrapper NormalizeReward in the env normalises rewards, and reports returns in these units",
        "leave it out, and use --normalize-rewards",
        "the wrapper NormalizeObservation in the env normalises observations; its statistics begin anew",
        "leave it out, and use --normalize-observations",
    ],
    "make_global": ["the env draws from np.random, which all envs of a process share"],
    "make_switches": ["the wrapper NormalizeReward in the env"],
    "make_table": [],
    "make_stack": [],
}


@pytest.mark.parametrize("name", ADVICE)
def test_warnings_about_an_env(name):
    found = find_facts(f"formed_envs:{name}").warnings
    for sentence in ADVICE[name]:
        assert any(sentence in each for each in found), found
    assert bool(ADVICE[name]) == bool(found)


def test_an_env_that_draws_from_a_global_generator_never_resumes_exactly():
    for generator in ("np.random", "random"):
        name = registry.name_of(lambda generator=generator: formed_envs.Global(generator))
        env, other = vector(name, [0]), vector(name, [0])
        env.act(np.zeros(1, np.int32))
        other.set_state(env.get_state())
        assert find_facts(name).draws_globally and not other.exact_state
    once = registry.name_of(lambda: formed_envs.Global(once=True))
    assert not find_facts(once).draws_globally and not find_facts(once).warnings


@pytest.mark.parametrize("name", ["make_stack", "make_float_stack", "MaskInside", "make_table", "make_arms"])
def test_facts_of_such_envs_go_through_a_file(name, tmp_path, monkeypatch):
    from tfrl.envs import facts

    monkeypatch.setattr(facts, "_known", {})
    task = EnvSpec(f"formed_envs:{name}", num_envs=1, seed=1)
    found = facts.facts_of(task)
    (tmp_path / facts.FACTS_FILE).write_text(registry.facts_text(task))
    facts.remember_facts(tmp_path)
    again = facts.facts_of(task)
    assert again is not found and again == found
    assert dataclasses.asdict(again.action) == dataclasses.asdict(found.action)


def test_images_choose_the_torso_of_images():
    assert reader("ppo").parse(["--env", "formed_envs:make_stack"]).torso == "impala"


@pytest.mark.parametrize(
    ("space", "shown", "sentence"),
    [
        (spaces.Discrete(5), 2.5, "2.5, which its observation_space does not have"),
        (spaces.Box(-1, 1, (3,)), [[1], 2, 3], "a value of type list where its observation_space says"),
        (spaces.Box(-1, 1, (3,)), spaces.Discrete(3), "a value of type Discrete where its observation_space"),
    ],
)
def test_an_observation_that_a_cast_would_change_is_refused(space, shown, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        observation_spec("It-v0", space).store()(shown)


class Old:
    __module__ = "gym.core"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: gymnasium.make_vec("CartPole-v1", 2), "return one env, of which --num-envs makes a vector"),
        (lambda: formed_envs.Shown, "return an object of this class"),
        (Old, "for an env of Gym, return shimmy.GymV21CompatibilityV0"),
    ],
)
def test_what_is_no_env_gets_advice(make, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        find_facts(registry.name_of(make))


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        (
            {"max_episode_steps": 9},
            "the time limit within the env, 7 steps, comes before --max-episode-steps",
        ),
        ({"action_masks": "never"}, "the action masks of formed_envs:make_masked_below are not used"),
    ],
)
def test_settings_without_an_effect_are_told(settings, note):
    notes, _ = registry.advice(EnvSpec("formed_envs:make_masked_below", num_envs=1, seed=1, **settings))
    assert any(each.startswith(note) for each in notes)


def test_a_mask_that_is_none_is_an_input():
    space = spaces.Dict(action_mask=byte_box(4, high=1), observation=spaces.Box(-1, 1, (2,), np.float32))
    name = registry.name_of(lambda: packed_envs.Alone(space))
    found = find_facts(name)
    assert not found.mask_source and found.observation.num_numbers == 6
    assert found.notes == (
        'observation["action_mask"] is an input of the network and not a mask, because the actions need 2 '
        "flags, and it has 4",
    )
