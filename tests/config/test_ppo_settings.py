"""Settings of PPO for any env: what follows from the env, and one sentence for what does not fit it."""

import subprocess
import sys

import pytest
from processes import ROOT
from refusals import refusal

from resnet import config as supervised
from tfrl.algorithms import runs as settings
from tfrl.algorithms.registry import ALGORITHMS, reader
from tfrl.cli.settings import to_yaml

READER = reader("ppo")
parse = reader("ppo_procgen").parse

PIXELS = "made_envs:made/Pixels-v0"  # shows images of 8 x 6


def ppo(line):
    return READER.parse(line.split())


def test_an_env_of_vectors_takes_its_own_preset():
    config = ppo("")
    assert (config.env, config.preset, config.run_name) == ("CartPole-v1", "gymnasium", "CartPole-v1-seed1")
    assert (config.torso, config.torso_options) == (
        "mlp",
        {"hidden": (64, 64), "activation": ("tanh", "tanh")},
    )
    assert config.normalize_observations and config.level_sets == ("test",) and not config.has_unseen_levels
    for name, value in reader("ppo").changes_of("gymnasium").items():
        assert getattr(config, name) == value or name == "torso"
    assert parse(["--env", "CartPole-v1"]) == config, "whichever command it is"


def test_an_env_of_images_takes_the_preset_of_games():
    config = ppo(f"--env {PIXELS}")
    assert (config.preset, config.torso, config.normalize_observations) == ("openai-easy", "impala", False)
    assert ppo("--env coinrun") == parse([])


def test_a_preset_may_name_its_env_and_a_flag_another():
    assert ppo("--preset torchrl").env == "InvertedDoublePendulum-v5"
    assert ppo("--preset torchrl --env CartPole-v1").env == "CartPole-v1"


def test_the_preset_torchrl_has_the_settings_of_the_tutorial():
    """Those of TorchRL's PPO tutorial, whose names are given where they differ."""
    config = ppo("--preset torchrl")
    assert (config.env, config.num_envs) == ("InvertedDoublePendulum-v5", 1)
    assert (config.total_steps, config.num_steps) == (50_000, 1000)  # total_frames, frames_per_batch
    assert (config.minibatch_size, config.epochs) == (64, 10)  # sub_batch_size, num_epochs
    assert (config.clip_ratio, config.gamma, config.gae_lambda) == (0.2, 0.99, 0.95)
    assert (config.entropy_coef, config.value_coef, config.value_loss) == (1e-4, 1.0, "huber")  # smooth_l1
    assert (config.normalize_advantages, config.renew_advantages) == ("batch", True)
    assert (config.lr, config.lr_schedule, config.max_grad_norm) == (3e-4, "cosine", 1.0)
    assert config.torso_options == {"hidden": (256, 256, 256), "activation": ("tanh",) * 3}  # num_cells
    assert not config.share_torso and config.normalize_observations and not config.normalize_rewards
    assert config.normalize_random_steps == 1000
    assert (config.eval_every, config.eval_greedy) == (10, True)


@pytest.mark.parametrize(
    ("line", "rows", "steps"),
    [
        ("--num-minibatches 4", 256, 4),
        ("--minibatch-size 96", 96, 10),  # 1024 / 96 is 10.67: what does not fill the last is left out
        ("--minibatch-size 1024", 1024, 1),
    ],
)
def test_minibatches_by_number_or_by_size(line, rows, steps):
    config = ppo(line)
    assert (config.steps_per_update, config.rows_per_step, config.steps_per_epoch) == (1024, rows, steps)


def test_hidden_is_read_as_the_units_of_each_layer():
    assert ppo("--hidden 32").torso_options["hidden"] == (32,)
    assert ppo("--hidden=256,128,64 --activation relu").torso_options == {
        "hidden": (256, 128, 64),
        "activation": ("relu", "relu", "relu"),
    }
    assert ppo("--hidden 8,8 --activation relu,tanh").torso_options["activation"] == ("relu", "tanh")


def test_total_steps_may_change_if_the_learning_rate_does_not_depend_on_it():
    assert "total_steps" not in ppo("").may_change
    assert "total_steps" in ppo("--lr-schedule constant").may_change
    assert "total_steps" not in ppo("--anneal-lr").may_change
    assert "solved_at" in ppo("").may_change


def test_a_flag_wins_over_an_equivalent_setting_of_a_preset():
    assert ppo("").lr_schedule == "linear"
    assert ppo("--no-anneal-lr").lr_schedule == "constant"
    assert ppo("--lr-schedule constant").lr_schedule == "constant"
    assert ppo("--env coinrun --anneal-lr").lr_schedule == "linear"
    tutorial = "--preset torchrl --env InvertedDoublePendulum-v5 "
    assert ppo(tutorial).rows_per_step == 64
    assert ppo(tutorial + "--num-minibatches 4").rows_per_step == 250
    assert ppo(tutorial + "--num-minibatches 4 --minibatch-size 100").rows_per_step == 100
    assert not ppo(tutorial + "--no-normalize-observations").normalize_random_steps


BAD = [
    (
        "--lr-schedule constant --anneal-lr",
        "--anneal-lr means --lr-schedule linear, but --lr-schedule is constant; give one",
    ),
    ("--env NoSuch-v1", "there is no env 'NoSuch-v1'"),
    ("--env cartpole-v1", "there is no env 'cartpole-v1' (did you mean CartPole-v1?)"),
    ("--env CartPole-v7", "there is no env 'CartPole-v7' (did you mean CartPole-v1?)"),
    ("--env nowhere:CartPole-v1", "needs the module nowhere, which cannot be imported"),
    ("--env made_envs:made/Several-v0", "shows a Sequence at a, which is not supported"),
    ("--env Cartpole", "there is no env 'Cartpole' (did you mean CartPole-v1?); known: bigfish,"),
    (
        "--num-levels 5",
        "--num-levels is only for procgen, and with --level-replay for an env whose reset takes "
        'options["level"]: leave it out for CartPole-v1, or give --level-replay.',
    ),
    ("--start-level 5", "leave it out for CartPole-v1, or give --level-replay."),
    (
        "--distribution-mode hard",
        "--distribution-mode is only for procgen, and CartPole-v1 has no levels: leave it",
    ),
    (
        "--preset openai-hard",
        "--distribution-mode is only for procgen, and CartPole-v1 has no levels: leave it out.",
    ),
    ("--torso impala", "--torso impala takes no vectors; known: mlp."),
    ("--torso mpl", "--torso mpl is not a network of the zoo (did you mean mlp?); known: mlp."),
    ("--env coinrun --torso mlp", "--torso mlp takes no images; known: impala,"),
    ("--torso-width 2", "--torso mlp has no width to choose, so it cannot be 2; leave --torso-width out."),
    (
        "--hidden 64,,64",
        "--hidden must list the units of each layer, such as 256,256, each from 1 to 65536; got ",
    ),
    ("--hidden=", "got ''."),
    (
        "--activation rellu",
        "--activation rellu is unknown (did you mean relu?); known: tanh, relu, elu, gelu",
    ),
    (
        "--hidden 8,8,8 --activation relu,tanh",
        "--activation must be one name, or one for each of the 3 layers of --hidden 8,8,8; got 'relu,tanh'.",
    ),
    ("--rmsprop-decay 0.9", "--rmsprop-decay has no effect without --optimizer rmsprop; leave it out."),
    ("--optimizer sgd --adam-epsilon 0.1", "--adam-epsilon has no effect with --optimizer sgd;"),
    ("--reward-scale 0", "--reward-scale must be above 0"),
    ("--hidden 0", "each from 1 to 65536; got '0'."),
    ("--hidden 65537", "got '65537'."),
    ("--hidden -5", "got '-5'."),
    ("--hidden 6.5", "got '6.5'."),
    ("--hidden \u00b2", "got '\u00b2'."),
    (f"--hidden {','.join(['8'] * 17)}", "--hidden must be at most 16 layers; got 17."),
    ("--activation sine", "--activation sine is unknown"),
    (
        "--env catch --normalize-observations",
        "--normalize-observations is for vectors, and catch has images",
    ),
    (f"--env {PIXELS} --preset gymnasium", "--normalize-observations is for vectors, and made_envs:made/Pix"),
    (
        "--no-normalize-observations --normalize-random-steps 9",
        "--normalize-random-steps needs --normalize-observations.",
    ),
    ("--minibatch-size 100", "must be a multiple of --num-envs 8; got 100."),
    ("--minibatch-size 4", "must be a multiple of --num-envs 8; got 4."),
    (
        "--minibatch-size 1032",
        "--minibatch-size 1032 is more than a whole rollout: --num-envs 8 x --num-steps 128",
    ),
    ("--minibatch-size -8", "--minibatch-size must be at least 0"),
    (
        "--anneal-lr --lr-schedule cosine",
        "--anneal-lr means --lr-schedule linear, but --lr-schedule is cosine; give one of the two.",
    ),
    ("--solved-at nan", "--solved-at must be at least -1e+38 and at most 1e+38; got nan."),
    ("--normalize-advantages epoch", "--normalize-advantages must be one of minibatch, batch; got 'epoch'"),
    ("--value-loss l1", "--value-loss must be one of squared, huber; got 'l1'"),
    ("--lr-schedule step", "--lr-schedule must be one of constant, linear, cosine; got 'step'"),
    ("--critic-lr 1e-3 --share-torso", "--critic-lr 0.001 needs --no-share-torso"),
    ("--memory rnn", "--memory must be one of none, lstm, gru; got 'rnn'."),
    ("--memory gru --sequence-length 48", "must divide --num-steps 128; got 48."),
    ("--memory gru --sequence-length 512", "must divide --num-steps 128; got 512."),
    ("--memory lstm --memory-size 40", "must be a multiple of 16; got 40."),
    ("--memory lstm --minibatch-size 64", "whose minibatches are whole sequences; give --num-minibatches."),
    ("--memory lstm --num-envs 3", "a multiple of 8; got 3."),
    ("--memory-inputs", "--memory-inputs has no effect without --memory; leave it out."),
]


@pytest.mark.parametrize(("line", "sentence"), BAD, ids=[line[:60] for line, _ in BAD])
def test_settings_that_do_not_fit_are_refused(line, sentence):
    assert sentence in refusal(ppo, line)


def test_replicas_have_their_share_of_a_minibatch():
    config = ppo("--minibatch-size 64 --micro-batch 32")
    config.check_topology(1, 2)
    sentence = refusal(config.check_topology, 1, 4)
    assert sentence.startswith("--micro-batch must divide a replica's minibatch of 16 samples; got 32")


def test_a_file_of_another_trainer_is_refused(tmp_path):
    path = tmp_path / "config.yaml"
    of_dqn = "algorithm: dqn  # what follows is its own\npreset: cartpole\ntau: 0.1\n"
    for text, named, command in (
        (of_dqn, "dqn", "tfrl dqn"),
        (to_yaml(supervised.Config()), "resnet", "resnet.train"),
    ):
        path.write_text(text)
        sentence = f"{path} has settings of {named}, not of ppo; use python -m {command}."
        assert refusal(READER.parse, ["--config", str(path)]) == sentence
        assert refusal(parse, ["--config", str(path)]) == sentence
    assert settings.from_yaml(path) == supervised.Config().complete()
    path.write_text("algorithm: nothing\n")
    known = f"there is no algorithm 'nothing'; known: ppo_procgen, {', '.join(ALGORITHMS)}, resnet."
    assert refusal(settings.from_yaml, path) == known


def test_a_file_without_an_algorithm_is_read_as_ppos(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(parse(["--lr", "1e-4"])).replace("algorithm: ppo\n", ""))
    assert settings.from_yaml(path) == parse(["--lr", "1e-4"])
    path.write_text("algorithm: ppo\n")
    assert "has settings of ppo, not of resnet; use python -m tfrl ppo" in refusal(
        supervised.parse, ["--config", str(path)]
    )


def test_a_gymnasium_env_is_known_without_tensorflow():
    program = """
import sys
from tfrl.algorithms.registry import ALGORITHMS, reader
reader("ppo").parse(["--env", "InvertedDoublePendulum-v5"])
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"tensorflow", "keras", "procgen"} & {*done.stdout.split()}


def test_anneal_lr_is_the_linear_schedule_also_in_a_file(tmp_path):
    (tmp_path / "both.yaml").write_text("anneal_lr: true\n")
    assert ppo(f"--env coinrun --config {tmp_path}/both.yaml").lr_schedule == "linear"
    for flags in ("--config {0} --lr-schedule cosine", "--lr-schedule cosine --config {0}"):
        words = flags.format(tmp_path / "both.yaml").split()
        assert "--anneal-lr means --lr-schedule linear" in refusal(ppo, " ".join(words))


def test_a_length_below_one_update_is_rounded_up_as_others_are():
    config = reader("ppo").parse(["--env", "CartPole-v1", "--total-steps", "10"])
    assert (config.num_updates, config.run_steps) == (1, config.num_envs * config.num_steps)


@pytest.mark.parametrize(
    ("typed", "written"),
    [
        ("made_envs", "made_envs:NAME"),
        ("made_envs.py", "made_envs:NAME"),
        ("./made_envs.py:Faulty", "made_envs:Faulty"),
        (f"{ROOT}/tests/made_envs:Faulty", "made_envs:Faulty"),
        ("made_envs.py:Faulty", "made_envs:Faulty"),
    ],
)
def test_the_form_of_an_own_env_is_told_for_the_name_of_its_file(monkeypatch, typed, written):
    monkeypatch.chdir(ROOT / "tests")
    sentence = refusal(ppo, f"--env {typed}")
    assert sentence.endswith(f"; write {written}, and start the command in the module's folder.")
