"""Settings: precedence, spellings, round trips, and one sentence for every mistake."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from refusals import refusal

import resnet.config
from tfrl import __main__ as overview
from tfrl.algorithms.ppo import Config
from tfrl.algorithms.registry import ALGORITHMS, reader
from tfrl.cli import endings
from tfrl.cli.flags import coerce
from tfrl.cli.settings import preset_files, to_yaml
from tfrl.envs import registry
from tfrl.experience.rollout import check_memory

PROCGEN_READER = reader("ppo_procgen")
READER = reader("ppo")
from_yaml = reader("ppo_procgen").from_yaml
parse = reader("ppo_procgen").parse


def settings_file(folder, text: str) -> str:
    path = folder / "settings.yaml"
    path.write_text(text)
    return str(path)


# Good settings


def test_the_defaults_are_the_published_ones():
    config = parse([])
    assert config == dataclasses.replace(Config(), run_name="coinrun-seed1", lag=0)
    assert (config.env, config.preset, config.total_steps) == ("coinrun", "openai-easy", 25_000_000)
    assert (config.num_envs, config.num_steps, config.epochs, config.num_minibatches) == (64, 256, 3, 8)
    assert (config.lr, config.gamma, config.gae_lambda, config.entropy_coef) == (5e-4, 0.999, 0.95, 0.01)


def test_the_numbers_of_steps_and_updates_are_derived():
    config = parse(["--num-envs", "4", "--num-steps", "8", "--total-steps", "65", "--logdir", "there"])
    assert config.steps_per_update == 32
    assert config.num_updates == 3
    assert str(config.run_dir) == "there/coinrun-seed1"
    assert str(Config(env="maze", seed=3).run_dir) == "logs/maze-seed3"


def test_a_tilde_in_logdir_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse(["--logdir=~/runs"]).logdir == f"{tmp_path}/runs"
    assert parse(["--config", settings_file(tmp_path, "logdir: ~/runs")]).logdir == f"{tmp_path}/runs"
    assert resnet.config.parse(["--logdir=~/runs"]).logdir == f"{tmp_path}/runs"


@pytest.mark.parametrize("spelled", ["coinrun", "procgen-coinrun-v0", "procgen:procgen-coinrun-v0"])
def test_spellings_of_a_game(spelled):
    assert parse(["--env", spelled]) == parse([])


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--update-freq", "128"], "num_steps", 128),
        (["--learning-rate", "1e-3"], "lr", 1e-3),
        (["--actor-lr", "1e-3"], "lr", 1e-3),
        (["--num_envs=32"], "num_envs", 32),
        (["--total-steps", "1e6"], "total_steps", 1_000_000),
        (["--total-steps", "2_000_000"], "total_steps", 2_000_000),
        (["--seed", "1", "--seed", "2"], "seed", 2),
        (["--no-clip-value"], "clip_value", False),
        (["--anneal-lr"], "anneal_lr", True),
        (["--anneal-lr=true"], "anneal_lr", True),
        (["--target-kl", "0.02"], "target_kl", 0.02),
        (["--target-kl", "none"], "target_kl", None),
        (["--num-levels", "0"], "num_levels", 0),
        (["--run-name", "mine"], "run_name", "mine"),
        (["--torso-width", "4"], "torso_width", 4),
        (["--torso", "nature", "--torso-width", "1"], "torso_width", 1),
        (["--env", "catch"], "env", "catch"),
        (["--env", "chaser", "--distribution-mode", "extreme"], "distribution_mode", "extreme"),
    ],
)
def test_each_flag_sets_its_field(argv, name, value):
    got = getattr(parse(argv), name)
    assert got == value and type(got) is type(value)


def test_text_of_digits_needs_no_quotes(tmp_path):
    """As on the command line; YAML itself reads 010 as 8."""
    config = READER.parse(["--config", settings_file(tmp_path, "hidden: 64\nrun_name: 010\n")])
    assert (config.hidden_units, config.run_name) == ((64,), "010")
    assert READER.of_values({"hidden": coerce(32, str, "hidden")}).hidden_units == (32,)


@pytest.mark.parametrize("preset", preset_files(Config))
def test_every_preset_is_valid_and_sets_what_it_says(preset):
    of_vectors = preset in ("gymnasium", "torchrl", "cleanrl")
    config = (READER if of_vectors else PROCGEN_READER).parse(["--preset", preset])
    for name, value in READER.changes_of(preset).items():
        assert getattr(config, name) == (value if value != "auto" else "mlp")


def test_the_critic_learns_at_the_rate_that_is_given():
    """Also tests the preset with a separate critic."""
    assert parse(["--preset", "cookbook", "--lr", "1e-3"]).critic_lr is None
    assert parse(["--preset", "cookbook", "--share-torso"]).share_torso


def test_the_flags_of_the_source_recipe_are_taken_as_they_are(tmp_path):
    flags = "--env procgen:procgen-coinrun-v0 --update-freq 16 --epochs 3 --actor-lr 1e-4 --critic-lr 1e-4"
    flags += " --clip-ratio 0.1 --gae-lambda 0.95 --gamma 0.99 --logdir logs"
    config = parse(flags.split())
    assert (config.num_steps, config.lr, config.critic_lr, config.share_torso) == (16, 1e-4, 1e-4, False)
    assert not parse(["--config", settings_file(tmp_path, "critic_lr: 1e-4")]).share_torso


def test_flags_win_over_the_file_and_the_file_over_the_preset(tmp_path):
    path = settings_file(tmp_path, "preset: openai-hard\nnum_envs: 128\nlr: 1e-4\n")
    config = parse(["--config", path, "--actor-lr", "2e-4"])
    assert config.num_levels == 500  # the preset's, which the file names
    assert config.num_envs == 128  # the file's
    assert config.lr == 2e-4  # the flag's
    assert parse(["--config", path, "--preset", "openai-easy"]).num_levels == 200


def test_a_preset_flag_replaces_the_preset_of_the_file(tmp_path):
    """A run's config.yaml has every setting; only those that differ from its preset are kept."""
    argv = ["--lr", "1e-4", "--num-levels", "100"]
    for there, here in (("openai-easy", "openai-hard"), ("openai-hard", "openai-easy")):
        path = settings_file(tmp_path, to_yaml(parse(["--preset", there, *argv])))
        assert parse(["--config", path, "--preset", here]) == parse(["--preset", here, *argv])
        assert parse(["--config", path, "--preset", there]) == parse(["--preset", there, *argv])
    path = settings_file(tmp_path, "num_envs: 64\n")  # of no preset: it is meant
    assert parse(["--config", path, "--preset", "openai-hard"]).num_envs == 64


def test_a_file_may_use_other_spellings(tmp_path):
    text = "update-freq: 128\nlr: 5e-4\ntotal_steps: 1e6\ncritic_lr: null\nseed: 3.0\n"
    config = parse(["--config", settings_file(tmp_path, text)])
    assert (config.num_steps, config.lr, config.total_steps) == (128, 5e-4, 1_000_000)
    assert config.critic_lr is None and config.seed == 3


def test_a_file_may_have_sections(tmp_path):
    text = "task: {env: maze, seed: 3}\nPPO:\n  lr: 5e-4\n  update-freq: 128\nlogdir: there\n"
    config = parse(["--config", settings_file(tmp_path, text)])
    assert (config.env, config.seed, config.lr) == ("maze", 3, 5e-4)
    assert (config.num_steps, config.logdir) == (128, "there")


@pytest.mark.parametrize(
    "argv", [[], ["--preset", "cookbook"], ["--lr", "1e-05", "--target-kl", "0.1", "--run-name", "007"]]
)
def test_yaml_round_trip(tmp_path, argv):
    config = parse(argv)
    path = settings_file(tmp_path, to_yaml(config))
    assert from_yaml(path) == config
    assert parse(["--config", path]) == config


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "resnet"])
def test_a_settings_file_has_help_as_comments_and_is_read_back_unchanged(tmp_path, algorithm):
    of = reader(algorithm)
    env = (
        ["--env", "Pendulum-v1"] if algorithm in ("bc", "iql", "td3_bc", "cql") else []
    )  # their sets name it
    settings = of.parse(["--run-name", "007 # not: a comment", *env])
    text = to_yaml(settings)
    path = settings_file(tmp_path, text)
    assert of.from_yaml(path) == settings and of.parse(["--config", path]) == settings
    lines = text.replace("'yes':", "yes:").splitlines()  # to YAML, an unquoted `yes` is no text
    fields = [field.name for field in dataclasses.fields(settings) if field.name != "algorithm"]
    assert [line.partition(":")[0] for line in lines if line and line[0] not in "# "][
        -len(fields) :
    ] == fields
    assert all(lines[at - 1].startswith("# ") for at, line in enumerate(lines) if line.startswith((*fields,)))
    assert max(map(len, lines)) <= 100


def test_the_comment_of_a_setting_comes_from_the_most_derived_class():
    text = to_yaml(parse([]))
    assert "# Updates between checkpoints.\ncheckpoint_every: 10\n" in text
    assert "None: ENV-seedSEED for PPO" in " ".join(text.replace("# ", "").split())


def test_a_saved_default_name_follows_the_flags(tmp_path):
    path = settings_file(tmp_path, to_yaml(parse(["--env", "maze"])))
    assert parse(["--config", path, "--seed", "2"]).run_name == "maze-seed2"
    named = settings_file(tmp_path, to_yaml(parse(["--run-name", "mine"])))
    assert parse(["--config", named, "--seed", "2"]).run_name == "mine"


def test_print_config_prints_all_settings_and_exits(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--print-config", "--seed", "4"])
    assert ended.value.code == 0
    assert from_yaml(settings_file(tmp_path, capsys.readouterr().out)) == parse(["--seed", "4"])


def test_help_shows_the_most_used_settings(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert 15 <= len(re.findall(r"^\W*--\w", text, re.MULTILINE)) <= 30 and "--help-all shows all" in text
    assert all(
        flag in text
        for flag in ("--env ", "--total-steps", "--lr", "--seed", "--run-name", *preset_files(Config))
    )
    assert "--adam-epsilon" not in text and "distribution-mode hard" not in text


def test_help_says_which_setting_of_sac_is_not_for_cql(capsys):
    with pytest.raises(SystemExit):
        reader("cql").parse(["--help-all"])
    assert "Not for CQL: --soft-target decides." in " ".join(capsys.readouterr().out.split())


def test_help_splits_the_name_of_no_algorithm(capsys):
    with pytest.raises(SystemExit):
        reader("drac").parse(["--help"])
    assert "\nDrAC options:" in capsys.readouterr().out


def test_help_all_lists_every_flag_and_what_the_presets_set(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--help-all"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    flags = ["--" + field.name.replace("_", "-") for field in dataclasses.fields(Config)]
    flags.remove("--algorithm")
    for expected in [
        *flags,
        "--config",
        "--print-config",
        "--update-freq",
        "--actor-lr",
        *preset_files(Config),
        *registry.env_names(),
    ]:
        assert expected in text
    assert "distribution-mode hard, num-levels 500" in text


def test_the_overview_names_every_command_and_the_version(capsys):
    assert overview.main([]) == 0
    told = capsys.readouterr().out
    root = Path(overview.__file__).parents[1]
    for package in ("tfrl", "resnet", "cluster"):
        for path in (root / package).glob("*.py"):
            if '\nif __name__ == "__main__"' in path.read_text() and path.name not in (
                "__main__.py",
                "agent.py",
            ):
                assert f"  python -m {package}.{path.stem}" in told
    assert overview.main(["--version"]) == 0
    assert capsys.readouterr().out.split()[1] in told.splitlines()[0]


def test_the_command_tfrl_runs_each_command_of_the_package():
    assert "--lr must be above 0" in refusal(overview.main, ["ppo", "--lr", "0"])
    assert "nowhere does not exist" in refusal(overview.main, ["report", "nowhere"])
    assert "no command evaluat (did you mean evaluate?); known: ppo" in refusal(overview.main, ["evaluat"])
    assert "absent_module:Mine cannot be imported here" in refusal(overview.main, ["absent_module:Mine"])


def test_an_unknown_command_module_gives_a_one_sentence_error():
    done = subprocess.run(
        [sys.executable, "-m", "tfrl.a2c", "--env", "catch"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stderr.startswith("error: there is no command a2c; known: ")
    assert done.stderr.count("\n") == 1


def test_settings_import_neither_tensorflow_nor_envs():
    code = "import sys, tfrl.algorithms.ppo, tfrl.run.folder; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"tensorflow", "keras", "procgen", "gym"} & {*done.stdout.split()}


# Bad settings

BAD_FLAGS = [
    ("--env coinrn", "did you mean coinrun?"),
    ("--env CoinRun", "did you mean coinrun?"),
    ("--env procgen-nosuch-v0", "there is no env 'nosuch'"),
    (
        "--env bigfish --distribution-mode memory",
        "bigfish has no distribution mode 'memory'; it has easy, hard.",
    ),
    ("--env coinrun --distribution-mode extreme", "it has easy, hard, exploration."),
    ("--distribution-mode medium", "--distribution-mode must be one of easy, hard, extreme"),
    ("--preset openai-esy", "did you mean openai-easy?"),
    ("--torso impalla", "did you mean impala?"),
    ("--torso mlp", "takes no images"),
    ("--torso nature --torso-width 2", "--torso nature has no width to choose, so it cannot be 2; leave"),
    ("--torso-width 0", "--torso-width must be at least 1 and at most 64; got 0."),
    ("--num-env 3", "there is no flag --num-env (did you mean --num-envs?)"),
    ("--brightness 1e-3", "there is no flag --brightness; --help"),
    ("--no-lr", "there is no flag --no-lr"),
    ("--lr", "--lr needs a value."),
    ("--lr --gamma 1", "--lr needs a value."),
    ("--logdir --gamma 1", "--logdir needs a value; write --logdir=... if it begins with --."),
    ("--lr fast", "--lr must be a number; got 'fast'."),
    ("--num-envs 1.5", "--num-envs must be a whole number; got '1.5'."),
    ("--num-envs inf", "--num-envs must be a whole number; got inf."),
    ("--anneal-lr=perhaps", "--anneal-lr must be true or false; got 'perhaps'."),
    ("--no-anneal-lr=true", "--no-anneal-lr takes no value; got 'true'."),
    ("--anneal-lr False", "'False' is not a flag"),
    ("coinrun", "'coinrun' is not a flag"),
    ("--lr -1", "--lr must be above 0 and at most 1e+38; got -1.0."),
    ("--lr 0", "--lr must be above 0 and at most 1e+38; got 0.0."),
    ("--lr 1e99", "--lr must be above 0 and at most 1e+38; got 1e+99."),
    ("--entropy-coef 1e99", "--entropy-coef must be at least 0 and at most 1e+38; got 1e+99."),
    ("--lr nan", "--lr must be above 0 and at most 1e+38; got nan."),
    ("--max-grad-norm inf", "--max-grad-norm must be above 0 and at most 1e+38; got inf."),
    ("--gamma 1.01", "--gamma must be at least 0 and at most 1; got 1.01."),
    ("--clip-ratio 0", "--clip-ratio must be above 0 and at most 1; got 0.0."),
    ("--target-kl -0.1", "--target-kl must be above 0 and at most 1e+38; got -0.1."),
    ("--num-envs 0", "--num-envs must be at least 1 and at most 1000000; got 0."),
    ("--num-envs 1e12", "--num-envs must be at least 1 and at most 1000000; got 1000000000000."),
    (f"--total-steps 1{'0' * 400}", "at most 1e+15; got 1000000000000000000000000000000000000000... (401 ch"),
    (f"--total-steps 1{'0' * 5000}", "--total-steps must be a whole number; got '1000"),
    (f"--lr 1{'0' * 400}", "--lr must be above 0 and at most 1e+38; got inf."),
    (f"--lr {'x' * 400}", "--lr must be a number; got 'xxx"),
    (f"--precision {'x' * 400}", "--precision must be one of auto, float32, bfloat16; got 'xxx"),
    ("--env-threads 3e9", "--env-threads must be at least 0 and at most 1024; got 3000000000."),
    ("--replicas 1e15", "--replicas must be at least 0 and at most 256"),
    ("--eval-episodes 1e15", "--eval-episodes must be at least 1 and at most 1000000"),
    ("--epochs 1e9", "--epochs must be at least 1 and at most 1000"),
    ("--cluster-timeout 1e300", "--cluster-timeout must be above 0 and at most 10000000; got 1e+300."),
    ("--start-level 2147483647", "must be at most 2147483647; got 2147483647 + 200."),
    ("--num-levels 2147483647 --start-level 1", "must be at most 2147483647; got 1 + 2147483647."),
    ("--num-steps 1e8 --total-steps 1e12", "6400000000 is more than"),
    ("--num-levels -1", "--num-levels must be at least 0"),
    ("--num-levels 0 --start-level 500", "--start-level 500 has no effect: --num-levels 0 is all levels;"),
    ("--distribution-mode exploration --start-level 5", "has no effect: exploration is a single level;"),
    ("--seed -1", "--seed must be at least 0 and at most 2147483647; got -1."),
    ("--seed 2147483648", "at most 2147483647; got 2147483648."),
    ("--num-steps 100", "--num-steps must be divisible by --num-minibatches 8; got 100."),
    ("--num-envs 64 --replicas 3", "by the number of replicas, 3; got 64."),
    ("--num-envs 1 --replicas 2", "got 1."),
    ("--micro-batch 1000", "a replica's minibatch of 2048 samples; got 1000."),
    ("--micro-batch 4096", "got 4096."),
    ("--micro-batch 2048 --replicas 2", "a replica's minibatch of 1024 samples"),
    ("--critic-lr 1e-4 --share-torso", "--critic-lr 0.0001 needs --no-share-torso"),
    ("--hidden 128,128", "--hidden has no effect with --torso impala; leave it out."),
    ("--torso nature --activation relu", "--activation has no effect with --torso nature; leave it out."),
    ("--free-deviation", "--free-deviation has no effect where actions are discrete; leave it out."),
    ("--strategy one-device --replicas 2", "--strategy one-device has one replica; got --replicas 2."),
    ("--precision float16", "--precision must be one of auto, float32, bfloat16; got 'float16'"),
    ("--run-name a/b", "--run-name must be a folder's name"),
    ("--run-name ..", "--run-name must be a folder's name"),
    ("--run-name=", "--run-name must be a folder's name"),
    ("--run-name " + "\u8a66" * 70, "at most 200 bytes of printable characters"),
    ("--run-name \x1b[2J", "no slashes; got '\\x1b[2J'."),
    ("--run-name \udcff", "no slashes; got '\\udcff'."),  # an argument that is no UTF-8
    ("--logdir=", "--logdir must be a folder's path; got ''."),
    ("--config nowhere.yaml", "cannot read the settings file nowhere.yaml: No such file or directory."),
]


@pytest.mark.parametrize(("command", "sentence"), BAD_FLAGS, ids=[command[:60] for command, _ in BAD_FLAGS])
def test_bad_flags_are_refused_with_their_sentence(command, sentence):
    assert sentence in refusal(parse, command.split())


BAD_FILES = [
    ("num_env: 3", "has an unknown setting 'num_env' (did you mean num_envs?)."),
    ("5: 3", "has an unknown setting 5"),
    ("config: other.yaml", "has an unknown setting 'config'"),
    ("ppo: {lrr: 1}", "has an unknown setting 'lrr' (did you mean lr?)."),
    ("ppo: {lr: 1, lr: 2}", "settings.yaml gives lr twice; leave one out."),
    ("lr: 1\nppo: {lr: 2}", "settings.yaml gives lr twice; leave one out."),
    ("lr: {value: 1}", "must be a number; got {'value': 1}."),
    ("a: &a {lr: 1}\nppo: {<<: *a}", "settings.yaml merges settings with <<, which is not supported;"),
    ("a: &a {b: *a}", "is not valid YAML"),
    ("lr: 1\nlr: 2", "settings.yaml gives lr twice; leave one out."),
    ("num-steps: 8\nupdate_freq: 16", "settings.yaml gives num_steps twice"),
    ("lr: fast", "settings.yaml must be a number; got 'fast'."),
    ("lr: [1, 2]", "must be a number; got [1, 2]."),
    ("lr: true", "must be a number; got True."),
    ("num_envs: 1.5", "must be a whole number; got 1.5."),
    ("num_envs: null", "must be a whole number; got None."),
    ("num_envs: .inf", "must be a whole number; got inf."),
    ("clip_value: 1", "must be true or false; got 1."),
    ("env: 5.5", "must be text; got 5.5."),
    ("env: true", "must be text; got True."),
    ("resume: no", "must be one of auto, never, must, restart; got False."),
    ("preset: [easy]", "must be one of cleanrl, cookbook"),
    ("gamma: 2", "--gamma must be at least 0 and at most 1; got 2.0."),
    ("env: [", "is not valid YAML (line 1)."),
    ("- a\n- b", "must hold one `name: value` a line."),
    ("", "must hold one `name: value` a line."),
    (f"num_envs: {'9' * 400}", "--num-envs must be at least 1 and at most 1000000; got 999"),
    (f"num_envs: 0x{'f' * 5000}", "got a number of thousands of digits."),
    (f"num_envs: {'9' * 5000}", "is not valid YAML."),
    ("lr: " + "[" * 3000, "is not valid YAML."),
    (f"lr: 1{'0' * 400}", "lr in "),
    (f"total_steps: {[1] * 200}", "must be a whole number; got [1, 1, "),
]


@pytest.mark.parametrize(("text", "sentence"), BAD_FILES, ids=[text[:60] for text, _ in BAD_FILES])
def test_bad_files_are_refused_with_their_sentence(tmp_path, text, sentence):
    assert sentence in refusal(parse, ["--config", settings_file(tmp_path, text)])


def test_a_setting_of_a_file_without_effect_is_refused_with_the_files_name(tmp_path):
    words = ["--config", settings_file(tmp_path, "hidden: 128,128\n"), "--torso", "impala"]
    assert refusal(parse, words).startswith(f"hidden in {words[1]} has no effect with --torso impala; leave")
    assert refusal(parse, [*words, "--hidden", "64"]).startswith("--hidden has no effect")


def test_a_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_bytes(b"\xff\xfe\x00\x80")
    assert "it is not text" in refusal(parse, ["--config", str(path)])
    assert "Is a directory" in refusal(parse, ["--config", str(tmp_path)])


def test_settings_that_do_not_fit_the_topology_are_refused():
    config = parse([])
    config.check_topology(workers=4, replicas_per_worker=2)
    sentence = refusal(config.check_topology, 3, 2)
    assert "6 (3 workers x 2); got 64." in sentence
    small = parse(["--micro-batch", "2048"])
    assert "minibatch of 1024 samples; got 2048." in refusal(small.check_topology, 2, 1)


LARGEST = (
    "--seed 2147483647 --start-level 2147483447 --eval-episodes 1e6 --env-threads 1024 --total-steps 1e15"
)


def test_the_largest_numbers_are_taken_as_they_are():
    config, most = parse(LARGEST.split()), 2**31 - 1
    assert (config.seed, config.start_level + config.num_levels) == (most, most)
    assert (config.eval_episodes, config.env_threads, config.total_steps) == (10**6, 1024, 10**15)
    assert parse(["--num-levels", str(most)]).num_levels == most
    for flag in ("--seed", "--num-levels"):
        assert f"at most {most}" in refusal(parse, [flag, str(most + 1)])


# Memory


def test_a_rollout_larger_than_the_memory_is_refused_with_its_size():
    games, sizes = registry.specs(Config())[0], (1_000_000, 2000)
    sentence = refusal(check_memory, games, *sizes, 1)
    assert sentence.startswith("--num-envs 1000000 x --num-steps 2000 need 24.6 TB for observations, and")
    assert "need 12.3 TB for observations in each of 2 workers," in refusal(check_memory, games, *sizes, 2)
    check_memory(games, *sizes, 10_000)
    check_memory(games, 64, 256, 1)


def test_running_out_of_memory_gives_a_one_sentence_error(capsys):
    with pytest.raises(SystemExit) as ended:
        endings.run(lambda arguments: np.empty(2**60, np.uint8).size)
    assert ended.value.code == 1
    told = capsys.readouterr().err
    assert told.startswith("error: out of memory; Unable to allocate 1.00 EiB") and told.count("\n") == 1
