"""--max-episodes ends a run at the env step at which that episode ends; --total-steps inf has no end."""

import csv
import json
import re

import numpy as np
import pytest
from refusals import refusal

import tfrl
from tfrl.algorithms.registry import reader
from tfrl.cli.flags import ENDLESS
from tfrl.cli.settings import to_yaml

ROLLOUT = {"num_envs": 4, "hidden": "8", "torso": "mlp", "eval_episodes": 1}
SMALL = {
    "ppo": {
        **ROLLOUT,
        "num_steps": 32,
        "num_minibatches": 1,
        "epochs": 1,
        "lr_schedule": "constant",
        "eager": True,
    },
    "reinforce": ROLLOUT,
    "impala": {**ROLLOUT, "num_steps": 32, "lag": 1, "preset": "gymnasium", "lr_schedule": "constant"},
    "dqn": {
        **ROLLOUT,
        "iteration_steps": 400,
        "learning_starts": 100,
        "train_every": 32,
        "batch_size": 32,
        "lr_schedule": "linear",
    },
}
SMALL["dqn-lag"] = {**SMALL["dqn"], "lag": 1}


def train(algorithm, logdir, name, **settings):
    settings = {"env": "CartPole-v1", "total_steps": 4000, **SMALL[algorithm], **settings}
    algorithm = algorithm.removesuffix("-lag")
    return tfrl.train(algorithm, logdir=str(logdir), run_name=name, checkpoint_every=2, **settings)


def episodes_of(run):
    """The rows of episodes.csv, without their seconds."""
    with (run.folder / "episodes.csv").open(newline="") as file:
        return [
            {name: cell for name, cell in row.items() if name != "seconds"} for row in csv.DictReader(file)
        ]


@pytest.mark.parametrize(
    "algorithm",
    [
        "ppo",
        *(pytest.param(name, marks=[pytest.mark.long, pytest.mark.promise]) for name in ("dqn", "reinforce")),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("impala", "dqn-lag")),
    ],
)
def test_a_run_ends_at_the_env_step_of_the_last_episode(tmp_path, algorithm):
    run = train(algorithm, tmp_path, "run", max_episodes=23)
    found = run.results
    # The last step may end an episode in several of the 4 envs.
    assert 23 <= found["episodes"] < 23 + 4
    assert found["env_steps"] == run.progress["env_steps"][-1]
    assert run.progress["rollout/episodes"][-1] == found["episodes"] == len(episodes_of(run))
    rates = run.progress["train/learning_rate"]
    assert np.nanmax(rates) == rates[0]
    each = {"ppo": 128, "impala": 128, "dqn": 400, "dqn-lag": 400}.get(algorithm)
    if each is not None:
        assert found["env_steps"] % 4 == 0 and found["env_steps"] % each != 0
    before = (run.folder / "results.json").read_bytes()
    again = train(algorithm, tmp_path, "run", max_episodes=23)
    assert (again.folder / "results.json").read_bytes() == before


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param("ppo", marks=[pytest.mark.long, pytest.mark.promise]),
        *(pytest.param(n, marks=pytest.mark.long) for n in ("reinforce", "impala", "dqn-lag")),
        "dqn",
    ],
)
def test_a_higher_number_continues_the_run_as_if_it_had_not_ended(tmp_path, algorithm):
    class Look(tfrl.Callback):
        def on_update(self, run, metrics):
            seen.append((run.env_steps, metrics["rollout/episodes"]))

    seen = []
    train(algorithm, tmp_path, "parts", max_episodes=23, callbacks=[Look()])
    end, seen = seen[-1], []
    parts = train(algorithm, tmp_path, "parts", max_episodes=41, callbacks=[Look()])
    assert all(steps > end[0] or count > end[1] for steps, count in seen), "updates after the earlier end"
    whole = train(algorithm, tmp_path, "whole", max_episodes=41)
    for name in ("weights_sha256", "env_steps", "episodes", "updates"):
        assert parts.results[name] == whole.results[name], name
    assert parts.progress["env_steps"].tolist() == whole.progress["env_steps"].tolist()
    assert episodes_of(parts) == episodes_of(whole) and len(episodes_of(whole)) == whole.results["episodes"]
    assert (
        parts.progress["rollout/episode_return"].tolist() == whole.progress["rollout/episode_return"].tolist()
    )


@pytest.mark.long
def test_a_run_of_replay_continues_with_a_higher_number(tmp_path):
    first = train("dqn", tmp_path, "run", max_episodes=23).results
    more = train("dqn", tmp_path, "run", max_episodes=41)
    assert 41 <= more.results["episodes"] < 45 and more.results["env_steps"] > first["env_steps"]
    steps = more.progress["env_steps"]
    assert steps[-1] == more.results["env_steps"] and (steps[1:] > steps[:-1]).all()
    assert len(episodes_of(more)) == more.results["episodes"]
    done = train("dqn", tmp_path, "run", max_episodes=-1, total_steps=4000)
    assert done.results["updates"] == 10 and done.results["env_steps"] == 4000
    whole = train("dqn", tmp_path, "whole", total_steps=4000).results
    assert done.results["weights_sha256"] == whole["weights_sha256"]


def test_minus_one_and_inf_are_endless(tmp_path):
    parse, acrobot = reader("dqn").parse, ["--env", "Acrobot-v1"]
    endless = parse(["--env", "CartPole-v1", "--max-episodes", "-1", "--lr-schedule", "constant"])
    assert (endless.max_episodes, endless.total_steps) == (None, ENDLESS)
    assert parse(["--max-episodes", "-1", "--total-steps", "20000", *acrobot]).total_steps == 20_000
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(endless))
    assert "total_steps: .inf\n" in path.read_text()
    assert parse(["--config", str(path)]).total_steps == ENDLESS
    assert "at least 1, or -1 for no limit; got 0" in refusal(
        parse, ["--env", "CartPole-v1", "--max-episodes", "0"]
    )
    schedule = ["--env", "CartPole-v1", "--total-steps", "inf", "--lr-schedule", "linear"]
    assert "--lr-schedule constant" in refusal(parse, schedule)
    beta = ["--env", "CartPole-v1", "--total-steps", "inf", "--lr-schedule", "constant", "--prioritized"]
    assert "do not follow the length" in refusal(parse, beta)


def test_an_endless_run_trains_until_a_callback_stops_it(tmp_path, capfd):
    class Stop(tfrl.Callback):
        def on_update(self, run, metrics):
            if run.env_steps >= 384:
                run.stop("it is enough")

    run = train("ppo", tmp_path, "run", total_steps=float("inf"), callbacks=[Stop()])
    shown = capfd.readouterr().out
    assert "endless | 384 env steps" in shown and re.search(r"length +endless\n", shown)
    assert json.loads((run.folder / "results.json").read_text())["env_steps"] == 384
