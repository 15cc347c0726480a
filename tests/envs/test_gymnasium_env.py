"""What Gymnasium knows of an id, and what is wrong with one, in a sentence."""

import importlib.util
import re

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from made_envs import made
from packed_envs import packed
from processes import without_display

from tfrl.envs import callables, facts, registry
from tfrl.envs.facts import find_facts
from tfrl.envs.making import make_env, observation_spec
from tfrl.envs.registry import reward_threshold
from tfrl.envs.spec import EnvSpec


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("CartPole", "there is no env 'CartPole' (did you mean CartPole-v"),
        ("CartPole-v7", "there is no env 'CartPole-v7' (did you mean CartPole-v1?)"),
        ("cartpol-v1", "did you mean CartPole-v1?"),
        ("Pendulum-v0", "did you mean Pendulum-v1?"),
        ("HalfCheeta-v5", "did you mean HalfCheetah-v5?"),
        ("Hopper-v3", "have been moved to the gymnasium-robotics project"),
        ("GymV21Environment-v0", "shimmy[gym-v21]"),
        ("Hopper-v6", "(did you mean Hopper-v5?)"),
        (
            "Xqzzy-v0",
            "there is no env 'Xqzzy-v0'; if your own module registers it, write MODULE:Xqzzy-v0",
        ),
        ("made_envs:made/Pixel-v0", "(did you mean made_envs:made/Pixels-v0?)"),
        ("coin run", "there is no env 'coin run'"),
        ("", "there is no env ''"),
        ("a:b:CartPole-v1", "a:b"),
        ("no_such_module:CartPole-v1", "needs the module no_such_module, which cannot be imported"),
        ("nothing/like-this-v0", "there is no env 'nothing/like-this-v0'"),
        pytest.param("LunarLander-v3", "gymnasium[box2d]", id="box2d"),
        (made("Several"), "shows a Sequence at a, which is not supported"),
        (made("Nothing"), "has empty observations: a Dict without any numbers"),
        (made("Whole"), "takes a Box of int64 [2], which is not supported"),
        (made("Unbounded"), "takes actions without bounds"),
        (made("Huge"), "between -3.4e+38 and 3.4e+38, which are hardly bounds"),
        (made("Huge64"), "between -1.7e+308 and 1.7e+308, which are hardly bounds"),
    ],
)
def test_a_wrong_id_gives_a_one_sentence_error(name, complaint, request):
    if "[box2d]" in request.node.name and importlib.util.find_spec("Box2D"):
        pytest.skip("its package is installed")
    with pytest.raises(ValueError) as error:
        find_facts(name)
    assert complaint in str(error.value) and "\n" not in str(error.value) and ". " not in str(error.value)


def test_missing_packages_of_atari_are_named(tmp_path):
    code = "import sys; sys.modules['ale_py'] = None; from made_envs import *; vector('ALE/Pong-v5', [0])"
    last = without_display(code, tmp_path).stderr.splitlines()[-1]
    assert last.endswith("Atari's games need: pip install ale-py 'opencv-python-headless<4.12'")


def test_a_missing_mujoco_is_named(tmp_path):
    code = "import sys; sys.modules['mujoco'] = None; from made_envs import *; vector('Ant-v5', [0])"
    assert without_display(code, tmp_path).stderr.splitlines()[-1] == (
        "ValueError: Ant-v5 cannot be made: DependencyNotInstalled: MuJoCo is not "
        'installed, run `pip install "gymnasium[mujoco]"`'
    )


IMAGES = [  # as an env shows them, and the axis of their channels, if it can be told
    *(((84, 84, 4), 2), ((7, 7, 3), 2), ((8, 6, 3), 2), ((8, 8, 12), 2), ((40, 60, 24), 2), ((10, 5, 1), 2)),
    *(((4, 84, 84), 0), ((1, 60, 40), 0), ((12, 8, 8), 0), ((3, 96, 128), 0)),
    *(((3, 3, 3), None), ((64, 64, 64), None), ((4, 84, 4), None), ((2, 50, 3), None), ((6, 9, 8), None)),
]


@pytest.mark.parametrize(("shape", "axis"), IMAGES)
def test_the_shape_of_an_image_tells_where_its_channels_are(shape, axis):
    space = spaces.Box(0, 255, shape, np.uint8)
    if axis is None:
        with pytest.raises(ValueError, match="does not tell whether the first or the last number counts"):
            observation_spec("It-v0", space)
        return
    spec = observation_spec("It-v0", space)
    assert (spec.layout is not None) is (axis == 0) and spec.env_shape == shape
    assert spec.shape == (shape if axis == 2 else (*shape[1:], shape[0]))


def test_keyword_arguments_decide_what_an_env_shows():
    sizes = [find_facts(made("Sized"), f'{{"size": {size}}}').observation.shape for size in (3, 8)]
    assert sizes == [(3,), (8,)]
    for kwargs, sentence in (
        ("{}", "cannot be made: TypeError"),
        ('{"sise": 3}', 'with {"sise": 3}'),
    ):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            find_facts(made("Sized"), kwargs)


def test_the_reward_threshold_of_an_id_is_gymnasiums():
    assert (reward_threshold("CartPole-v1"), reward_threshold("Pendulum-v1")) == (475.0, None)
    assert reward_threshold("CartPole-v7") is reward_threshold("coinrun") is None


@pytest.mark.parametrize("env", ["CartPole-v1", made("Lopsided"), packed("Dict"), packed("MaskedMany")])
def test_facts_about_an_env_go_through_a_file(env, tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "_known", {})
    task = EnvSpec(env, num_envs=1, seed=1)
    found = facts.facts_of(task)
    (tmp_path / facts.FACTS_FILE).write_text(registry.facts_text(task))
    facts.remember_facts(tmp_path)
    assert facts.facts_of(task) is not found and facts.facts_of(task) == found


def test_a_function_without_render_mode_is_told_what_videos_need():
    name = callables.give(lambda: gymnasium.make("CartPole-v1"))
    with pytest.raises(ValueError, match="its render_mode is not rgb_array; let it take render_mode"):
        make_env(name, render=True)
