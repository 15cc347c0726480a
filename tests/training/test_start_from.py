"""--start-from: what a run takes over from another one, on any topology, and what it refuses."""

import dataclasses
import functools
import importlib
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from learners import run_to_end
from processes import Answer, assert_refused
from refusals import refusal

from tfrl.algorithms import registry as settings
from tfrl.algorithms.runs import check_start, find_policy
from tfrl.cli.endings import StopRequest
from tfrl.cli.errors import UserError
from tfrl.cli.settings import to_yaml
from tfrl.networks.weights import read_start
from tfrl.run import files
from tfrl.run.checkpoint import CheckpointStore
from tfrl.run.console import Console
from tfrl.run.session import Session
from tfrl.workers import strategy
from tfrl.workers.watchdog import Watchdog

_GYM = "--env CartPole-v1 --num-envs 4 --num-steps 16 --num-minibatches 2 --epochs 2 --total-steps 256"
_GYM += " --eval-episodes 2 --normalize-observations --normalize-rewards --hidden 8 --precision float32"
_GYM += " --lr-schedule constant"
_REPLAY = "--env Pendulum-v1 --hidden 8 --num-envs 2 --batch-size 8 --learning-starts 20 --iteration-steps 50"
_REPLAY += " --total-steps 150 --updates-per-step 0.2 --eval-episodes 2 --precision float32"
FLAGS = {
    "ppo": _GYM,
    "ppg": _GYM + " --policy-updates 2 --aux-epochs 1 --aux-minibatches 4",
    "sac": _REPLAY,
    "daac": _GYM + " --value-epochs 1",
}
_AGENTS = {"ppo": "PPOAgent", "daac": "DAACAgent", "ppg": "PPGAgent", "sac": "SACAgent"}
_LEARNERS = {"ppg": "phasic:PhasicLearner", "sac": "off_policy:OffPolicyLearner"}


def config_of(algorithm, logs, name, *flags):
    where = ["--logdir", str(logs), "--run-name", name]
    return settings.reader(algorithm).parse([*FLAGS[algorithm].split(), *where, *map(str, flags)])


def maker(config):
    """Makes the learner of a config in a session."""
    algorithm = config.algorithm
    module, _, kind = _LEARNERS.get(algorithm, "on_policy:OnPolicyLearner").partition(":")
    learner = getattr(importlib.import_module(f"tfrl.training.{module}"), kind)
    agent = getattr(importlib.import_module(f"tfrl.algorithms.{algorithm}"), _AGENTS[algorithm])
    return lambda session: learner(config, session, agent)


def train(config):
    assert run_to_end(config, maker(config)) == 0
    return json.loads((config.run_dir / "results.json").read_text())


def saved(run):
    """The arrays of a run's newest checkpoint."""
    return CheckpointStore(run / "checkpoints", keep=3).load(print).learner


def begun(config):
    """What a learner of these settings has before its first update."""
    watchdog = Watchdog(config.run_dir / "heartbeats", ("here",), 0, stall_timeout=0.0)
    stop, console = StopRequest(config.run_dir / "stop"), Console(enabled=False)
    session = Session(config, strategy.make(config, None), console, stop, watchdog)
    learner = maker(config)(session)
    learner.begin()
    state = learner.get_state().learner
    learner.close()
    return state


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of runs to start from, by algorithm, each trained when it is asked for first."""
    logs = tmp_path_factory.mktemp("logs")

    def of(algorithm):
        config = config_of(algorithm, logs, algorithm)
        if not config.run_dir.exists():
            train(config)
        return config.run_dir

    return of


@pytest.mark.parametrize(
    "algorithm", ["ppo", *(pytest.param(name, marks=pytest.mark.long) for name in ("ppg", "sac"))]
)
def test_start_from_takes_everything_learned_and_nothing_else(runs, tmp_path, algorithm):
    there = saved(runs(algorithm))
    flags = ["--seed", 7, "--lr", 0.01, "--start-from", runs(algorithm)]
    state = begun(config_of(algorithm, tmp_path, "second", *flags))
    taken = (
        "weights/",
        "agent/",
        "observations/",
        "normalizer/moments",
    )
    names = {name for name in there if name.startswith(taken)}
    assert len(names) > 10
    for name in names:
        np.testing.assert_array_equal(state[name], there[name], err_msg=name)
    assert state["episodes/episodes"] == 0


@pytest.mark.promise
@pytest.mark.long
def test_start_from_gives_equal_results_on_any_topology_and_resumes(small, tmp_path):
    small = functools.partial(small, logdir=str(tmp_path), torso="linear", total_steps=256, eval_episodes=8)
    first = tmp_path / "first"
    train(small(run_name="first"))
    shutil.copytree(first, tmp_path / "copy")
    settings_of = {"start_from": str(first), "lr": 1e-3, "checkpoint_every": 1}
    found = [train(small(run_name=f"on{r}", replicas=r, **settings_of)) for r in (1, 4)]
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]
    assert found[0]["started_from"] == {"run": str(first), "env_steps": 256, "update": 2}
    assert found[0]["env_steps"] == 256
    assert f"start_from: {first}" in (tmp_path / "on4" / "config.yaml").read_text()
    shutil.rmtree(first)  # no longer needed
    again = train(small(run_name="on4", **settings_of | {"total_steps": 384}))
    assert again["resumed_at"] == [256] and again["started_from"] == found[0]["started_from"]
    (tmp_path / "copy").rename(first)
    whole = train(small(run_name="whole", **settings_of | {"total_steps": 384}))
    assert whole["weights_sha256"] == again["weights_sha256"]


@pytest.mark.long
def test_a_fixed_temperature_is_the_runs_own(runs, tmp_path):
    state = begun(config_of("sac", tmp_path, "second", "--start-from", runs("sac"), "--alpha", "0.05"))
    assert state["agent/log_alpha"] == np.float32(np.log(0.05)) != saved(runs("sac"))["agent/log_alpha"]


@pytest.mark.parametrize("algorithm", ["ppo", pytest.param("sac", marks=pytest.mark.long)])
def test_an_export_alone_gives_weights_target_networks_and_normalisation(runs, tmp_path, algorithm):
    exported = tmp_path / "exported"
    shutil.copytree(runs(algorithm), exported, ignore=shutil.ignore_patterns("checkpoints"))
    state = begun(config_of(algorithm, tmp_path, "second", "--start-from", exported))
    there = saved(runs(algorithm))
    for name in there:
        if name.startswith("weights/"):
            np.testing.assert_array_equal(state[name], there[name], err_msg=name)
    if algorithm == "sac":
        for critic in ("critic1", "critic2"):
            parts = [state[n].ravel() for n in there if n.startswith(f"weights/{critic}/")]
            target = state[f"agent/target_{critic}"]
            own, followed = np.concatenate(parts), target[target != 0]  # without what fills it up
            np.testing.assert_array_equal(np.sort(followed), np.sort(own[own != 0]))
        assert not state["agent/actor/mean"].any()
    else:
        assert state["observations/count"] == 256
        np.testing.assert_allclose(state["observations/variance"], there["observations/variance"], rtol=1e-5)
        assert not state["agent/actor/step"]


def test_a_run_starts_from_a_chosen_checkpoint_of_another(tmp_path):
    first = config_of("ppo", tmp_path, "first", "--checkpoint-every", 1, "--eval-every", 1)
    train(first)
    run = first.run_dir
    earlier = CheckpointStore(run / "checkpoints", keep=3).load(print, 3)
    names = {name for name in earlier.learner if name.startswith(("weights/", "agent/", "observations/"))}
    place = run / "checkpoints" / "update-00000003"
    for flags in (["--start-from", place], ["--start-from", run, "--checkpoint", "3"]):
        state = begun(config_of("ppo", tmp_path, "second", *flags))
        for name in names:
            np.testing.assert_array_equal(state[name], earlier.learner[name], err_msg=name)
    assert find_policy(place, "last").name == find_policy(run, "3").name == "update 3"
    best = find_policy(run, "best").weights
    state = begun(config_of("ppo", tmp_path, "third", "--start-from", run, "--checkpoint", "best"))
    for name, array in best.items():
        np.testing.assert_array_equal(state[f"weights/{name}"], array, err_msg=name)

    def sentence(*flags):
        return refusal(lambda: check_start(config_of("ppo", tmp_path, "new", *flags)))

    assert "has no checkpoint 9; it has 2, 3, 4" in sentence("--start-from", run, "--checkpoint", "9")
    assert "has no checkpoint 1" in sentence("--start-from", run / "checkpoints" / "update-00000001")
    assert "leave --checkpoint best out" in sentence("--start-from", place, "--checkpoint", "best")
    assert "must be last, best or the number" in sentence("--start-from", run, "--checkpoint", "first")
    assert "--checkpoint has no effect without --start-from" in sentence("--checkpoint", "best")
    (run / "checkpoints" / "best.npz").unlink()
    assert "has no best checkpoint yet" in sentence("--start-from", run, "--checkpoint", "best")


def test_workers_begin_with_the_same_export_or_not_at_all(runs, tmp_path):
    """Two workers, in threads, have folders of the same name on different disks."""
    for worker in range(2):
        exported = tmp_path / str(worker)
        shutil.copytree(runs("ppo"), exported, ignore=shutil.ignore_patterns("checkpoints"))
    path = tmp_path / "1" / "export" / "weights.npz"

    def begin():
        said, everyone = [0, 0], threading.Barrier(2, timeout=60)
        # Python before 3.11.8 cannot parse in two threads at a time, and NumPy parses what it reads
        # (https://github.com/python/cpython/issues/106905): worker 1 reads when worker 0 has read.
        has_read = threading.Event()

        def of_workers(worker, number):
            said[worker] = number
            has_read.set()
            everyone.wait()
            numbers = np.array(said)
            everyone.wait()
            return numbers

        def read(worker):
            session = SimpleNamespace(
                console=Console(enabled=False), of_workers=functools.partial(of_workers, worker)
            )
            config = config_of("ppo", tmp_path, "second", "--start-from", tmp_path / str(worker))
            assert worker == 0 or has_read.wait(60)
            try:
                return read_start(config, session)[0]
            except UserError as error:
                return str(error)

        with ThreadPoolExecutor(2) as workers:
            return list(workers.map(read, range(2)))

    assert all(map(np.array_equal, *(state.values() for state in begin())))
    with np.load(path) as weights:
        changed = {name: weights[name] * 2 for name in weights.files}
    np.savez(path, **changed)
    assert all("the workers do not see the same weights in --start-from" in said for said in begin())


def test_a_run_that_cannot_be_started_from_gives_a_one_sentence_error(runs, tmp_path):
    first = runs("ppo")
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(first / "config.yaml", empty)

    def sentence(*flags, algorithm="ppo", start=first):
        config = config_of(algorithm, tmp_path, "new", "--start-from", start, *flags)
        return refusal(check_start, config)

    assert "has no checkpoint, and no export" in sentence(start=empty)
    assert "does not exist" in sentence(start=tmp_path / "nowhere")
    assert "does not exist" in sentence(start=tmp_path / "new")
    (tmp_path / "new").mkdir()
    assert "is this run itself" in sentence(start=tmp_path / "new")
    assert "--hidden 8 there, 9 here" in sentence("--hidden", 9)
    assert "--activation tanh there, relu here" in sentence("--activation", "relu")
    assert "trained on CartPole-v1" in sentence("--env", "Acrobot-v1")
    assert "is a run of ppo" in sentence(algorithm="ppg")
    assert "is a run of ppo" in sentence(algorithm="sac")


def test_idaac_starts_from_daac_but_daac_does_not_start_from_idaac(tmp_path):
    order = ["--order-coef", 0.5]
    for name, flags in (("daac", []), ("idaac", order)):
        config = config_of("daac", tmp_path, name, *flags)
        files.make_folder(config.run_dir / "export")
        (config.run_dir / "config.yaml").write_text(to_yaml(config))
        (config.run_dir / "export" / "weights.npz").touch()

    def check(name, *flags):
        check_start(config_of("daac", tmp_path, "new", "--start-from", tmp_path / name, *flags))

    check("daac", *order, "--order-hidden", 2)
    check("idaac", "--order-coef", 0.001)
    assert "--order-coef 0.5 there, 0.0 here" in refusal(check, "idaac")
    assert "--order-hidden 4 there, 2 here" in refusal(check, "idaac", *order, "--order-hidden", 2)


@pytest.mark.long
def test_idaac_takes_all_weights_of_daac(runs, tmp_path):
    there = saved(runs("daac"))
    flags = ["--order-coef", 0.5, "--order-hidden", 2, "--start-from", runs("daac")]
    state = begun(config_of("daac", tmp_path, "second", *flags))
    names = {name for name in there if name.startswith("weights/")}
    for name in names:
        np.testing.assert_array_equal(state[name], there[name], err_msg=name)
    assert any(name.startswith("weights/order/") for name in state.keys() - names)


def test_settings_without_effect_do_not_tell_networks_apart(runs, tmp_path):
    config = config_of("ppo", tmp_path, "new", "--start-from", runs("ppo"))
    check_start(dataclasses.replace(config, free_deviation=not config.free_deviation))


def test_weights_of_other_shapes_give_a_one_sentence_error(runs, tmp_path):
    """The settings are equal, but the checkpoint has other shapes."""
    first = tmp_path / "first"
    shutil.copytree(runs("ppo"), first)
    text = (first / "config.yaml").read_text()
    (first / "config.yaml").write_text(text.replace("hidden: '8'", "hidden: '9'"))
    config = config_of("ppo", tmp_path, "new", "--start-from", first, "--hidden", 9)
    check_start(config)
    assert "has another network or optimizer" in refusal(begun, config)


def test_a_wrong_start_from_is_refused_before_tensorflow(tmp_path):
    answer = Answer(
        *FLAGS["ppo"].split(), "--logdir", tmp_path, "--start-from", tmp_path / "none", module="tfrl.ppo"
    )
    assert_refused(answer, f"error: --start-from: {tmp_path / 'none'} does not exist: give the folder")
