"""Observers on Ray: any number of them gives the bits of a run without, whoever dies; skipped without Ray."""

import contextlib
import importlib.util
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from launching import until
from processes import Training, results, steps_done

from benchmarks import command
from benchmarks.process_tree import alive, family
from tfrl.cli.endings import Stopped
from tfrl.cli.errors import EnvError, TrainingError
from tfrl.envs.spec import EnvSpec

FLAGS = "--num-envs 8 --hidden 8 --eval-episodes 4 --checkpoint-every 5 --precision float32"

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="pip install -r requirements-ray.txt"
)


class Reinforce(Training):
    """A training process of REINFORCE."""

    module = "tfrl.reinforce"
    is_forked = False  # Ray

    def observers(self):
        """The process numbers of its observers."""
        found = []
        for pid in family(self.process.pid)[1:]:
            with contextlib.suppress(OSError):
                name = Path(f"/proc/{pid}/cmdline").read_bytes()
                found += [pid] if name.startswith(b"ray::RemoteObserver") else []
        return found


@pytest.mark.promise
@pytest.mark.long
@needs_ray
def test_results_do_not_depend_on_number_deaths_or_hangs_of_observers(tmp_path):
    """Compares 4 observers (one killed, one stopped), then 2, then 1, with a run without observers."""
    folder = tmp_path / "disturbed"
    flags = (*FLAGS.split(), "--observer-timeout", 15)
    training = Reinforce(folder, *flags, "--observers", 4, "--total-steps", 10**8)
    training.wait_until(1000)
    observers = training.observers()
    assert len(observers) == 4
    os.kill(observers[0], signal.SIGKILL)
    os.kill(observers[2], signal.SIGSTOP)
    training.wait_until(steps_done(folder) + 2000)
    everyone = family(training.process.pid)
    training.process.send_signal(signal.SIGTERM)
    code, stdout, stderr = training.end()
    assert code == 143, stdout + stderr
    for words in (
        "has died; another process replaces it",
        "has not answered for 15 s; another process replaces it",
    ):
        assert words in stdout + stderr
    until(lambda: not any(map(alive, everyone)), 30)
    for observers in (2, 1):
        total = steps_done(folder) + 500
        code, stdout, stderr = Reinforce(
            folder, *flags, "--observers", observers, "--total-steps", total
        ).end()
        assert (code, stderr) == (0, ""), stdout + stderr
    whole = tmp_path / "whole"
    code, stdout, stderr = Reinforce(whole, *flags, "--observers", 0, "--total-steps", total).end()
    assert (code, stderr) == (0, ""), stdout + stderr
    assert results(folder)["weights_sha256"] == results(whole)["weights_sha256"]
    assert (results(folder)["observers"], results(whole)["observers"]) == (1, 0)


def quiet_session(raise_if_stopped=lambda: None):
    """The part of a session that observers use."""
    console, watchdog = SimpleNamespace(warn=print), SimpleNamespace(beat=lambda: None)
    return SimpleNamespace(raise_if_stopped_here=raise_if_stopped, console=console, watchdog=watchdog)


def test_an_env_that_fails_in_another_process_is_named_as_it_is_in_this_one(node):
    from tfrl.remote.actors import RayObservers

    config = SimpleNamespace(ray_address=node.address, observers=1, num_envs=2, observer_timeout=60)
    with pytest.raises(
        TrainingError, match="^observer 0 failed: ValueError: .* needs the module nowhere, which"
    ):
        RayObservers(config, EnvSpec("nowhere:made/Hidden-v0", num_envs=2, seed=1), quiet_session())
    name = "tests.made_envs:made/late-step-raises-v0"  # as Ray's processes find it
    observers = RayObservers(config, EnvSpec(name, num_envs=2, seed=1), quiet_session())
    try:
        with pytest.raises(EnvError, match=f"^{name} raised RuntimeError: the motor is on fire, in step"):
            for _ in range(40):
                observers.step(np.ones(2, np.int32), np.ones(2, bool))
    finally:
        observers.close()


def opened(node, name, *, timeout=60.0, **told):
    """Two observers with an env each."""
    from tfrl.remote.actors import RayObservers

    config = SimpleNamespace(ray_address=node.address, observers=2, num_envs=2, observer_timeout=timeout)
    spec = EnvSpec(name, num_envs=2, seed=1)
    return contextlib.closing(RayObservers(config, spec, quiet_session(**told)))


def kill(observers, index):
    import ray

    os.kill(ray.get(observers._actors[index]._ready).pid, signal.SIGKILL)


@pytest.mark.promise
@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_stop_while_the_episodes_end_leaves_all_envs_before_them(node, killed):
    """One observer has sent its env's new state and the other is dead, so neither state is saved."""
    told = []

    def raise_if_stopped():
        if told:
            raise Stopped(143)

    with opened(node, "CartPole-v1", raise_if_stopped=raise_if_stopped) as observers:
        before = observers.get_state()
        observers.step(np.ones(2, np.int32), np.ones(2, bool))
        told.append(True)
        kill(observers, killed)
        with pytest.raises(Stopped):
            observers.settle()
        after = observers.get_state()
        assert after.states == before.states and after.indices == before.indices
        np.testing.assert_array_equal(after.observations, before.observations)


def test_a_new_observer_has_time_to_repeat_its_episodes(node):
    """Twenty steps of 0.1 s, where an answer may take 1 s."""
    with opened(node, "tests.made_envs:made/Slow-v0", timeout=1.0) as observers:
        for _ in range(20):
            seen = observers.step(np.ones(2, np.int32), np.ones(2, bool))
        expected = seen.observation.copy()
        kill(observers, 1)
        observers.settle()
        np.testing.assert_array_equal(observers.get_state().observations, expected)


def test_an_observer_that_is_replaced_as_an_update_ends_shows_its_new_episode(node):
    with opened(node, "tests.made_envs:made/Fifty-v0") as observers:
        observers.step(np.ones(2, np.int32), np.ones(2, bool))
        kill(observers, 1)
        observers.settle()
        np.testing.assert_array_equal(observers.observation, observers.get_state().observations)


@pytest.mark.long
@needs_ray
def test_the_speed_of_observers_is_measured():
    code = "from benchmarks import central_inference as c; o = c.Options(envs=8); "
    code += "print(c._steps_alone(c.READER.parse(c._flags(o, 2)), 5))"
    assert float(command.answer(code)) > 10
