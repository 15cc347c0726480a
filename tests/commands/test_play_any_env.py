"""Videos and windows of Gymnasium's envs: continuous actions, any frames."""

import contextlib
import os
import shutil
import subprocess
import sys
import time

import imageio.v3 as imageio
import numpy as np
import pytest
from scripted import Acting

from tfrl import record
from tfrl.cli.errors import UserError
from tfrl.envs.gymnasium import GymnasiumVec
from tfrl.envs.observations import ArraySpec
from tfrl.envs.spec import Box, Discrete, EnvSpec
from tfrl.envs.subprocesses import SubprocessVecEnv
from tfrl.experience.episodes import play
from tfrl.record import UniformPolicy
from tfrl.reporting import video

_CHOSEN = np.array([255, 190, 60])  # the colour of what was done


class Pictures:
    """Envs that show frames of one size."""

    def __init__(self, shape, action_spec, count=1):
        self.frames = [np.full(shape, 200, np.uint8)] * count
        self.action_spec = action_spec

    def render(self):
        return self.frames


def drawn(env, actions, probabilities=None, overlay=True, tile=512, **named):
    """The first frame of a grid, uint8 [H, W, 3]."""
    frames = []
    options = video.Recording(episodes=len(actions), overlay=overlay)
    grid = video.Grid(options, frames.append, probabilities, tile, **named)
    grid.before(env, np.zeros((len(actions), 3), np.float32), actions)
    return frames[0]


@pytest.mark.parametrize("shape", [(400, 600), (500, 500), (480, 480), (210, 160), (63, 33), (1, 999)])
def test_frames_of_any_size_fill_the_tile_in_one_direction(shape):
    frame = drawn(Pictures((*shape, 3), Discrete(2)), np.zeros(1, np.int32), overlay=False)
    assert frame.shape == (512, 512, 3) and not frame.shape[0] % 2
    bright = (frame > 150).all(axis=2)
    height, width = (int(bright.any(axis=axis).sum()) for axis in (1, 0))
    assert max(height, width) == 512
    factor = 512 / max(shape)
    assert (height, width) == pytest.approx([max(1, side * factor) for side in shape], abs=1)
    rows = np.flatnonzero(bright.any(axis=1))
    assert rows[0] == pytest.approx(511 - rows[-1], abs=1), "in the middle"


def caption(frame):
    return (frame[512:, 172:] == _CHOSEN).all(axis=2)


def test_a_small_tile_has_the_caption_of_a_large_one_in_small():
    env, actions = Pictures((400, 600, 3), Discrete(2), count=4), np.zeros(4, np.int32)
    large, small = (drawn(env, actions, tile=tile).astype(int) for tile in (512, 256))
    assert (large.shape, small.shape) == ((1152, 1024, 3), (576, 512, 3))
    in_small = large.reshape(576, 2, 512, 2, 3).mean(axis=(1, 3))
    assert np.abs(in_small - small).mean() < 2


def test_numbers_of_an_action_are_bars_from_a_line_in_the_middle():
    spec = Box((-2.0,) * 3, (2.0,) * 3)
    chosen = caption(drawn(Pictures((64, 64, 3), spec), np.array([[1.0, -0.5, 0.0]], np.float32)))
    columns = np.flatnonzero(chosen.any(axis=0))
    bars = np.split(columns, np.flatnonzero(np.diff(columns) > 1) + 1)
    assert len(bars) == 2, "and nothing for 0"
    heights = [np.flatnonzero(chosen[:, bar].any(axis=1)) for bar in bars]
    assert heights[0][0] == 6 and heights[0][-1] <= 33, "1 goes to the top"
    assert heights[1][0] >= 31 and heights[1][-1] == pytest.approx(45, abs=1), "-0.5 half-way to the bottom"


@pytest.mark.parametrize("size", [17, 200, 1000])
def test_actions_of_many_numbers_have_room(size):
    """All bars are inside the caption: the first and the last tenth of an action are visible."""
    spec, tenth = Box((-1.0,) * size, (1.0,) * size), -(-size // 10)
    for first, half in ((0, slice(None, 170)), (size - tenth, slice(170, None))):
        action = np.zeros((1, size), np.float32)
        plain = caption(drawn(Pictures((64, 64, 3), spec), action))
        action[0, first : first + tenth] = 1.0
        changed = caption(drawn(Pictures((64, 64, 3), spec), action)) != plain
        assert changed[:, half].any() and changed.sum() == changed[:, half].sum()


def test_only_the_actions_of_procgen_and_catch_have_names(tmp_path, monkeypatch):
    frames = [drawn(Pictures((64, 64, 3), Discrete(3)), np.ones(1, np.int32), named=n) for n in (True, False)]
    assert (frames[0] != frames[1]).any()
    seen = []
    monkeypatch.setattr(video, "_draw_action", lambda *_, named: seen.append(named))
    for env in ("catch", "Acrobot-v1"):  # both have three actions
        words = ["--random", env, "--out", str(tmp_path / "v.gif"), "--episodes", "1", "--max-steps", "1"]
        assert record.main(words) == 0
    assert {*seen[:1]} == {True} and {*seen[-1:]} == {False}


def test_an_action_without_probabilities_is_marked():
    chosen = caption(drawn(Pictures((64, 64, 3), Discrete(2)), np.ones(1, np.int32)))
    assert np.flatnonzero(chosen.any(axis=0))[0] > 40, "the second of two"


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_a_random_policy_is_recorded_without_a_run(env, tmp_path):
    path = tmp_path / "video.gif"
    assert record.main(["--random", env, "--out", str(path), "--episodes", "2", "--max-steps", "6"]) == 0
    frames = imageio.imread(path, plugin="pillow", index=None)
    assert frames.shape[1:] == (288, 512, 3)
    assert 1 < len(frames) <= 6
    with pytest.raises(UserError, match=f"{env} has no levels: leave --levels out"):
        record.main(["--random", env, "--levels", "train"])


def test_a_separate_process_draws_the_same_frames():
    """Compares each step and the state; the env needs no OpenGL, so the test is fast."""
    spec = EnvSpec("Pendulum-v1", num_envs=3, seed=4, render=True)
    here, apart = GymnasiumVec(spec, [0, 2]), SubprocessVecEnv(GymnasiumVec, spec, [0, 2])
    assert (apart.num_envs, apart.action_spec, apart.exact_state) == (2, here.action_spec, here.exact_state)
    for action in np.linspace(-1, 1, 5):
        for env in (here, apart):
            env.act(np.full((2, 1), action, np.float32))
        for ours, theirs in zip(here.observe()[:4], apart.observe()[:4], strict=True):
            np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(here.render()[1], apart.render()[1])
    assert apart.get_state() == here.get_state()
    here.close()
    apart.close()
    assert apart._processes[0]._process.returncode == 0


def test_a_process_that_draws_and_dies_gives_a_one_sentence_error():
    apart = SubprocessVecEnv(GymnasiumVec, EnvSpec("Pendulum-v1", num_envs=1, seed=4, render=True), [0])
    apart._processes[0]._process.kill()
    apart.act(np.zeros((1, 1), np.float32))
    for ask in (apart.render, apart.observe, apart.solved):  # between two frames, too: training goes on
        with pytest.raises(UserError, match="Pendulum-v1 cannot be rendered here: .* ended with -9"):
            ask()
    with pytest.raises(ValueError, match="there is no env"):
        SubprocessVecEnv(GymnasiumVec, EnvSpec("Pendulumm-v1", num_envs=1, seed=4, render=True), [0])


def test_mujoco_is_drawn_beside_tensorflow(tmp_path):
    """In one process, Mesa's OpenGL would crash after TensorFlow's import."""
    script = (
        "import tensorflow, sys; from tfrl import record\n"
        "sys.exit(record.main(['--random', 'InvertedDoublePendulum-v5', '--episodes', '1', "
        "'--max-steps', '3', '--out', sys.argv[1]]))"
    )
    plain = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "MUJOCO_GL")}
    path = tmp_path / "video.gif"
    command = [sys.executable, "-c", script, str(path)]
    done = subprocess.run(command, env=plain, capture_output=True, text=True, timeout=120)
    if done.returncode == 1 and "libegl1" in done.stderr:
        pytest.skip("no EGL: apt-get install libegl1 libgl1-mesa-dri")
    assert done.returncode == 0, done.stderr[-2000:]
    frames = imageio.imread(path, plugin="pillow", index=None)
    assert frames[0].std() > 5


# Windows


def test_a_window_without_a_display_gives_a_one_sentence_error_before_tensorflow(tmp_path):
    plain = {name: value for name, value in os.environ.items() if "DISPLAY" not in name}
    command = [sys.executable, "-m", "tfrl.record", "--random", "CartPole-v1", "--window"]
    done = subprocess.run(command, env=plain, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == (
        "error: --window needs a display, and there is none here; without it, a video is written.\n"
    )
    with pytest.raises(UserError, match="--window writes no file"):
        record.main(["--random", "CartPole-v1", "--window", "--out", str(tmp_path / "v.mp4")])


@pytest.mark.skipif(
    not (shutil.which("Xvfb") and shutil.which("import")), reason="apt-get install xvfb imagemagick"
)
def test_a_window_shows_the_frames(tmp_path):
    with contextlib.ExitStack() as ending:
        read, write = os.pipe()
        screen = subprocess.Popen(
            ["Xvfb", "-displayfd", str(write)], pass_fds=[write], stderr=subprocess.DEVNULL
        )
        ending.callback(screen.wait)
        ending.callback(screen.kill)
        os.close(write)
        with os.fdopen(read) as numbers:
            display = {name: value for name, value in os.environ.items() if name != "SDL_VIDEODRIVER"}
            display["DISPLAY"] = f":{numbers.readline().strip()}"
        command = [
            sys.executable,
            "-m",
            "tfrl.record",
            "--random",
            "Pendulum-v1",
            "--window",
            "--episodes",
            "1",
        ]
        window = subprocess.Popen(command, env=display)
        ending.callback(window.wait)
        ending.callback(window.kill)
        shot, shown, end = tmp_path / "shot.png", 0, time.monotonic() + 40
        while shown < 100_000 and time.monotonic() < end:  # Pendulum's white
            time.sleep(0.3)
            subprocess.run(["import", "-window", "root", shot], env=display, check=True, timeout=20)
            shown = (imageio.imread(shot, mode="RGB") > 240).all(axis=2).sum()
        assert shown > 100_000


# Data sets


@pytest.mark.parametrize("spec", [Discrete(5), Box((-1.0, 0.0), (1.0, 3.0))])
def test_random_actions_are_uniform(spec):
    acting = UniformPolicy(ArraySpec((1,), "float32"), spec)
    noise = acting.draw_noise(np.random.default_rng(0), 20_000)
    actions = acting.act(np.zeros((20_000, 1)), noise)
    assert actions.shape == (20_000, *spec.shape) and actions.dtype == spec.dtype
    if isinstance(spec, Discrete):
        np.testing.assert_allclose(np.bincount(actions) / 20_000, 0.2, atol=0.01)
    else:
        np.testing.assert_allclose(actions.mean(axis=0), 0, atol=0.02)
        np.testing.assert_allclose((actions**2).mean(axis=0), 1 / 3, atol=0.02)
        assert actions.min() >= -1 and actions.max() <= 1


def test_players_see_raw_vectors():
    spec = EnvSpec("CartPole-v1", num_envs=2, seed=1)
    seen = []
    acting = Acting(lambda o, u: seen.append(o.dtype) or np.zeros(len(o), np.int32))
    played = play(acting, spec, range(2), episodes_each=1)
    assert {*seen} == {np.dtype(np.float32)} and 5 < played.lengths.mean() < 15
