"""What Gymnasium knows of an id, and what is wrong with one, in a sentence."""

import importlib.util

import pytest
from made_envs import made
from processes import without_display

from tfrl.envs.gymnasium_ids import can_repeat, reward_threshold, specs_of, time_limit


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("CartPole", "there is no env 'CartPole' (did you mean CartPole-v1?)"),
        ("CartPole-v7", "there is no env 'CartPole-v7' (did you mean CartPole-v1?)"),
        ("cartpol-v1", "did you mean CartPole-v1?"),
        ("Pendulum-v0", "did you mean Pendulum-v1?"),
        ("HalfCheeta-v5", "did you mean HalfCheetah-v5?"),
        ("Hopper-v3", "Hopper-v3 is an old version that Gymnasium no longer has (did you mean Hopper-v5?)"),
        ("GymV21Environment-v0", "is a shell for an env of old Gym, which must be given to it in Python"),
        pytest.param("PongNoFrameskip-v4", "missing: pip install ale-py", id="atari-old"),
        pytest.param("Pong-v5", "missing: pip install ale-py", id="atari-bare"),
        ("coin run", "'coin run' is no id of an env"),
        ("", "'' is no id of an env"),
        ("a:b:CartPole-v1", "a:b"),
        ("no_such_module:CartPole-v1", "needs the module no_such_module, which cannot be imported"),
        ("nothing/like-this-v0", "there is no env 'nothing/like-this-v0'"),
        pytest.param("LunarLander-v3", "pip install 'gymnasium[box2d]'", id="box2d"),
        pytest.param("ALE/Pong-v5", "pip install ale-py", id="atari"),
        pytest.param("dm_control/cheetah-run-v0", "pip install 'shimmy[dm-control]'", id="dm_control"),
        ("Blackjack-v1", "shows a Tuple"),
        ("Taxi-v4", "shows a Discrete"),
        (made("Dict"), "shows a Dict"),
        (made("Tuple"), "shows a Tuple"),
        (made("Depth"), "shows a Box of float32 [8, 8, 1]"),
        (made("Many"), "takes a MultiDiscrete"),
        (made("Whole"), "takes a Box of int64 [2]"),
        (made("Unbounded"), "takes actions without bounds"),
        (made("Huge"), "between -3.4e+38 and 3.4e+38, which is as good as without bounds"),
        (made("Huge64"), "between -1.7e+308 and 1.7e+308, which is as good as without bounds"),
    ],
)
def test_what_is_wrong_with_an_id_is_one_sentence(name, complaint, request):
    package = {"box2d": "Box2D", "dm_control": "shimmy"}
    package |= dict.fromkeys(("atari", "atari-old", "atari-bare"), "ale_py")
    if any(f"[{key}]" in request.node.name and importlib.util.find_spec(package[key]) for key in package):
        pytest.skip("its package is installed")
    with pytest.raises(ValueError) as error:
        specs_of(name)
    assert complaint in str(error.value) and "\n" not in str(error.value) and ". " not in str(error.value)


def test_a_missing_mujoco_is_named(tmp_path):
    code = "import sys; sys.modules['mujoco'] = None; from made_envs import *; vector('Ant-v5', [0])"
    assert without_display(code, tmp_path).stderr.splitlines()[-1] == (
        "ValueError: Ant-v5 needs a package that is missing: pip install mujoco"
    )


def test_what_gymnasium_knows_of_an_id():
    assert (reward_threshold("CartPole-v1"), time_limit("CartPole-v1")) == (475.0, 500)
    assert (reward_threshold("InvertedDoublePendulum-v5"), time_limit("HalfCheetah-v5")) == (9100.0, 1000)
    assert (reward_threshold("Pendulum-v1"), time_limit(made("Endless"))) == (None, None)
    assert can_repeat("CartPole-v1") and not can_repeat(made("Unseeded"))
    with pytest.raises(ValueError, match="no env"):
        time_limit("CartPole-v7")
