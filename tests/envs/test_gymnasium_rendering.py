"""Gymnasium's envs are drawn without a display; what that needs is named."""

import ctypes.util

import pytest
from made_envs import made, vector
from processes import without_display

from tfrl.envs.making import make_env


def test_mujoco_writes_no_log_into_the_folder_and_nothing_is_printed(tmp_path):
    code = "from made_envs import *; [play(vector(n + '-v5', [0]), 5) for n in ('HalfCheetah', 'Ant')]"
    result = without_display(code, tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def test_classic_control_is_rendered_without_a_display(tmp_path):
    code = """
from made_envs import *
env = vector("CartPole-v1", [0, 1], render=True)
before = env.render()
play(env, 9)
after = env.render()
assert [x.shape for x in after] == [(400, 600, 3)] * 2 and after[0].dtype == np.uint8
assert (before[0] != after[0]).any() and (after[0] != after[1]).any()
"""
    result = without_display(code, tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.skipif(not ctypes.util.find_library("EGL"), reason="libegl1 is not installed")
def test_mujoco_is_rendered_without_a_display(tmp_path):
    code = """
from made_envs import *
env = vector("InvertedPendulum-v5", [0], render=True)
before = env.render()[0]
play(env, 20)
after = env.render()[0]
assert after.ndim == 3 and after.dtype == np.uint8 and before.std() > 10 and (before != after).any()
"""
    result = without_display(code, tmp_path)
    assert result.returncode == 0, result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("gl", ["glfw", "osmesa"])
def test_missing_packages_for_rendering_are_named(gl, tmp_path):
    if gl == "osmesa" and ctypes.util.find_library("OSMesa"):
        pytest.skip("libosmesa6 is installed")
    code = "from made_envs import *\nvector('InvertedPendulum-v5', [0], render=True).render()"
    result = without_display(code, tmp_path, MUJOCO_GL=gl)
    said = [line for line in result.stderr.splitlines() if line.startswith("ValueError: ")][-1]
    assert "InvertedPendulum-v5 cannot be" in said


def test_an_env_that_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="cannot be made: TypeError"):
        vector(made("Hidden"), [0], render=True)


@pytest.mark.parametrize("mode", ["rgb_array", "human"])
def test_an_env_is_drawn_whatever_render_mode_its_keyword_arguments_name(mode):
    env = make_env("CartPole-v1", f'{{"render_mode": "{mode}"}}', render=True)
    env.reset(seed=0)
    assert env.render().shape == (400, 600, 3)
    env.close()
