"""Lengths in frames, activations, discounts and ids: one test for each small setting."""

import importlib
import importlib.util

import keras
import numpy as np
import pytest
from refusals import refusal

from tfrl.__main__ import COMMANDS
from tfrl.algorithms.registry import ALGORITHMS, reader
from tfrl.cli.settings import read_preset
from tfrl.config.distributed import check_ray
from tfrl.config.run import ACTIVATIONS
from tfrl.envs import making as ids
from tfrl.experience.normalize import RewardNormalizer

CARTPOLE = ["--env", "CartPole-v1"]


def test_total_frames_counts_skipped_frames(tmp_path):
    parse = reader("ppo").parse
    assert parse([*CARTPOLE, "--total-frames", "1e6", "--frame-skip", "4"]).total_steps == 250_000
    assert parse([*CARTPOLE, "--total-frames", "1_000_001", "--frame-skip", "4"]).total_steps == 250_001
    assert parse(["--env", "coinrun", "--total-frames", "20_000"]).total_steps == 20_000
    both = [*CARTPOLE, "--total-frames", "1e6", "--total-steps", "1e6"]
    assert "give one of the two" in refusal(parse, both)
    # A file's length gives way to the flag, in either form.
    path = tmp_path / "file.yaml"
    path.write_text("total_frames: 8_000_000\nframe_skip: 2\n")
    assert parse([*CARTPOLE, "--config", str(path)]).total_steps == 4_000_000
    assert parse([*CARTPOLE, "--config", str(path), "--total-steps", "5e4"]).total_steps == 50_000
    path.write_text("total_steps: 8_000_000\nframe_skip: 2\n")
    config = parse([*CARTPOLE, "--config", str(path), "--total-frames", "5e4"])
    assert (config.total_steps, config.total_frames) == (25_000, None)


@pytest.mark.skipif(importlib.util.find_spec("ale_py") is None, reason="ale-py is not installed")
def test_atari_skips_four_frames_by_default():
    assert reader("ppo").parse(["--env", "ALE/Pong-v5", "--total-frames", "40e6"]).total_steps == 10_000_000


def test_every_activation_of_keras_is_taken():
    functions = (getattr(keras.activations, name) for name in dir(keras.activations) if name[0] != "_")
    known = {f.__name__ for f in functions if callable(f)} - {"get", "serialize", "deserialize"}
    assert {*ACTIVATIONS} | {"glu"} == known | {"swish", "hard_swish"}
    for name in ACTIVATIONS:
        assert reader("ppo").parse([*CARTPOLE, "--activation", f"{name},tanh"]).activations == (name, "tanh")
    said = refusal(reader("ppo").parse, [*CARTPOLE, "--activation", "glu"])
    assert said.startswith("--activation glu would halve the width of each layer")


def test_the_discount_of_normalised_rewards_is_a_setting():
    rewards, first = np.ones((6, 2), np.float32), np.zeros((6, 2), bool)
    config = reader("ppo").parse([*CARTPOLE, "--gamma", "0.9"])
    assert config.reward_norm_gamma == 0.99  # as in Baselines, whatever --gamma is
    own = reader("ppo").parse(["--env", "coinrun", "--reward-norm-gamma", "0.5"])
    assert (RewardNormalizer(2, own.reward_norm_gamma)(rewards, first)[1:] > 1).all()
    assert RewardNormalizer(2, config.reward_norm_gamma)(rewards, first)[-1, 0] < 1
    without = ["--env", "coinrun", "--no-normalize-rewards", "--reward-norm-gamma", "0.5"]
    assert "has no effect without --normalize-rewards" in refusal(reader("ppo").parse, without)


@pytest.mark.parametrize(
    ("algorithm", "flags", "words"),
    [
        ("ppo", "--num-envs 1 --num-steps 8 --num-minibatches 8", "a minibatch of one sample"),
        ("ppo", "--num-envs 1 --num-steps 8 --minibatch-size 1", "a minibatch of one sample"),
        (
            "ppo",
            "--num-envs 1 --num-steps 1 --num-minibatches 1 --normalize-advantages batch",
            "a batch of one sample",
        ),
        ("reinforce", "--num-envs 1 --max-steps 1", "an update of one env step"),
    ],
)
def test_a_normalisation_of_one_sample_is_refused(algorithm, flags, words):
    assert words in refusal(reader(algorithm).parse, [*CARTPOLE, *flags.split()])


def test_no_default_needs_ray(monkeypatch):
    """The set-up of `make train` has no Ray."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for algorithm in ALGORITHMS:
        check_ray(reader(algorithm).kind())  # the defaults, without a data set
    tutorial = reader("reinforce").parse(["--preset", "tutorial"])
    with pytest.raises(Exception, match="--observers 2 needs Ray.*or give --observers 0"):
        check_ray(tutorial)
    assert "must be installed" in read_preset(type(tutorial), "tutorial").summary


@pytest.mark.parametrize(
    ("env", "hint"),
    [
        ("Xyzzyx-v0", ""),
        ("Minn-v0", ""),
        ("CartPol-v1", " (did you mean CartPole-v1?)"),
        ("halfcheetah-v5", " (did you mean HalfCheetah-v5?)"),
        ("made_envs:made/Pixel-v0", " (did you mean made_envs:made/Pixels-v0?)"),
        ("made_envs:CartPol-v1", " (did you mean CartPole-v1?)"),
    ],
)
def test_a_hint_for_an_unknown_id_is_near_and_has_its_module(env, hint):
    with pytest.raises(ValueError) as caught:
        ids.find_spec(env)
    assert str(caught.value).startswith(f"there is no env {env!r}{hint}")
    assert hint or "did you mean" not in str(caught.value)


@pytest.mark.skipif(importlib.util.find_spec("shimmy") is not None, reason="shimmy is installed")
def test_envs_of_dm_control_name_their_package():
    words = "there is no env 'dm_control/cheetah-run-v0'; the envs of dm_control need: pip install "
    assert f"{words}'shimmy[dm-control]' 'mujoco<4'" in refusal(
        reader("sac").parse, ["--env", "dm_control/cheetah-run-v0"]
    )


TRAINERS = {f"tfrl.{name}" for name in ("ppo_procgen", *ALGORITHMS)} - {"tfrl.sac"}


@pytest.mark.parametrize(
    "module", [pytest.param(m, marks=pytest.mark.long) if m in TRAINERS else m for m in COMMANDS]
)
def test_every_command_takes_help_all(module, capsys):
    main = importlib.import_module("resnet.__main__" if module == "resnet" else module).main
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [module])
        try:
            assert main(["--help-all"]) == 0
        except SystemExit as end:
            assert end.code == 0
    assert "usage" in capsys.readouterr().out
