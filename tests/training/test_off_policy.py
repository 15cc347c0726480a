"""Runs from replay: the same on any topology, gone on with exactly, killed or not; the loop's arithmetic."""

import contextlib
import csv
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from learners import make, run_to_end, updated
from refusals import refusal
from worker_pair import ended, run_workers, started

from tfrl.algorithms import registry as settings
from tfrl.cli.endings import Stopped, StopRequest
from tfrl.envs import gymnasium
from tfrl.experience.replay import ReplayBuffer
from tfrl.run import session as session_module
from tfrl.run.checkpoint import CheckpointStore
from tfrl.training import off_policy

SMALL = (
    *(
        "--env",
        "CartPole-v1",
        "--preset",
        "default",
        "--num-envs",
        "4",
        "--hidden",
        "16",
        "--batch-size",
        "16",
    ),
    *("--iteration-steps", "100", "--total-steps", "400", "--learning-starts", "60", "--train-every", "20"),
    *("--replay-size", "200", "--checkpoint-every", "1", "--eval-episodes", "2"),
)
DQN = (
    "dqn",
    *SMALL,
    "--prioritized",
    "--priority-beta",
    "1",
    "--n-step",
    "3",
    "--target-every",
    "7",
    "--updates-per-step",
    "0.3",
)
SAC = ("sac", *SMALL[2:], "--env", "Pendulum-v1", "--updates-per-step", "0.2", "--noise-correlation", "0.8")
SAC += ("--optimizer", "nadam", "--reward-scale", "0.1", "--reward-shift", "-0.5")


def parsed(algorithm, *flags):
    return settings.reader(algorithm).parse(flags)


def train(algorithm, logdir, *flags, **changes):
    """A run in this process; its config."""
    config = dataclasses.replace(parsed(algorithm, *flags, "--logdir", str(logdir)), **changes)
    agent = __import__(f"tfrl.algorithms.{algorithm}", fromlist=["x"])
    make_agent = getattr(agent, f"{algorithm.upper()}Agent")
    make = lambda session: off_policy.OffPolicyLearner(config, session, make_agent)  # noqa: E731
    assert run_to_end(config, make) == 0
    return config


def results(config):
    return json.loads((config.run_dir / "results.json").read_text())


def final_state(config):
    """All arrays of the last checkpoint but for the clock, its shards' among them."""
    found = CheckpointStore(config.run_dir / "checkpoints", keep=3).load(pytest.fail, verify_shards=True)
    arrays = dict(found.learner)
    arrays.pop("progress")
    ends = {}  # by name and first row, the arrays of all workers, each of some envs
    for shard in sorted(found.shards, key=lambda shard: shard.about["envs"]):
        for name, array in shard.load().items():
            if name not in ("final_at", "finals"):
                ends.setdefault(name, {}).setdefault(shard.about["begin"], []).append(array)
    for name, rows in ends.items():
        joined = np.concatenate([np.concatenate(rows[begin], axis=1) for begin in sorted(rows)])
        arrays[f"replay/{name}"] = joined[-200 // 4 :]
    return arrays


def assert_same_end(one, other):
    expected, found = final_state(one), final_state(other)
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    assert results(one)["weights_sha256"] == results(other)["weights_sha256"]
    assert results(one)["eval"] == results(other)["eval"]


@pytest.fixture(scope="module")
def dqn(tmp_path_factory):
    """A run by one replica that nothing disturbed."""
    return train(*DQN[:1], tmp_path_factory.mktemp("plain"), *DQN[1:])


@pytest.mark.promise
@pytest.mark.long
def test_four_replicas_then_two_workers_end_as_one_undisturbed_run(dqn, tmp_path):
    half = train(*DQN[:1], tmp_path, *DQN[1:], total_steps=200, replicas=4)
    assert results(half)["env_steps"] == 200
    whole = train_on_two_workers(half)
    assert results(whole)["resumed_at"] == [200] and results(whole)["workers"] == 2
    assert_same_end(dqn, whole)


def train_on_two_workers(config):
    """Two processes train a run of DQN to its end; its config."""
    command = ["-m", "tfrl.dqn", *DQN[1:], "--logdir", config.logdir]
    ends = run_workers(command, command)
    assert [code for code, _ in ends] == [0, 0], ends
    return config


@pytest.mark.promise
@pytest.mark.long
def test_two_replicas_then_one_end_as_one_undisturbed_run(dqn, tmp_path):
    train(*DQN[:1], tmp_path, *DQN[1:], total_steps=200, replicas=2)
    assert_same_end(dqn, train(*DQN[:1], tmp_path, *DQN[1:]))


@pytest.mark.promise
@pytest.mark.long
def test_a_resumed_run_with_continuous_actions_ends_undisturbed(tmp_path):
    plain = train(*SAC[:1], tmp_path / "plain", *SAC[1:])
    train(*SAC[:1], tmp_path / "halves", *SAC[1:], total_steps=200, replicas=2)
    assert_same_end(plain, train(*SAC[:1], tmp_path / "halves", *SAC[1:]))


@pytest.mark.promise
@pytest.mark.long
@pytest.mark.parametrize("algorithm", [SAC, DQN], ids=["sac", "dqn"])
def test_a_resumed_run_of_a_single_env_ends_undisturbed(algorithm, tmp_path):
    """It acts while one program takes its gradient steps (tests/agents/test_whole_steps.py)."""
    flags = (*algorithm, "--num-envs", "1")
    plain = train(flags[0], tmp_path / "plain", *flags[1:])
    train(flags[0], tmp_path / "halves", *flags[1:], total_steps=200)
    assert_same_end(plain, train(flags[0], tmp_path / "halves", *flags[1:]))
    deviations = [row.get("train/action_std") for row in without_times(plain)]
    assert len(deviations) == 4
    assert all(0 < float(x) < 2 if algorithm is SAC else x is None for x in deviations)


def test_a_run_stopped_during_its_first_steps_resumes():
    """An actor that is killed then may delay the stop for minutes."""

    def stopped():
        raise Stopped(143)

    def fresh():
        return contextlib.closing(make(parsed("dqn", *DQN[1:], "--lag", "1"), off_policy.OffPolicyLearner))

    with fresh() as one:
        one.envs.take = stopped
        with pytest.raises(Stopped):
            one.update()
        state = one.get_state()
    with fresh() as again, fresh() as undisturbed:
        again.set_state(state)
        (_, found), (_, expected) = updated(again, 3), updated(undisturbed, 3)
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


@pytest.mark.parametrize("lag", [pytest.param("0", marks=pytest.mark.long), "1"])
def test_replay_has_transformed_rewards_and_the_statistics_raw_ones(lag):
    """CartPole pays 1 for each step."""
    flags = ("--reward-scale", "0.5", "--reward-shift", "0.125", "--lag", lag)
    with contextlib.closing(make(parsed(*DQN, *flags), off_policy.OffPolicyLearner)) as learner:
        metrics = learner.update()
        assert (learner.replay._rewards[:25] == 0.625).all()
    assert metrics["rollout/episode_return"] == metrics["rollout/episode_length"] > 0


def test_priorities_are_the_errors_and_their_weights_grow_to_the_end():
    """(|error| + 1e-6)^alpha of each transition; (N P)^-beta, with beta from 0.4 to 1 over --total-steps."""
    config = parsed(*DQN[:1], *DQN[1:], "--priority-beta", "0.4", "--priority-exponent", "0.7")
    with contextlib.closing(make(config, off_policy.OffPolicyLearner)) as learner:
        begin, learn = learner.agent.begin_gradient_steps, learner._learn
        env, betas, turns = np.arange(4)[:, None], [], []

        def checked(batch, noise, **options):
            priorities = learner.replay.get_state()["priorities"]  # [envs, rows], as they were drawn by
            shares = priorities / priorities.sum(axis=1, keepdims=True)
            ratio = np.log(shares[env, batch.rows] / shares[shares > 0].min())
            if ratio.any():
                betas.append(-(ratio * np.log(batch.weight)).sum() / (ratio**2).sum())
                np.testing.assert_allclose(batch.weight, np.exp(-betas[-1] * ratio), rtol=1e-5)
                # The step that is taken meanwhile counts.
                assert betas[-1] == pytest.approx(0.4 + 0.6 * 20 * len(turns) / 400, abs=1e-5)
            started.append(begin(batch, noise, **options))
            return started[-1]

        def in_turn(iteration, env_steps):
            turns.append(env_steps)
            learn(iteration, env_steps)

        learner.agent.begin_gradient_steps, learner._learn = checked, in_turn
        for _ in range(4):
            started = []
            learner.update()
            _, rows, errors = started[-1].wait()
            priorities = learner.replay.get_state()["priorities"]
            last = {(e, row): error for (k, e, j), row in np.ndenumerate(rows) for error in [errors[k, e, j]]}
            for (e, row), error in last.items():
                assert priorities[e, row] == pytest.approx((abs(error) + 1e-6) ** 0.7, rel=1e-6)
            assert np.unique(errors).size > errors.size / 2
    assert betas == sorted(betas) and betas[0] < 0.6 and betas[-1] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("num_envs", "updates", "meanwhile"),
    [(1, 0.25, 4), pytest.param(1, 1, 1, marks=pytest.mark.long), (2, 0.25, 0)],
)
def test_a_single_env_acts_with_the_weights_before_the_gradient_steps_under_way(num_envs, updates, meanwhile):
    """With two envs, which may be on two workers, actions follow the newest weights."""
    flags = ("--env", "CartPole-v1", "--hidden", "16", "--total-steps", "80", "--iteration-steps", "40")
    flags += ("--learning-starts", "8", "--train-every", "4", "--batch-size", "8")
    flags += (
        "--updates-per-step",
        str(updates),
        "--num-envs",
        str(num_envs),
        "--replay-size",
        "80",
        "--lr",
        "0.1",
    )
    with contextlib.closing(make(parsed("dqn", *flags), off_policy.OffPolicyLearner)) as learner:
        agent, before, acted = learner.agent, [], []
        begin, explore = agent.begin_gradient_steps, agent.acting.explore

        def noted(batch, noise, **options):
            before.append(agent.learning.vectors())
            return begin(batch, noise, **options)

        def checked(observations, rows):
            under_way = num_envs == 1 and learner._pending is not None
            weights = before[-1] if under_way else agent.learning.vectors()
            expected = agent.acting.numpy_policy.outputs(weights)(observations)
            np.testing.assert_array_equal(agent.acting.array_pass(observations), expected)
            acted.append(len(before) if under_way else 0)
            return explore(observations, rows)

        agent.begin_gradient_steps, agent.acting.explore = noted, checked
        for first in (0, len(before)):
            learner.update()
            assert learner._pending is None and len(before) > first
    # In the first iteration, the last gradient steps end with it.
    assert {acted.count(calls) for calls in range(1, len(before))} <= {meanwhile, 1}
    assert max(acted.count(calls) for calls in range(1, len(before))) == meanwhile
    assert any((before[0][name] != before[-1][name]).any() for name in before[0])


@pytest.mark.promise
@pytest.mark.long
def test_two_workers_and_a_kill_end_as_one_process(dqn, tmp_path):
    """One process is killed after its first checkpoint, and two workers continue."""
    command = [sys.executable, "-m", "tfrl.dqn", *DQN[1:], "--logdir", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    config = dataclasses.replace(dqn, logdir=str(tmp_path))
    while not list(config.run_dir.glob("checkpoints/update-*[0-9]")) and process.poll() is None:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() in (-signal.SIGKILL, 0)
    killed_at = CheckpointStore(config.run_dir / "checkpoints", keep=3).load(pytest.fail).env_steps
    train_on_two_workers(config)
    if killed_at < 400:
        assert results(config)["resumed_at"] == [killed_at] and results(config)["workers"] == 2
    assert results(config)["weights_sha256"] == results(dqn)["weights_sha256"]
    assert results(config)["eval"] == results(dqn)["eval"]


def without_times(config, file="progress.csv"):
    """The rows of a file, but for times; none before an episode has ended."""
    if file == "episodes.csv" and not (config.run_dir / file).exists():
        return []
    with (config.run_dir / file).open() as content:
        rows = list(csv.DictReader(content))
    return [{k: v for k, v in row.items() if not k.startswith("time/") and k != "seconds"} for row in rows]


def stopped_at(numbers, monkeypatch):
    """Lets runs stop at these votes of all workers, counted from 1."""
    votes = itertools.count(1)

    def vote(session):
        if next(votes) in numbers:
            raise Stopped(0)

    monkeypatch.setattr(session_module.Session, "raise_if_stopped", vote)


ONE_ITERATION = ("--iteration-steps", "400", "--total-steps", "400")


@pytest.mark.parametrize(
    ("algorithm", "further"),
    [
        pytest.param(DQN, (), marks=[pytest.mark.long, pytest.mark.promise]),
        pytest.param(DQN, ("--lag", "1", "--iteration-steps", "200"), marks=pytest.mark.long),
        pytest.param(SAC, ("--num-envs", "1"), marks=pytest.mark.long),
        pytest.param(SAC, ("--train-every", "400", "--updates-per-step", "0.5"), marks=pytest.mark.long),
    ],
    ids=["dqn", "prefetched", "one-env", "one-turn"],
)
def test_a_run_that_is_stopped_within_an_iteration_ends_undisturbed(
    algorithm, further, tmp_path, monkeypatch
):
    """It is stopped between env steps and among gradient steps, and resumed by another number of replicas."""
    flags = (*algorithm, *ONE_ITERATION, *further)
    plain = train(flags[0], tmp_path / "plain", *flags[1:])
    with monkeypatch.context() as patch:
        stopped_at({12, 33}, patch)
        replicas = 1 if "1" in further[:2] else 2
        for count in (1, replicas, 1):
            whole = train(flags[0], tmp_path / "parts", *flags[1:], replicas=count)
    at = results(whole)["resumed_at"]
    assert len(at) == 2 and any(steps % whole.iteration_steps for steps in at)
    assert_same_end(plain, whole)
    assert without_times(whole) == without_times(plain)
    assert without_times(whole, "episodes.csv") == without_times(plain, "episodes.csv")


def test_a_single_worker_obeys_a_signal_at_the_next_turn(tmp_path, monkeypatch):
    """An iteration of 100,000 env steps has a vote at every thousandth turn or so."""
    turns, act = [], ReplayBuffer.act

    def counted(replay, actions):
        turns.append(len(actions))
        act(replay, actions)

    monkeypatch.setattr(ReplayBuffer, "act", counted)
    monkeypatch.setattr(StopRequest, "signalled", property(lambda stop: len(turns) >= 20))
    flags = ("--iteration-steps", "100000", "--total-steps", "100000", "--learning-starts", "10000")
    train(*DQN[:1], tmp_path, *DQN[1:], *flags)
    assert len(turns) == 20


@pytest.mark.long
def test_episodes_are_counted_once_where_envs_are_not_restored_exactly(tmp_path, monkeypatch):
    """What was played within the iteration counts; the cut episodes do not."""
    flags = (*DQN, *ONE_ITERATION, "--learning-starts", "200")
    with monkeypatch.context() as patch:
        stopped_at({41}, patch)
        train(flags[0], tmp_path, *flags[1:])
    exactly = gymnasium.GymnasiumVec._resume
    monkeypatch.setattr(gymnasium.GymnasiumVec, "_resume", lambda *given: exactly(*given) and False)
    whole = train(flags[0], tmp_path, *flags[1:])
    rows = without_times(whole, "episodes.csv")
    (row,) = without_times(whole)
    assert int(row["rollout/episodes"]) == len(rows) > 0
    steps = [int(row["env_steps"]) for row in rows]
    assert steps == sorted(steps) and sum(float(row["length"]) for row in rows) <= 400


@pytest.mark.long
def test_one_signal_stops_two_workers_within_an_iteration_and_one_process_ends_it(tmp_path):
    """SIGTERM for worker 1 alone: both save at the same turn. The iteration is the whole run."""
    run = (*SAC, "--iteration-steps", "1000", "--total-steps", "1000", "--train-every", "4")
    run += ("--replay-size", "1000", "--updates-per-step", "0.5", "--lr-schedule", "linear")
    command = ["-m", f"tfrl.{run[0]}", *run[1:], "--logdir", str(tmp_path / "stopped")]
    config = parsed(*run, "--logdir", str(tmp_path / "stopped"))
    with started(command, command) as workers:
        while not (config.run_dir / "config.yaml").exists() and workers[0].poll() is None:
            time.sleep(0.05)
        time.sleep(1)  # so that, on most machines, there are gradient steps
        workers[1].send_signal(signal.SIGTERM)
        asked = time.monotonic()
        ends = [ended(worker) for worker in workers]
    assert [code for code, _ in ends] == [143, 143], ends
    assert time.monotonic() - asked < 120
    whole = train(*run[:1], tmp_path / "stopped", *run[1:])
    plain = train(*run[:1], tmp_path / "plain", *run[1:])
    assert without_times(whole) == without_times(plain) and len(without_times(whole)) == 1
    assert without_times(whole, "episodes.csv") == without_times(plain, "episodes.csv")
    assert results(whole)["weights_sha256"] == results(plain)["weights_sha256"]
    assert results(whole)["eval"] == results(plain)["eval"]


def test_the_row_of_an_iteration_has_its_metrics(dqn):
    lines = [line.split(",") for line in (dqn.run_dir / "progress.csv").read_text().splitlines()]
    rows = [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
    assert [int(row["env_steps"]) for row in rows] == [100, 200, 300, 400]
    assert [float(row["replay/size"]) for row in rows] == [100, 200, 200, 200]
    assert all(float(row["train/q_loss"]) > 0 for row in rows)
    assert float(rows[-1]["train/epsilon"]) == pytest.approx(1 - 0.95 * 400 / 10_000)
    state = final_state(dqn)
    assert state["gradient_steps"] == int(340 * 0.3)
    # As many of each env: 4 envs of 100 steps, of which the last 50 are kept.
    assert state["replay/actions"].shape == (50, 4)


@pytest.mark.parametrize(
    "algorithm, flags, sentence",
    [
        (
            "ddpg",
            ["--env", "CartPole-v1"],
            "ddpg needs continuous actions, and CartPole-v1 has discrete ones; use ppo",
        ),
        ("dqn", ["--env", "Pendulum-v1"], "dqn needs discrete actions, and Pendulum-v1 has continuous ones"),
        ("dqn", ["--env", "catch", "--torso", "mlp"], "--torso mlp takes no images"),
        ("sac", ["--num-envs", "3"], "--batch-size must be divisible by --num-envs 3"),
        ("td3", ["--policy-delay", "0"], "--policy-delay must be at least 1"),
        ("dqn", ["--n-step", "900", "--learning-starts", "100"], "must each hold --n-step 900 steps of each"),
        ("sac", ["--env", "catch", "--noise-correlation", "0.5"], "--noise-correlation is for continuous"),
        ("sac", ["--updates-per-step", "0"], "--updates-per-step must be above 0"),
        ("sac", ["--updates-per-step", "5e-5"], "--updates-per-step 5e-05 leave no gradient step"),
        ("dqn", ["--total-steps", "1000"], "--learning-starts 1000, --train-every 64 and --updates-per-step"),
        ("dqn", ["--train-every", "60000"], "--train-every 60000 and --updates-per-step 0.5 leave no"),
        (
            "td3",
            ["--batch-size", "64", "--replay-size", "63"],
            "--batch-size must be at most --replay-size",
        ),
        ("dqn", ["--critic-lr", "1e-3"], "--critic-lr has no effect here: there is no actor"),
        ("dqn", ["--priority-beta", "0.5"], "--priority-beta has no effect without --prioritized"),
        ("sac", ["--alpha", "1", "--entropy-target", "-2"], "--entropy-target has no effect with a fixed"),
        ("dqn", ["--env", "catch", "--hidden", "64"], "--hidden has no effect with --torso cookbook"),
    ],
)
def test_settings_that_cannot_work_are_refused(algorithm, flags, sentence):
    assert sentence in refusal(parsed, algorithm, *flags)
