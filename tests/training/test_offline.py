"""Runs from recorded data: equal on any topology, resumed exactly, and the way from offline to online."""

import dataclasses
import json
import random
import shutil
import signal
import time

import gymnasium
import numpy as np
import pytest
from learners import train
from processes import Training, steps_done
from recordings import write
from refusals import refusal

import tfrl
from tfrl import collect, evaluate, record, status
from tfrl.algorithms import registry as settings
from tfrl.algorithms.runs import check_start, of_run, read_settings
from tfrl.cli.settings import to_yaml
from tfrl.run.checkpoint import CheckpointStore
from tfrl.run.console import Console
from tfrl.training import off_policy, on_policy
from tfrl.training.learner import next_commands
from tfrl.training.off_policy import OffPolicyLearner
from tfrl.training.offline import OfflineLearner
from tfrl.training.on_policy import OnPolicyLearner

SMALL = ("--hidden", "8", "--batch-size", "16", "--iteration-steps", "10", "--total-steps", "30")
SMALL += ("--checkpoint-every", "1", "--eval-episodes", "2", "--precision", "float32")


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    for env in ("CartPole-v1", "Pendulum-v1"):
        write(folder / env, env, [12] * 12, shard=3)
    return folder


def parsed(algorithm, dataset, logs, *flags):
    given = ["--dataset", str(dataset), "--logdir", str(logs), "--run-name", "run", *SMALL, *flags]
    return settings.reader(algorithm).parse(given)


def run(algorithm, dataset, logs, *flags, **changes):
    """Trains in this process; the results and the final arrays."""
    config = dataclasses.replace(parsed(algorithm, dataset, logs, *flags), **changes)
    assert train(config, OfflineLearner) == 0
    return json.loads((config.run_dir / "results.json").read_text()), state_of(config.run_dir)


def state_of(folder):
    found = CheckpointStore(folder / "checkpoints", keep=3).load(pytest.fail, verify_shards=True)
    arrays = dict(found.learner)
    arrays.pop("progress")
    return arrays


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def check_topologies_and_resume(sets, tmp_path, algorithm, env, *flags):
    whole, state = run(algorithm, sets / env, tmp_path / "whole", *flags)
    assert whole["gradient_steps"] == 30 and whole["dataset"]["episodes"] == 12
    for replicas in (2,) if algorithm == "bc" else (2, 4):  # 4: a part for each
        several, others = run(algorithm, sets / env, tmp_path / str(replicas), *flags, replicas=replicas)
        assert several["replicas"] == replicas
        assert_equal(state, others)
    run(algorithm, sets / env, tmp_path / "parts", *flags, total_steps=10)
    resumed, again = run(algorithm, sets / env, tmp_path / "parts", *flags)
    assert resumed["resumed_at"] == [10] and resumed["weights_sha256"] == whole["weights_sha256"]
    assert_equal(state, again)


class OneStep(gymnasium.Env):
    """Episodes of one step: the observation is -1 or 1, and half of it is the best action."""

    observation_space = action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._side = np.array([self.np_random.choice([-1, 1])], np.float32)
        return self._side, {}

    def step(self, action):
        return self._side, -10.0 * float(action[0] - self._side[0] / 2) ** 2, True, False, {}


@pytest.mark.long
@pytest.mark.parametrize(
    "algorithm, more", [("cql", {"conservative_weight": 1.0, "critic_lr": 1e-3}), ("iql", {})]
)
def test_the_best_action_is_learned_from_uniform_ones(algorithm, more, tmp_path):
    # Cloning them would give actions near 0.
    if "OneStep-v0" not in gymnasium.registry:
        gymnasium.register("OneStep-v0", OneStep)
    generator = np.random.default_rng(0)
    tfrl.collect(
        lambda observation: generator.uniform(-1, 1, 1).astype(np.float32),
        env="OneStep-v0",
        episodes=2000,
        out=tmp_path / "set",
    )
    tfrl.train(
        algorithm,
        env="OneStep-v0",
        dataset=str(tmp_path / "set"),
        total_steps=1500,
        lr=1e-3,
        hidden=(64, 64),
        eval_episodes=4,
        logdir=str(tmp_path),
        run_name="run",
        **more,
    )
    actions = tfrl.load(tmp_path / "run")(np.array([[-1.0], [1.0]], np.float32))
    np.testing.assert_allclose(actions, [[-0.5], [0.5]], atol=0.2)


def test_cloning_is_equal_on_two_replicas_and_after_a_resume(sets, tmp_path, capsys):
    check_topologies_and_resume(sets, tmp_path, "bc", "CartPole-v1", "--env", "none")
    results = json.loads((tmp_path / "whole/run/results.json").read_text())
    assert results["eval"] == {} and results["validation"]["loss"] > 0
    assert results["dataset"]["return_mean"] == 66.0  # of 0 + ... + 11
    capsys.readouterr()
    status.main([str(tmp_path)])
    title, *rows = capsys.readouterr().out.strip().splitlines()
    assert "gradient steps" in title and "env steps" not in title and " 30 " in rows[-1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "env", "flags"),
    [
        ("iql", "Pendulum-v1", ("--held-shards", "2")),
        ("iql", "CartPole-v1", ()),
        ("td3_bc", "Pendulum-v1", ()),
        pytest.param("cql", "Pendulum-v1", ("--action-samples", "2"), marks=pytest.mark.promise),
        ("cql", "CartPole-v1", ("--held-shards", "2")),
    ],
)
def test_every_algorithm_is_equal_on_two_replicas_and_after_a_resume(sets, tmp_path, algorithm, env, flags):
    check_topologies_and_resume(sets, tmp_path, algorithm, env, *flags)


@pytest.mark.long
@pytest.mark.promise
@pytest.mark.parametrize(
    ("algorithm", "env", "flags"),
    [
        ("bc", "CartPole-v1", ("--validation", "0.25")),
        ("iql", "Pendulum-v1", ("--held-shards", "2")),
        ("cql", "CartPole-v1", ()),
    ],
)
def test_a_run_that_is_killed_at_any_moment_ends_with_the_same_bits(sets, tmp_path, algorithm, env, flags):
    class Process(Training):
        module = f"tfrl.{algorithm}"

    flags = ("--dataset", sets / env, *SMALL, *flags, "--env", "none", "--total-steps", 600)
    moment, whole, killed = random.SystemRandom(), tmp_path / "whole", tmp_path / "killed"
    assert Process(whole, *flags).end()[0] == 0
    for done in (20, 150, 300):
        process = Process(killed, *flags)
        process.wait_until(done)
        time.sleep(moment.uniform(0, 0.2))
        process.process.send_signal(signal.SIGKILL)
        code, _, said = process.end()
        assert code == -signal.SIGKILL, said
        assert steps_done(killed) < 600
    assert Process(killed, *flags).end()[0] == 0
    assert_equal(state_of(whole), state_of(killed))
    results = json.loads((killed / "results.json").read_text())
    assert len(results["resumed_at"]) == 3


@pytest.mark.long
def test_patience_ends_a_run(sets, tmp_path):
    flags = ("--env", "none", "--validation", "0.25", "--patience", "2", "--lr", "0.05")
    results, state = run("bc", sets / "CartPole-v1", tmp_path, *flags, total_steps=2000)
    assert results["gradient_steps"] < 2000 and state["recorded/validated"][1] == 2


def test_patience_needs_validation_episodes(tmp_path):
    folder, _ = write(tmp_path / "set", "CartPole-v1", [12] * 4)
    config = parsed("bc", folder, tmp_path, "--env", "none", "--patience", "2")
    assert "--patience 2 needs validation episodes, and --validation 0.1 of 4 episodes is none" in refusal(
        train, config, OfflineLearner
    )


def test_a_set_that_has_changed_is_not_resumed(sets, tmp_path):
    folder, _ = write(tmp_path / "set", "CartPole-v1", [6] * 4)
    run("bc", folder, tmp_path, "--env", "none", total_steps=10)
    write(tmp_path / "more", "CartPole-v1", [6] * 5)
    config = parsed("bc", tmp_path / "more", tmp_path, "--env", "none")
    assert "has changed since" in refusal(train, config, OfflineLearner)


def test_ppo_goes_on_with_a_cloned_policy(sets, tmp_path):
    run("bc", sets / "CartPole-v1", tmp_path / "bc", "--env", "none")
    flags = "--env CartPole-v1 --num-envs 4 --num-steps 16 --num-minibatches 2 --epochs 1 --total-steps 64"
    flags += f" --hidden 8 --activation tanh --eval-episodes 2 --precision float32 --logdir {tmp_path}"
    config = settings.reader("ppo").parse([*flags.split(), "--start-from", str(tmp_path / "bc/run")])
    check_start(config)
    learner = begun(config, OnPolicyLearner)
    there = state_of(tmp_path / "bc/run")
    assert_equal(
        {name: array for name, array in learner.agent.get_state().items() if name.startswith("weights/")},
        {name: array for name, array in there.items() if name.startswith("weights/")},
    )
    assert learner._observations.get_state()["count"] == 12 * 11  # all but the validation episode


def test_cloning_goes_on_with_the_scaling_of_the_run_that_it_starts_from(sets, tmp_path):
    _, there = run("bc", sets / "CartPole-v1", tmp_path / "first", "--env", "none")
    other, _ = write(tmp_path / "other", "CartPole-v1", [5] * 12)
    start = ("--env", "none", "--start-from", str(tmp_path / "first/run"), "--lr", "1e-12")
    _, found = run("bc", other, tmp_path / "second", *start, total_steps=20)
    names = [name for name in found if "observations/" in name]
    assert len(names) == 5, sorted(found)  # three moments, and two constants of the network
    assert_equal({name: found[name] for name in names}, {name: there[name] for name in names})
    _, resumed = run("bc", other, tmp_path / "second", *start, total_steps=30)
    assert_equal({name: resumed[name] for name in names}, {name: there[name] for name in names})


def test_a_return_that_a_run_from_recorded_data_does_not_have_never_stops_it(sets, tmp_path):
    config = parsed("bc", sets / "CartPole-v1", tmp_path, "--env", "none")
    assert train(config, OfflineLearner, callbacks=[tfrl.callbacks.StopOnReturn(100.0)]) == 0
    assert json.loads((config.run_dir / "results.json").read_text())["gradient_steps"] == 30


def test_a_policy_without_an_env_needs_one_to_play(sets, tmp_path):
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    folder = parsed("bc", sets / "CartPole-v1", tmp_path, "--env", "none").run_dir
    run("bc", sets / "CartPole-v1", tmp_path, "--env", "none", "--histograms-every", "1")
    tags = EventAccumulator(str(folder)).Reload().Tags()["tensors"]
    assert any(tag.startswith("weights/") for tag in tags)
    for command in (evaluate.main, record.main, collect.main):
        assert refusal(command, [str(folder)]).startswith("this policy was trained without an env: name one")
    assert evaluate.main([str(folder), "--envs", "CartPole-v1", "--episodes", "2"]) == 0
    assert "python -m tfrl.evaluate" not in "".join(next_commands(read_settings(folder)))


def begun(config, kind):
    """A learner of a new run, after `begin`."""
    from learners import make

    learner = make(config, kind)
    learner.begin()
    return learner


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["iql", "cql"])
def test_sac_goes_on_with_an_offline_run_and_half_of_its_batches_from_the_set(sets, tmp_path, algorithm):
    run(algorithm, sets / "Pendulum-v1", tmp_path / "offline")
    flags = "--env Pendulum-v1 --preset default --hidden 8 --num-envs 2 --batch-size 8 --learning-starts 20"
    flags += f" --iteration-steps 50 --total-steps 100 --eval-episodes 2 --logdir {tmp_path} --run-name sac"
    given = [*flags.split(), "--start-from", str(tmp_path / "offline/run")]
    config = settings.reader("sac").parse([*given, "--dataset", str(sets / "Pendulum-v1")])
    check_start(config)
    learner = begun(config, OffPolicyLearner)
    there = state_of(tmp_path / "offline/run")
    np.testing.assert_array_equal(
        learner.agent.get_state()["agent/target_critic1"], there["agent/target_critic1"]
    )
    arguments = []
    begin = learner.agent.begin_gradient_steps
    learner.agent.begin_gradient_steps = lambda batch, *rest, **more: (
        arguments.append(batch) or begin(batch, *rest, **more)
    )
    learner.update()
    assert arguments
    for batch in arguments:  # [K, 2 envs, 4]: the last two of each env are recorded
        assert batch.observation.shape[1:3] == (2, 4)
        assert (np.abs(batch.observation[:, :, :2, 0]) <= 1).all()  # a cosine
        whole = batch.observation[:, :, 2:, 0] * 100
        np.testing.assert_allclose(whole, np.round(whole), atol=1e-3)  # of tests/recordings.py
    assert train(config, OffPolicyLearner) == 0


def test_a_run_needs_a_set_and_an_env_or_none(sets, tmp_path):
    parse = settings.reader("bc").parse
    assert refusal(parse, []).startswith("bc needs --dataset")
    (sets / "CartPole-v1" / "metadata.json").rename(tmp_path / "metadata.json")
    try:
        given = ["--dataset", str(sets / "CartPole-v1")]
        assert "names no env: give --env ID" in refusal(parse, given)
        assert parse([*given, "--env", "none"]).torso == "mlp"
    finally:
        (tmp_path / "metadata.json").rename(sets / "CartPole-v1" / "metadata.json")
    assert parse(["--dataset", str(sets / "CartPole-v1")]).env == "CartPole-v1"
    given = ["--dataset", str(sets / "CartPole-v1"), "--env", "none", "--eval-every", "3"]
    assert refusal(parse, given) == "--eval-every has no effect with --env none; leave it out."
    for flags in (["--eval-at-start"], ["--keep-policies", "last"], ["--env-kwargs", '{"a": 1}']):
        said = refusal(parse, [*given[:4], *flags])
        assert said == f"{flags[0]} has no effect with --env none; leave it out."
    assert "td3_bc needs continuous actions" in refusal(settings.reader("td3_bc").parse, given[:2])
    assert "--env none is for algorithms" in refusal(settings.reader("ppo").parse, ["--env", "none"])


@pytest.fixture
def settled(tmp_path):
    """Sets of Pendulum that name settings of their env."""
    plain = {"env_kwargs": {}, "frame_skip": None, "max_episode_steps": None, "num_levels": 7}
    for name, more in {"plain": {}, "skip": {"frame_skip": 4}, "g": {"env_kwargs": {"g": 5.0}}}.items():
        write(tmp_path / name, "Pendulum-v1", [3] * 2, **plain | more)
    return tmp_path


def env_of(*flags):
    config = settings.reader("iql").parse([*map(str, flags)])
    return config.env, config.env_kwargs, config.frame_skip


def test_the_settings_of_the_env_are_those_of_the_set_if_the_env_is_spelled_too(settled):
    env, other = ["--env", "Pendulum-v1"], ["--env", "MountainCarContinuous-v0"]
    for spelled in ([], env, ["--env", "auto"]):
        assert env_of("--dataset", settled / "g", *spelled) == ("Pendulum-v1", {"g": 5.0}, None)
        assert env_of("--dataset", settled / "skip", *spelled, "--frame-skip", 2)[2] == 2
    assert env_of("--dataset", settled / "g", *other)[1] == {}
    file = settled / "file.yaml"
    file.write_text(f"algorithm: iql\ndataset: {settled / 'g'}\n")
    for spelled, kwargs in ([], {"g": 5.0}), (env, {"g": 5.0}), (other, {}), (["--env", "none"], {}):
        assert env_of("--config", file, *spelled)[1] == kwargs
    file.write_text(f"algorithm: iql\nenv: Pendulum-v1\nframe_skip: 4\ndataset: {settled / 'gone'}\n")
    assert env_of("--config", file, "--dataset", settled / "plain") == ("Pendulum-v1", {}, None)


def test_a_set_gives_no_levels_to_the_mode_of_a_single_level(settled):
    about = {"env": "coinrun", "distribution_mode": "exploration", "num_levels": 0, "start_level": 0}
    for mode in ("exploration", "hard"):
        (settled / "plain/metadata.json").write_text(json.dumps(about | {"distribution_mode": mode}))
        flags = ["--dataset", str(settled / "plain"), "--distribution-mode", "exploration"]
        config = settings.reader("bc").parse(flags)
        assert (config.env, config.distribution_mode) == ("coinrun", "exploration")


def test_a_run_can_be_read_and_take_a_set_elsewhere_when_its_set_is_gone(settled, tmp_path):
    config = parsed("bc", settled / "g", tmp_path, "--env", "Pendulum-v1")
    config.run_dir.mkdir()
    (config.run_dir / "config.yaml").write_text(to_yaml(config))
    shutil.move(settled / "g", settled / "moved")
    assert of_run(config.run_dir).env_kwargs == {"g": 5.0}
    (config.run_dir / "config.yaml").write_text(to_yaml(dataclasses.replace(config, gamma=0.9)))
    assert of_run(config.run_dir).gamma == 0.9  # without effect, as an earlier version took it
    (config.run_dir / "config.yaml").write_text(to_yaml(config))
    given = ["--config", str(config.run_dir / "config.yaml")]
    assert settings.reader("bc").parse(given) == config
    moved = settings.reader("bc").parse([*given, "--dataset", str(settled / "moved")])
    assert moved == dataclasses.replace(config, dataset=str(settled / "moved"))


def test_sets_whose_envs_have_other_settings_are_refused_unless_a_flag_decides(settled):
    both = ["--dataset", f"{settled / 'plain'},{settled / 'skip'}"]
    sentence = (
        f"{settled / 'plain'} was recorded with no --frame-skip, and {settled / 'skip'} with --frame-skip 4; "
        "give --frame-skip for the evaluations, or equal sets."
    )
    assert refusal(env_of, *both) == refusal(env_of, *both, "--env", "Pendulum-v1") == sentence
    assert env_of(*both, "--frame-skip", "none") == ("Pendulum-v1", {}, None)
    write(settled / "once", "Pendulum-v1", [3] * 2, env_kwargs={}, frame_skip=1)
    assert env_of("--dataset", f"{settled / 'plain'},{settled / 'once'}") == ("Pendulum-v1", {}, None)
    assert env_of(*both, "--env", "none")[0] == "none"
    write(settled / "other", "CartPole-v1", [3])
    said = refusal(env_of, "--dataset", f"{settled / 'plain'},{settled / 'other'}")
    assert said.endswith(f"plain was recorded in Pendulum-v1, and {settled / 'other'} in CartPole-v1.")


def test_replay_warns_of_a_set_of_another_env_or_with_other_settings(settled, monkeypatch):
    from learners import make

    about = settled / "plain/metadata.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"env": "Pendulum-v0"}))
    said = []
    monkeypatch.setattr(Console, "warn", lambda self, sentence: said.append(sentence))

    def warnings(name, *flags):
        given = ["--env", "Pendulum-v1", "--logdir", str(settled), "--dataset", str(settled / name), *flags]
        make(settings.reader("sac").parse([*given, "--hidden", "8"]), OffPolicyLearner).envs.close()
        found = [sentence.removeprefix(f"{settled / name} was recorded ") for sentence in said]
        said.clear()
        return found

    assert warnings("plain") == ["in Pendulum-v0, and --env is Pendulum-v1."]
    assert warnings("g", "--env-kwargs", '{"g": 5}', "--max-episode-steps", "20", "--frame-skip", "1") == []
    assert warnings("g") == ['with --env-kwargs {"g": 5.0}, and this run has --env-kwargs {}.']
    assert warnings("skip") == ["with --frame-skip 4, and this run has no --frame-skip."]


def test_the_envs_are_made_when_nothing_else_can_fail(sets, tmp_path, monkeypatch):
    """Nobody would end their processes."""
    from learners import make

    given = ["--env", "Pendulum-v1", "--hidden", "8", "--num-envs", "2", "--logdir", str(tmp_path)]
    config = settings.reader("sac").parse([*given, "--dataset", str(sets / "CartPole-v1")])
    monkeypatch.setattr(off_policy, "make_envs", lambda *_, **__: pytest.fail("the envs are there"))
    assert "CartPole-v1" in refusal(make, config, OffPolicyLearner)
    config = settings.reader("ppo").parse([*given, "--normalize-observations"])
    monkeypatch.setattr(on_policy, "make_envs", off_policy.make_envs)
    monkeypatch.setattr(OnPolicyLearner, "_initial_scaling", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make(config)
