"""The plan of a sweep: its trials and their flags, drawn by a seed, and what is refused."""

import pytest
from processes import Answer, assert_refused
from refusals import refusal

from tfrl.config.sweep import Sampled, plan

CATCH = ["--env", "catch", "--torso", "linear"]


def planned(*, algorithm="ppo", flags=CATCH, grids=(), samples=(), trials=1, scheduler="none", seed=1):
    metric = "eval_test/return"
    return plan(
        *(algorithm, flags),
        **{"grids": grids, "samples": samples, "trials": trials, "seed": seed},
        **{"scheduler": scheduler, "metric": metric},
    )


def test_trials_are_all_points_of_the_grid_each_with_values_of_its_own():
    sweep = planned(grids=["lr=1e-4,1e-3", "num-envs=8,16"], samples=["gamma=uniform:0.9,0.99"], trials=3)
    points = [(trial["lr"], trial["num_envs"]) for trial in sweep.trials]
    assert points == [p for lr in (1e-4, 1e-3) for n in (8, 16) for p in [(lr, n)] * 3]
    gammas = [trial["gamma"] for trial in sweep.trials]
    assert len(set(gammas)) == 12 and all(0.9 <= gamma <= 0.99 for gamma in gammas)
    assert sweep.arguments({"lr": 1e-4, "anneal_lr": True}) == [*CATCH, "--lr=0.0001", "--anneal-lr=true"]


def test_the_seed_decides_what_is_drawn():
    samples = ["lr=loguniform:1e-5,1e-2", "epochs=uniform:1,9", "activation=choice:tanh,relu"]
    one, same, other = (planned(samples=samples, trials=5, seed=seed) for seed in (1, 1, 2))
    assert one == same != other
    assert all(isinstance(trial["epochs"], int) for trial in one.trials)
    assert {trial["activation"] for trial in one.trials} <= {"tanh", "relu"}


def test_changed_values_stay_between_the_ends():
    assert Sampled("gamma", "uniform", (0.9, 0.99)).inside(1.2 * 0.95) == 0.99
    assert Sampled("epochs", "uniform", (4, 9)).inside(0.8 * 7) == 6


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({}, "needs --grid or --sample"),
        ({"grids": ["lrr=1"]}, "has no setting lrr (did you mean lr?)"),
        ({"grids": ["lr=fast"]}, "--lr must be a number"),
        ({"grids": ["lr"]}, "must be like --grid"),
        ({"grids": ["run-name=a,b"]}, "--run-name cannot be varied"),
        ({"grids": ["lr=1e-3", "actor-lr=1e-4"]}, "--lr is varied twice"),
        ({"grids": ["gamma=0.9,2"]}, "--gamma must be at least 0"),
        ({"grids": ["lr=1e-3"], "trials": 3}, "--trials 3 needs --sample"),
        ({"grids": ["lr=1e-3"], "scheduler": "pbt"}, "--scheduler pbt needs --sample"),
        ({"grids": ["lr=1e-3"], "scheduler": "asha"}, "give --eval-every after the --"),
        ({"samples": ["lr=normal:1,2"]}, "known: uniform, loguniform, choice"),
        ({"samples": ["lr=loguniform:0,1"]}, "between numbers above 0"),
        ({"samples": ["lr=uniform:2,1"]}, "the smaller one first"),
        ({"samples": ["gamma=uniform:0.9,1.5"]}, "--gamma must be at least 0"),
        ({"algorithm": "a3c", "grids": ["lr=1"]}, "there is no algorithm 'a3c'"),
    ],
)
def test_what_cannot_work_is_one_sentence(wrong, words):
    assert words in refusal(lambda: planned(**wrong))


def test_the_command_refuses_before_anything_starts(tmp_path):
    where = ("--logdir", tmp_path / "sweep")
    for flags, part in (
        (["--grid", "lr=1e-3"], "an algorithm and its flags are to stand after --"),
        (["--grid=gamma=7", "--", "ppo", *CATCH], "--gamma must be at least 0"),
        (["--parallel", "0", "--grid", "lr=1e-3", "--", "ppo"], "--parallel must be at least 1"),
    ):
        assert_refused(Answer(*where, *flags, module="tfrl.tune"), part)
    assert not (tmp_path / "sweep").exists()
