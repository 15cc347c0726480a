"""`--env-processes`: the same steps, states and errors as in this process, and runs with the same bits."""

import os
import signal
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from processes import ROOT

import tfrl
from tfrl.cli.errors import EnvError
from tfrl.envs import registry
from tfrl.envs.spec import EnvSpec

os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


class Sleepy(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        time.sleep(0.02)
        return np.zeros(1, np.float32), 1.0, False, False, {}


def vectors(env, num_envs=5, processes=3, **options):
    return [
        registry.make(EnvSpec(env, num_envs=num_envs, seed=4, num_processes=n, **options))
        for n in (0, processes)
    ]


def test_steps_and_states_are_those_of_one_process():
    here, apart = vectors("made_envs:made/Both-v0")
    generator = np.random.default_rng(0)
    for step in range(60):
        actions = here.action_spec.uniform(generator, 5)
        for env in (here, apart):
            env.act(actions)
        ours, theirs = here.observe(), apart.observe()
        for mine, other in zip(ours[:4], theirs[:4], strict=True):
            np.testing.assert_array_equal(mine, other)
        assert (ours.final_observation is None) == (theirs.final_observation is None)
        if ours.final_observation is not None:
            np.testing.assert_array_equal(ours.final_observation, theirs.final_observation)
        if step == 30:
            states = apart.get_state()
            assert states == here.get_state()
            apart.set_state(states)
            assert apart.exact_state
    assert apart.solved().tolist() == here.solved().tolist()
    apart.close()


def test_a_process_that_dies_and_an_env_that_fails_give_a_one_sentence_error():
    _, apart = vectors("CartPole-v1", num_envs=2, processes=2)
    os.kill(apart._processes[1]._process.pid, signal.SIGKILL)
    apart.act(np.zeros(2, np.int32))
    with pytest.raises(EnvError, match="the process that steps CartPole-v1 has ended with -9"):
        apart.observe()
    apart.close()
    _, apart = vectors("made_envs:made/late-step-raises-v0", num_envs=2, processes=2)
    with pytest.raises(EnvError, match="raised RuntimeError: the motor is on fire"):
        for _ in range(80):
            apart.act(np.zeros(2, np.int32))
            apart.observe()
    apart.close()


def test_slow_envs_are_stepped_side_by_side():
    _, apart = vectors("test_env_processes:Sleepy", num_envs=4, processes=4)
    began = time.monotonic()
    for _ in range(20):
        apart.act(np.zeros(4, np.int32))
        apart.observe()
    took = time.monotonic() - began
    apart.close()
    assert took < 1.4, "1.6 s one after the other, 0.4 s side by side"


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param("ppo", marks=[pytest.mark.long, pytest.mark.promise]),
        pytest.param("sac", marks=pytest.mark.long),
    ],
)
def test_env_processes_give_equal_results(tmp_path, algorithm):
    settings = {
        "ppo": {
            "env": "CartPole-v1",
            "total_steps": 512,
            "num_envs": 4,
            "num_steps": 64,
            "epochs": 1,
            "eager": True,
        },
        "sac": {"env": "Pendulum-v1", "total_steps": 300, "num_envs": 2, "learning_starts": 100},
    }[algorithm]
    runs = [
        tfrl.train(
            algorithm,
            logdir=tmp_path,
            run_name=f"r{n}",
            env_processes=n,
            hidden=(16,),
            eval_episodes=2,
            **settings,
        )
        for n in (0, 2)
    ]
    assert runs[0].results["weights_sha256"] == runs[1].results["weights_sha256"]
    assert runs[0].results["eval"] == runs[1].results["eval"]


def test_envs_that_cannot_run_in_processes_give_a_one_sentence_error():
    for settings, sentence in (
        ({"env": "catch"}, "env_processes is only for Gymnasium's envs, and catch uses threads"),
        ({"env": "CartPole-v1", "num_envs": 1}, "env_processes must be at most num_envs 1; got 2"),
        ({"env": "CartPole-v1", "actors": 2}, "actors 2 already starts processes that step the envs"),
        ({"env": lambda: None}, "of type NoneType and not a gymnasium.Env"),
    ):
        with pytest.raises(tfrl.SettingsError, match=sentence):
            tfrl.train("ppo", env_processes=2, **settings)


def test_a_process_that_starts_is_not_ended_by_a_signal_to_its_whole_group():
    from tfrl.envs import subprocesses

    spec = EnvSpec("CartPole-v1", num_envs=1, seed=4)
    process = subprocesses._Process(registry.family("CartPole-v1").env_class, spec, [0])
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(process._process.pid, number)
    assert process.answer()[0] == registry.specs(spec)[0]
    status = Path(f"/proc/{process._process.pid}/status").read_text()
    process.close()
    assert "SigBlk:\t0000000000000000" in status, "programs that an env starts take signals"
