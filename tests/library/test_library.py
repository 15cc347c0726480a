"""`tfrl.train`, `load` and `evaluate` do what the commands do, in a user's program."""

import contextlib
import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv
from processes import ROOT
from threadpoolctl import threadpool_info, threadpool_limits

import tfrl
from cluster import launch
from tfrl.cli import endings, streams
from tfrl.collect import main as collect
from tfrl.envs import registry
from tfrl.envs.spec import Box, Discrete
from tfrl.library import task_of
from tfrl.reporting import scores
from tfrl.run.console import Console

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SMALL = {"total_steps": 2048, "num_envs": 8, "num_steps": 64, "epochs": 2, "eval_episodes": 4, "seed": 3}


def cartpole(**options):
    return gymnasium.wrappers.TimeLimit(gymnasium.make("CartPole-v1", **options).unwrapped, 500)


class Walk(gymnasium.Env):
    """Counts from 5; each fault breaks one rule of Gymnasium's interface."""

    observation_space = spaces.Box(-9, 9, (2,), np.float32)
    action_space = spaces.Discrete(2, start=5)

    def __init__(self, fault=None):
        self.fault = fault

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 9
        shown = np.float32([self.np_random.normal(), 9])
        return shown if self.fault == "no info" else (shown, {})

    def step(self, action):
        assert action in (5, 6)
        self.left -= 1
        shown = np.zeros(3 if self.fault == "shape" else 2, np.float32)
        result = shown, float(action - 5), self.left == 0, False, {}
        return result[:4] if self.fault == "four values" else result


def sha(run):
    return run.results["weights_sha256"]


def numpy_threads():
    """How many threads NumPy's OpenBLAS takes; OpenCV loads one of its own, which can only take one."""
    return {pool["num_threads"] for pool in threadpool_info() if "numpy" in pool["filepath"]}


class Threads(tfrl.Callback):
    """Notes the threads in each update."""

    def __init__(self):
        self.seen = []

    def on_update(self, run, metrics):
        self.seen.append(numpy_threads())


@pytest.fixture(scope="module")
def threads():
    """What the run by id notes of NumPy's threads, and those after it, of two before it."""
    return Threads()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, threads):
    """The same run by id, by a function in a thread, and by the command in a process of its own."""
    logdir = tmp_path_factory.mktemp("logs")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    command = subprocess.Popen(
        [sys.executable, "-m", "tfrl.ppo", "--env", "test_library:cartpole", *flags, "--run-name", "command"]
        + ["--logdir", str(logdir)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests/library"), str(ROOT / "tests")])},
        stdout=subprocess.DEVNULL,
    )
    with threadpool_limits(2, user_api="blas"):
        by_id = tfrl.train(
            "ppo", env="CartPole-v1", logdir=logdir, run_name="id", callbacks=[threads], **SMALL
        )
        threads.after = numpy_threads()
    with ThreadPoolExecutor(1) as pool:
        settings = {"env": cartpole, "logdir": logdir, "run_name": "function", **SMALL}
        by_function = pool.submit(tfrl.train, "ppo", **settings).result()
    assert command.wait() == 0
    return {"id": by_id, "function": by_function, "command": tfrl.Run(logdir / "command")}


def test_an_id_a_function_in_a_thread_and_the_command_train_equal_weights(runs):
    assert len({sha(run) for run in runs.values()}) == 1
    assert len({run.results["eval"]["test"]["return"] for run in runs.values()}) == 1


def test_a_run_has_its_folder_results_and_progress(runs):
    run = runs["function"]
    assert run.results == json.loads((run.folder / "results.json").read_text())
    assert run.progress["env_steps"].tolist() == [512.0, 1024.0, 1536.0, 2048.0]
    assert np.isfinite(run.progress["train/policy_loss"]).all()


def test_the_settings_file_has_the_names_of_callables(runs):
    names = {
        name: next(line for line in text.splitlines() if line.startswith("env: "))
        for name, run in runs.items()
        if (text := (run.folder / "config.yaml").read_text())
    }
    assert names["id"] == "env: CartPole-v1"
    assert names["function"] == names["command"] == "env: test_library:cartpole"


@pytest.mark.promise
@pytest.mark.long
def test_the_same_call_resumes_bit_for_bit(runs, tmp_path):
    class Stop(tfrl.Callback):
        def on_update(self, run, metrics):
            if run.updates == 2:
                os.kill(os.getpid(), signal.SIGINT)

    settings = {**SMALL, "logdir": tmp_path, "run_name": "broken-off"}
    make = lambda: gymnasium.make("CartPole-v1")  # noqa: E731
    handlers = [signal.getsignal(number) for number in STOPS]
    with pytest.raises(KeyboardInterrupt):
        tfrl.train("ppo", env=make, callbacks=[Stop()], **settings)
    assert not tfrl.Run(tmp_path / "broken-off").results
    after = [signal.getsignal(number) for number in STOPS]
    assert handlers == after
    run = tfrl.train("ppo", env=make, callbacks=[tfrl.Callback()], **settings)
    assert sha(run) == sha(runs["id"]) and run.results["resumed_at"] == [1024]
    name = "test_library:test_the_same_call_resumes_bit_for_bit.<locals>.<lambda>"
    assert f"\nenv: {name}\n" in (run.folder / "config.yaml").read_text()
    again = tfrl.train("ppo", env=make, **settings)
    assert again.results == run.results, "a run that is complete is left alone"


def test_a_program_with_learners_keeps_its_handlers_and_gets_the_signal(tmp_path, monkeypatch):
    """The learners are small programs, in place of trainers. The later runs are in a thread."""
    worker = f"""
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print("learning", flush=True)
os.kill({os.getpid()} if sys.argv[1] == "ours" else os.getpid(), signal.SIGTERM)
time.sleep(30)
"""

    def train(whose):
        command = [sys.executable, "-S", "-c", worker, whose]
        monkeypatch.setattr(launch, "launch", lambda places, _, **options: real(places, command, **options))
        return tfrl.train("ppo", env="CartPole-v1", logdir=tmp_path, run_name=whose, learners=2, **SMALL)

    real, came, out = launch.launch, [], io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)  # it has no `buffer`, as in a notebook
    before = [signal.signal(number, lambda number, _: came.append(number)) for number in STOPS]
    try:
        ours = [signal.getsignal(number) for number in STOPS]
        train("ours")
        assert came == [signal.SIGTERM] and "learning\n" in out.getvalue()
        assert [signal.getsignal(number) for number in STOPS] == ours
        with ThreadPoolExecutor(1) as pool:
            pool.submit(train, "theirs").result()
            endings.OURS.begin()  # as in a program that never got a signal
            pool.submit(train, "others").result()
        assert came == [signal.SIGTERM] * 3
    finally:
        for number, handler in zip(STOPS, before, strict=True):
            signal.signal(number, handler)


def test_training_takes_one_thread_of_numpy_and_gives_the_others_back(runs, threads):
    assert threads.seen and all(number == {1} for number in threads.seen)
    assert threads.after == {2}


def test_a_policy_takes_one_observation_or_a_batch(runs):
    policy = tfrl.load(runs["function"].folder)
    shown = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    actions = policy(shown)
    assert actions.dtype.kind == "i" and set(actions) == {0, 1}
    assert [policy(each) for each in shown] == actions.tolist() == policy(shown.tolist()).tolist()
    drawn = [policy.sample(shown, seed=seed) for seed in (1, 1, 2)]
    assert (drawn[0] == drawn[1]).all() and (drawn[0] != drawn[2]).any()
    assert type(policy(shown[0])) is int
    for seed in (-1, 1.5, "x"):
        with pytest.raises(tfrl.SettingsError, match="^seed must be a whole number, 0 or more; got "):
            policy.sample(shown, seed=seed)
    with pytest.raises(
        tfrl.SettingsError, match=r"takes observations of \[4\], or a batch of them; got \[5\]"
    ):
        policy(np.zeros(5))


def test_a_batch_may_be_empty_and_numbers_are_finite(runs):
    policy = tfrl.load(runs["function"].folder)
    for choose in (policy, policy.sample):
        actions = choose(np.zeros((0, 4), np.float32))
        assert actions.shape == (0,) and actions.dtype == policy(np.zeros((1, 4))).dtype
        for wrong in (np.nan, np.inf):
            with pytest.raises(
                tfrl.SettingsError, match="takes finite float32 numbers; got NaN, infinite or"
            ):
                choose([0.0, wrong, 0.0, 0.0])


def test_an_evaluation_is_that_of_the_run_and_of_a_plain_loop(runs):
    policy = tfrl.load(runs["function"].folder)
    found = tfrl.evaluate(policy, episodes=4)
    assert found.mean == runs["function"].results["eval"]["test"]["return"]
    assert found.returns.tolist() == found.lengths.tolist(), "CartPole gives 1 a step"
    more = tfrl.evaluate(policy, env=lambda: gymnasium.make("CartPole-v1"), episodes=70, seed=5)
    assert more.returns.shape == more.lengths.shape == (70,)
    assert more.interval[0] < more.mean < more.interval[1]
    of_envs = [more.returns[env::64].mean() for env in range(64)]
    assert more.interval == scores.stratified_bootstrap([np.array(of_envs)], scores.mean)
    for wrong, said in (
        ({"episodes": 0}, "episodes must be at least 1 and at most 1000000; got 0."),
        ({"seed": -1}, "seed must be at least 0 and at most 2147483647; got -1."),
        ({"greedy": "no"}, "greedy must be true or false; got 'no'."),
    ):
        with pytest.raises(tfrl.SettingsError, match=said):
            tfrl.evaluate(policy, **wrong)
    with pytest.raises(tfrl.SettingsError, match="so this policy cannot play both"):
        tfrl.evaluate(policy, env="Pendulum-v1")


def test_a_run_or_its_folder_is_evaluated_like_its_policy(runs, tmp_path):
    run = runs["function"]
    expected = tfrl.evaluate(tfrl.load(run.folder), episodes=4).returns.tolist()
    for given in (run, run.folder, str(run.folder)):
        assert tfrl.evaluate(given, episodes=4).returns.tolist() == expected
    assert tfrl.collect(run, out=tmp_path / "set", episodes=1, epsilon=0.1).is_dir()
    about = json.loads((tmp_path / "set/metadata.json").read_text())["about"]
    assert about["actions"] == "greedy with epsilon 0.1"
    assert tfrl.collect(run, out=tmp_path / "set", episodes=2, epsilon=0.1).is_dir()  # goes on
    with pytest.raises(tfrl.SettingsError, match="nowhere does not exist: give the folder of a run"):
        tfrl.evaluate(tmp_path / "nowhere")
    with pytest.raises(
        tfrl.SettingsError, match="must be that of tfrl.load, a run or its folder; got a value of type dict"
    ):
        tfrl.evaluate({})


def test_a_policy_refuses_what_reset_and_step_return(runs):
    policy, env = tfrl.load(runs["function"].folder), gymnasium.make("CartPole-v1")
    wanted = r"takes an observation \(float32 \[4\]\); got a tuple with a dict: pass the observation alone"
    for returned in (env.reset(seed=1), env.step(0)):
        with pytest.raises(tfrl.SettingsError, match=wanted):
            policy(returned)
    assert policy((0.0, 0.1, 0.0, 0.1)) in (0, 1), "a tuple of numbers is an observation"


def test_a_callable_of_an_evaluation_gets_no_keyword_arguments_of_the_run(runs):
    policy = tfrl.load(runs["id"].folder)
    policy.config = dataclasses.replace(policy.config, env_kwargs={"sutton_barto_reward": True})
    found = tfrl.evaluate(policy, env=lambda: gymnasium.make("CartPole-v1"), episodes=2)
    assert found.returns.tolist() == found.lengths.tolist(), "and not 0 a step"
    assert tfrl.evaluate(policy, env="CartPole-v1", episodes=2).mean <= 0


def test_a_set_of_a_checkpoint_lies_in_the_folder_of_its_run(runs):
    folder = runs["id"].folder
    (checkpoint,) = sorted((folder / "checkpoints").glob("update-*"))[-1:]
    assert collect([str(checkpoint), "--episodes", "2"]) == 0
    assert (folder / "episodes" / "metadata.json").is_file()
    shutil.rmtree(folder / "episodes")


def test_arguments_of_an_env_belong_to_it_alone(runs):
    policy = tfrl.load(runs["id"].folder)
    policy.config = dataclasses.replace(policy.config, env_kwargs={"sutton_barto_reward": True})
    assert task_of(policy.config, "CartPole-v1", None).env_kwargs == policy.config.env_kwargs
    policy.config = dataclasses.replace(policy.config, env=registry.name_of(CartPoleEnv))
    assert task_of(policy.config, CartPoleEnv, None).env_kwargs == policy.config.env_kwargs
    assert task_of(policy.config, "CartPole-v1", None).env_kwargs == {}


def test_actor_and_critic_have_the_networks_of_their_own_lambdas(tmp_path):
    import keras  # TensorFlow

    network = {"actor": lambda x: keras.layers.Dense(8)(x), "critic": lambda x: keras.layers.Dense(24)(x)}
    settings = {"env": "CartPole-v1", "total_steps": 32, "num_envs": 4, "num_steps": 8, "epochs": 1}
    run = tfrl.train("ppo", network=network, logdir=tmp_path, eval_episodes=1, **settings)
    with np.load(run.folder / "export/weights.npz") as weights:
        assert weights["actor_torso/dense/kernel"].shape == (4, 8)
        assert weights["critic_torso/dense/kernel"].shape == (4, 24)


def test_bad_settings_give_a_one_sentence_error(tmp_path):
    for algorithm, settings, sentence in (
        ("pp", {}, r"no algorithm 'pp' \(did you mean ppo\?\)"),
        ("ppo", {"num_env": 3}, r"ppo has no setting num_env \(did you mean num_envs\?\)"),
        ("ppo", {"tau": 0.5}, r"ppo has no setting tau"),
        ("ppo", {"num_envs": "many"}, "num_envs must be a whole number; got 'many'"),
        ("ppo", {"num_envs": 8, "actors": 3}, "num_envs must be divisible by actors 3"),
        ("ppo", {"env": gymnasium.make("CartPole-v1")}, "env must be an id or a function .* not a TimeLimit"),
        ("ppo", {"env": lambda: None}, "of type NoneType and not a gymnasium.Env"),
        ("ppo", {"env": lambda: 1 / 0}, "cannot be made: ZeroDivisionError: division by zero"),
        ("ppo", {"env": "test_library:walk"}, "the module test_library has no walk"),
        ("ppo", {"env": "no_such_module:f"}, "cannot be imported here .ModuleNotFoundError"),
        (
            "ppo",
            {"env": lambda: Walk(), "actors": 2},
            "actors 2 needs an env that other processes can import",
        ),
        ("ppo", {"env": lambda: Walk(), "learners": 2}, "learners 2 needs an env that other processes can"),
        (
            "ppo",
            {"env": lambda: Walk("no info")},
            r"raised TypeError: 'numpy.float32' object is not iterable, in reset",
        ),
        (
            "ppo",
            {"env": lambda: Walk("four values")},
            r"not enough values to unpack \(expected 5, got 4\), in step\(action\)",
        ),
        (
            "ppo",
            {"env": lambda: Walk("shape")},
            r"shows an observation of float32 \[3\] where its observation_",
        ),
    ):
        with pytest.raises(tfrl.SettingsError, match=sentence) as caught:
            tfrl.train(algorithm, logdir=tmp_path, **settings)
        assert isinstance(caught.value, ValueError) and "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_the_traceback_shows_the_code_of_the_env_and_none_of_the_checks(tmp_path):
    for settings, cause in (({"lr": -1}, type(None)), ({"env": lambda: Walk("no info")}, TypeError)):
        with pytest.raises(tfrl.SettingsError) as caught:
            tfrl.train("ppo", logdir=tmp_path, **settings)
        assert type(caught.value.__cause__) is cause and caught.value.__suppress_context__


def test_actions_are_what_the_env_takes():
    assert Discrete(2, start=5).as_env_takes(np.int32([0, 1])).tolist() == [5, 6]
    taken = Box((-2.0, 0.1), (2.0, 0.3), "float64").as_env_takes(np.float32([[-1, 1], [0, -1]]))
    assert taken.dtype == np.float64 and taken[0, 0] == -2 and taken[1, 0] == 0
    assert (taken[:, 1] <= 0.3).all() and (taken[:, 1] >= 0.1).all(), "in float64"


def test_the_import_is_quick_and_leaves_tensorflow_and_signals_alone():
    code = (
        "import signal, sys, time; before = signal.getsignal(signal.SIGINT)\n"
        "began = time.process_time(); import tfrl; took = time.process_time() - began\n"
        "assert 'tensorflow' not in sys.modules and took < 0.3, took\n"
        "assert signal.getsignal(signal.SIGINT) is before\n"
        "assert issubclass(tfrl.SettingsError, ValueError) and callable(tfrl.evaluate)\n"
        "tfrl.train, tfrl.load, tfrl.Callback; assert 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


class Counted(Walk):
    """Notes how many are open; the third one at a time cannot be made, and the second one fails late."""

    open = 0

    def __init__(self):
        super().__init__()
        if Counted.open == 2:
            raise ValueError("the licence is for two")
        Counted.open += 1
        self.fails = Counted.open == 2

    def step(self, action):
        if self.fails and self.left == 3:
            raise RuntimeError("the motor is on fire")
        return super().step(action)

    def close(self):
        Counted.open -= 1


def test_an_env_of_which_there_are_too_few_gives_one_sentence(tmp_path):
    with pytest.raises(tfrl.SettingsError, match="cannot be made.*the licence is for two.$"):
        tfrl.train("ppo", env=Counted, logdir=tmp_path, run_name="r", **SMALL)


def test_a_failed_evaluation_closes_its_envs(tmp_path):
    Counted.open = 0
    settings = {**SMALL, "num_envs": 1, "num_steps": 32, "num_minibatches": 1, "total_steps": 32}
    settings |= {"eager": True}
    run = tfrl.train("ppo", env=Walk, logdir=tmp_path, run_name="r", **settings | {"eval_episodes": 1})
    with pytest.raises(tfrl.TrainingError, match="the motor is on fire"):
        tfrl.evaluate(tfrl.load(run.folder), env=Counted, episodes=2)
    assert Counted.open == 0


def test_results_of_an_earlier_shorter_run_do_not_count(tmp_path):
    (tmp_path / "results.json").write_text('{"env_steps": 160}')
    for ended, is_over in ((160, True), (320, False)):
        (tmp_path / "progress.csv").write_text(f"env_steps,train/loss\n80,1\n{ended},1\n")
        assert bool(tfrl.Run(tmp_path).results) == is_over


def test_a_policy_without_masks_takes_none(runs):
    policy = tfrl.load(runs["function"].folder)
    with pytest.raises(tfrl.SettingsError, match="was trained without action masks"):
        policy(np.zeros(4, np.float32), action_mask=[1, 0])


def test_messages_name_settings_as_python_does(capsys):
    """Also those that are no errors; a command to type keeps its flags."""
    for inside, shown in (
        (True, "more total_steps in /a--b, or python -m tfrl.evaluate RUN --greedy\n"),
        (False, None),
    ):
        text = "more --total-steps in /a--b, or python -m tfrl.evaluate RUN --greedy"
        with streams.called_from_python() if inside else contextlib.nullcontext():
            Console().message(text)
        assert capsys.readouterr().out == (shown or f"{text}\n")
