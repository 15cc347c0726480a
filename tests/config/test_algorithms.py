"""Settings of all algorithms: what holds for each."""

import dataclasses
import shutil
import subprocess
import sys

import pytest
from processes import ROOT
from refusals import refusal

from tfrl.algorithms.registry import ALGORITHMS, reader
from tfrl.algorithms.runs import from_yaml
from tfrl.cli.errors import UserError, how_to_install
from tfrl.cli.settings import preset_files, to_yaml
from tfrl.run.folder import as_it_began, check_run

ENVS = ("CartPole-v1", "Pendulum-v1", "HalfCheetah-v5", "MountainCarContinuous-v0", "catch", "coinrun")


@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_env_gets_a_preset_that_the_algorithm_has_or_a_sentence(algorithm, env):
    """Also tests PPG, whose settings extend PPO's but which lacks some of PPO's presets."""
    try:
        found = reader(algorithm).parse(["--env", env])
    except UserError as error:
        assert env in str(error)
    else:
        assert found.env == env and found.preset in preset_files(type(found))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_gymnasium_env_of_images_needs_no_flags(algorithm):
    """No warning names a flag that only a preset gave."""
    flags = ["--env", "made_envs:made/Pixels-v0"]
    if algorithm in ("ddpg", "td3", "td3_bc"):
        assert "needs continuous actions" in refusal(reader(algorithm).parse, flags)
    else:
        assert reader(algorithm).parse(flags).torso == "impala"


@pytest.mark.parametrize(
    ("command", "preset", "env"),
    [("ppo", "gymnasium", "coinrun"), ("ppo", "cookbook", "coinrun"), ("dqn", "default", "catch")],
)
def test_a_file_keeps_its_env_where_the_command_gives_another_preset(command, preset, env, tmp_path):
    of, file = reader(command), tmp_path / "config.yaml"
    begun = ["--env", env, *(["--preset", "default", "--num-envs", "8"] if command == "dqn" else [])]
    file.write_text(to_yaml(of.parse(begun)))
    config = of.parse(["--config", str(file), "--preset", preset, "--torso", "cookbook"] + EXTRA[preset])
    assert (config.env, config.preset) == (env, preset)


EXTRA = {"gymnasium": ["--no-normalize-observations"], "cookbook": [], "default": []}


def test_an_installed_package_installs_a_part_by_its_extra(tmp_path):
    for package in ("tfrl", "resnet"):  # as an installer leaves them, without a requirements file beside
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    code = "from tfrl.cli.errors import how_to_install; print(how_to_install('ray'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "pip install 'tfrl[ray]'\n", done.stderr
    for part in ("ray", "minari", "draw"):
        assert how_to_install(part) == f"pip install -r requirements-{part}.txt"
        assert (ROOT / f"requirements-{part}.txt").is_file()


def test_a_threshold_is_that_of_its_own_env(tmp_path):
    """A run's file contains it; another env has another threshold."""
    of, file = reader("reinforce"), tmp_path / "config.yaml"
    file.write_text(to_yaml(of.parse(["--env", "Acrobot-v1"])))
    assert of.parse(["--config", str(file)]).solved_at == -100
    assert of.parse(["--config", str(file), "--env", "CartPole-v1"]).solved_at == 475
    file.write_text(to_yaml(of.parse(["--env", "Acrobot-v1", "--solved-at", "-90"])))
    assert of.parse(["--config", str(file), "--env", "CartPole-v1"]).solved_at == -90


def test_the_tutorials_own_discount_can_be_given():
    """The preset has a usual discount, because the tutorial's sees only the next steps."""
    parse = reader("reinforce").parse
    assert parse(["--preset", "tutorial"]).gamma == 0.99
    given = parse(["--preset", "tutorial", "--gamma", "0.1"])
    assert (given.gamma, given.hidden, given.dropout, given.observers) == (0.1, "128", 0.6, 2)


def test_a_number_is_refused_as_an_algorithm(tmp_path):
    (tmp_path / "config.yaml").write_text("algorithm: 5\n")
    assert "there is no algorithm '5'" in refusal(from_yaml, tmp_path / "config.yaml")


@pytest.mark.parametrize(
    ("algorithm", "flags", "words"),
    [
        ("ppg", ["--augment", "crop"], "there is no flag --augment"),
        ("ppo", ["--no-dueling"], "there is no flag --no-dueling"),
        ("ppo", ["--num-env", "3"], "there is no flag --num-env (did you mean --num-envs?); --help"),
        ("dqn", ["--n-steps", "3"], "--n-steps (did you mean --n-step?); --help"),
        ("ppo", ["--xyzzy", "3"], "there is no flag --xyzzy; --help-all lists them"),
    ],
)
def test_an_unknown_flag_is_refused_with_the_nearest_known_one(algorithm, flags, words):
    assert words in refusal(reader(algorithm).parse, flags)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("ppoo", " (did you mean ppo?)"),
        ("xyzzy", ""),
        ("mcts", ""),
    ],
)
def test_an_unknown_algorithm_is_refused_with_the_nearest_known_one(word, hint):
    assert f"there is no algorithm '{word}'{hint}; known: ppo" in refusal(reader, word)


def begun(algorithm, folder, *flags):
    """The reader, the settings' flags, and the settings of a run that stands in `folder`."""
    of, flags = reader(algorithm), ["--env", "catch", "--preset", PLAIN[algorithm], *flags]
    config = of.parse([*flags, "--logdir", str(folder)])
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "config.yaml").write_text(to_yaml(config))
    return of, ["--env", "catch", "--preset", PLAIN[algorithm], "--logdir", str(folder)], config


PLAIN = dict.fromkeys(("ppo", "drac"), "openai-easy") | {"impala": "procgen"}
PLAIN |= dict.fromkeys(("dqn", "sac"), "default")


@pytest.mark.parametrize("algorithm", ["ppo", "drac", "impala", "dqn", "sac"])
@pytest.mark.parametrize(
    "flags",
    [["--actors", "2"], ["--lag", "3"], ["--lag", "3", "--actors", "4"], ["--actors", "2", "--free-running"]],
    ids=" ".join,
)
def test_a_resumed_run_may_have_other_actors_and_keeps_its_lag(algorithm, flags, tmp_path):
    """The lag and the number of envs are kept unless flags give them."""
    of, plain, began = begun(algorithm, tmp_path, *flags)
    plain += ["--free-running"] if began.free_running else []
    for actors in ("0", "1", "8") if began.num_envs > 1 else "01":
        config = of.parse([*plain, "--actors", actors])
        assert (config.lag, config.num_envs) == (began.lag, began.num_envs)
        check_run(config, of.from_yaml)
    other = of.parse([*plain, "--lag", str(began.lag + 1)])
    assert f"--lag {began.lag} there, {began.lag + 1} here." in refusal(
        lambda: check_run(other, of.from_yaml)
    )
    assert of.parse([*plain, "--seed", "7", "--free-running"]).lag == 2  # another run


@pytest.mark.parametrize("algorithm", ["ppo", "drac"])
def test_a_resumed_run_may_get_actors_and_keeps_its_lag(algorithm, tmp_path):
    of, plain, began = begun(algorithm, tmp_path)
    assert began.lag == 0
    config = of.parse([*plain, "--actors", "4"])
    assert config.lag == 0
    check_run(config, of.from_yaml)


@pytest.mark.parametrize("algorithm", ["dqn", "sac"])
def test_a_run_with_replay_that_cannot_have_actors_says_what_it_was_begun_with(algorithm, tmp_path):
    of, plain, _ = begun(algorithm, tmp_path)
    words = "--num-envs must be divisible by --actors 4; got 1. The run in "
    assert words in refusal(of.parse, [*plain, "--actors", "4"])
    assert refusal(of.parse, [*plain, "--actors", "1"]).endswith(" has --lag 0.")
    assert "The run in" not in refusal(of.parse, [*plain, "--gamma", "2"])


@pytest.mark.parametrize(("actors", "envs"), [(0, 1), (1, 8), (4, 8), (5, 5)])
@pytest.mark.parametrize("algorithm", ["dqn", "ddpg", "td3", "sac"])
def test_the_default_number_of_envs_divides_by_the_actors(algorithm, actors, envs):
    env = "CartPole-v1" if algorithm == "dqn" else "Pendulum-v1"
    flags = ["--env", env, "--actors", str(actors), "--batch-size", "320"]
    assert reader(algorithm).parse(flags).num_envs == envs


def test_a_preset_keeps_its_envs_and_a_file_only_changes_what_it_names(tmp_path):
    of = reader("dqn")
    assert of.parse(["--env", "catch", "--actors", "4"]).num_envs == 16
    for flags, envs in (([], 16), (["--actors", "4"], 8)):  # one env follows from the default preset
        file = tmp_path / "config.yaml"
        file.write_text(to_yaml(of.parse(["--env", "CartPole-v1", "--preset", "default", *flags])))
        found = of.parse(["--config", str(file), "--preset", "catch", "--env", "catch", "--torso", "linear"])
        assert found.num_envs == envs


@pytest.mark.parametrize(
    ("algorithm", "flags", "sentence"),
    [
        ("impala", "--micro-batch 100", "8 envs of a replica's minibatch; got 100."),
        (
            "impala",
            "--micro-batch 384 --num-minibatches 1",
            "divisor of the 64 envs of a replica's minibatch; got 384.",
        ),
        (
            "impala",
            "--micro-batch 512 --num-minibatches 16 --replicas 2",
            "128 times a divisor of the 2 envs of a replica's minibatch; got 512.",
        ),
        ("impala", "--rmsprop-decay 0.5", "--rmsprop-decay has no effect without --optimizer rmsprop;"),
        (
            "impala",
            "--env CartPole-v1 --no-free-deviation",
            "--no-free-deviation has no effect where actions are discrete;",
        ),
        ("reinforce", "--env catch --hidden 32", "--hidden has no effect with --torso impala;"),
        ("ppg", "--activation gelu", "--activation has no effect with --torso impala;"),
        ("sac", "--preset cleanrl --alpha 0.2 --alpha-lr 3e-4", "--alpha-lr has no effect with a fixed"),
        ("ppo", "--env CartPole-v1 --value-loss huber --clip-value", "--clip-value has no effect with --v"),
        ("ppo", "--env CartPole-v1 --env-threads 4", "--env-threads has no effect on Gymnasium's envs,"),
        ("ppg", "--distribution-mode exploration --num-levels 5", "--num-levels has no effect with --dist"),
        ("ppg", "--critic-torso nature --share-torso", "leave --share-torso out."),
        ("cql", "--env Pendulum-v1 --dataset x --backup-entropy", "--backup-entropy has no effect here"),
        ("cql", "--env Pendulum-v1 --dataset x --alpha 0.1 --alpha-start 1", "--alpha-start has no effect"),
        ("cql", "--env CartPole-v1 --dataset x --critics mean", "--critics has no effect where actions"),
        ("cql", "--env CartPole-v1 --dataset x --critic-torso mlp", "--critic-torso has no effect where"),
        ("bc", "--env Pendulum-v1 --dataset x --gamma 0.5", "--gamma has no effect in behaviour cloning"),
        ("bc", "--env Pendulum-v1 --dataset x --reward-scale 2", "--reward-scale has no effect in behav"),
        ("bc", "--env Pendulum-v1 --dataset x --reward-shift 1", "--reward-shift has no effect in behav"),
        ("iql", "--env Pendulum-v1 --dataset x --log-info a", "--log-info has no effect on recorded data"),
        ("iql", "--env Pendulum-v1 --dataset x --ray-address auto", "--ray-address has no effect on rec"),
        ("sac", "--env catch --torso linear --hidden 32", "--hidden has no effect with --torso linear;"),
    ],
)
def test_settings_without_effect_are_refused(algorithm, flags, sentence):
    assert sentence in refusal(reader(algorithm).parse, flags.split())


@pytest.mark.parametrize(
    ("algorithm", "flags"),
    [
        ("impala", "--micro-batch 256 --num-minibatches 16"),
        ("impala", "--env Pendulum-v1 --no-free-deviation --hidden 32"),
        ("sac", "--env Pendulum-v1 --torso keras.ops:relu --hidden 32 --activation relu"),
        ("ppo", "--env CartPole-v1 --torso keras.ops:relu --critic-torso mlp --hidden 32"),
        ("sac", "--preset cleanrl --alpha 0.2"),
        ("bc", "--env Pendulum-v1 --dataset x --gamma 0.99 --reward-scale 1"),
        ("bc", "--env catch --dataset x --critic-torso linear"),  # PPO starts from these networks
        ("td3_bc", "--env Pendulum-v1 --dataset x --exploration-noise 0.5"),  # of sampled actions
        ("dqn", "--preset cartpole --env catch"),
        ("drac", "--preset gymnasium --env catch"),
        ("ppo", "--preset torchrl --env coinrun --torso cookbook --no-normalize-observations"),
    ],
)
def test_settings_of_a_preset_without_effect_are_accepted(algorithm, flags):
    assert reader(algorithm).parse(flags.split())


def test_a_run_resumes_without_a_setting_that_has_no_effect(tmp_path):
    """Files of older runs may have flags that are refused today."""
    flags = ["--env", "catch", "--logdir", str(tmp_path)]
    config = reader("ppo").parse(flags)
    begun = dataclasses.replace(config, hidden="9", activation="relu", free_deviation=True)
    assert as_it_began(config, begun) == dataclasses.replace(config, precision=begun.precision)
    other = dataclasses.replace(config, gamma=0.5)
    assert "--gamma 0.5 there" in refusal(as_it_began, config, other)
    of_vectors = reader("ppo").parse(["--env", "Pendulum-v1"])
    assert "--hidden 9 there" in refusal(as_it_began, of_vectors, dataclasses.replace(of_vectors, hidden="9"))


def test_the_number_of_gradient_steps_follows_updates_per_step():
    """In float64, 90 x 0.7 is less than 63."""
    for ratio, tenths in (("0.7", 7), ("0.2", 2), ("1.1", 11)):
        config = reader("sac").parse(["--updates-per-step", ratio, "--learning-starts", "1000"])
        due = [config.gradient_steps_due(1000 + steps) for steps in range(0, 20_000, 10)]
        assert due == [tenths * k for k in range(2000)]
    assert reader("dqn").parse(["--updates-per-step", "1e-3"]).gradient_steps_due(10**15) == 10**12 - 1
