"""The plan of a sweep: its trials and their flags, drawn by a seed, and what is refused."""

import dataclasses
import io
import json
import os

import pytest
from made_runs import make_run
from processes import ROOT, Answer, assert_refused
from recordings import write
from refusals import refusal
from rich.console import Console

from tfrl import tune
from tfrl.algorithms import registry as settings
from tfrl.cli.errors import TrainingError
from tfrl.cli.settings import to_yaml
from tfrl.remote.trials import Sampled, TrialState, difference, plan

CATCH = ["--env", "catch", "--torso", "linear"]
PBT = {"scheduler": "pbt", "samples": ["lr=loguniform:1e-5,1e-2"], "flags": [*CATCH, "--eval-every", "1"]}
IDAAC = {**PBT, "algorithm": "daac", "flags": [*PBT["flags"], "--order-coef", "0.001"]}
METRIC = "eval_test/return"
VECTORS = ["--env", "CartPole-v1", "--eval-every", "1"]


def planned(
    *, algorithm="ppo", flags=CATCH, grids=(), samples=(), trials=1, scheduler="none", seed=1, metric=METRIC
):
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
    samples = ["lr=loguniform:1e-5,1e-2", "epochs=uniform:1,9", "value_loss=choice:squared,huber"]
    one, same, other = (planned(samples=samples, trials=5, seed=seed) for seed in (1, 1, 2))
    assert one == same != other
    assert all(isinstance(trial["epochs"], int) for trial in one.trials)
    assert {trial["value_loss"] for trial in one.trials} <= {"squared", "huber"}


def test_values_with_commas_stand_between_semicolons():
    sweep = planned(grids=["hidden=64,64;256,256,32"], flags=["--env", "CartPole-v1"])
    assert [config.hidden for config in map(sweep.config, sweep.trials)] == ["64,64", "256,256,32"]


def test_keyword_arguments_of_an_env_can_be_varied():
    values = ('{"sutton_barto_reward": true}', '{"sutton_barto_reward": false}')
    sweep = planned(grids=[f"env-kwargs={';'.join(values)}"], flags=["--env", "CartPole-v1"])
    assert [config.env_kwargs for config in map(sweep.config, sweep.trials)] == list(map(json.loads, values))


def test_the_trials_of_a_users_algorithm_are_commands_of_tfrl(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    sweep = planned(algorithm="own_algorithm:A2C", flags=["--env", "CartPole-v1"], grids=["gamma=0.9,0.99"])
    words = "python -m tfrl own_algorithm:A2C --env CartPole-v1 --gamma=0.9"
    assert sweep.command(sweep.trials[0]) == words
    assert planned(grids=["lr=1e-3"]).program == ["-m", "tfrl.ppo"]


def test_the_length_of_a_trial_is_rounded_by_its_own_updates():
    sweep = planned(grids=["num-envs=64,16"], flags=[*CATCH, "--total-steps", "20000"])
    assert sweep.total_steps == 20_000


def test_trials_with_updates_of_other_lengths_are_compared_after_equal_env_steps():
    flags = [*CATCH, "--eval-every-steps", "20000"]
    sweep = planned(samples=["num-steps=choice:8,64"], flags=flags, trials=2, scheduler="asha")
    assert len(sweep.trials) == 2


def test_a_sweep_refuses_trials_with_conflicting_settings():
    sweep = planned(samples=["num-steps=choice:8,64"], flags=[*CATCH, "--num-minibatches", "8"])
    assert sweep.is_possible({"num_steps": 16}) and not sweep.is_possible({"num_steps": 17})


def test_a_sweep_ignores_a_run_with_the_same_flags(tmp_path, monkeypatch):
    """That run keeps its single env, but trials begin with 8 envs."""
    monkeypatch.chdir(tmp_path)
    config = settings.reader("dqn").parse(["--env", "CartPole-v1"])
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "config.yaml").write_text(to_yaml(config))
    sweep = planned(algorithm="dqn", flags=["--env", "CartPole-v1", "--actors", "4"], grids=["lr=1e-3,1e-4"])
    assert [sweep.config(trial).num_envs for trial in sweep.trials] == [8, 8]


def test_changed_values_stay_within_the_range():
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
        ({"grids": ["lr=1e-3,0.001"]}, "--grid lr=1e-3,0.001 has a value twice"),
        ({"grids": ["hidden=256,256"]}, "put ; between them"),
        ({"grids": ["lr=1e-3"], "flags": [*CATCH, "--run-name=x"]}, "leave it out after the --"),
        ({"grids": ["lr=1e-3"], "flags": [*CATCH, "--logdir", "/tmp"]}, "chooses --logdir of its trials"),
        ({"grids": ["lr=1e-3"], "flags": [*CATCH, "--resume", "never"]}, "chooses --resume of its trials"),
        ({**PBT, "grids": ["epochs=1,2"]}, "would not keep its value of --grid epochs=1,2"),
        (
            {**PBT, "flags": VECTORS, "samples": ["hidden=choice:32,64"]},
            "so --hidden, which changes the network, cannot be sampled",
        ),
        (
            {**PBT, "flags": VECTORS, "samples": ["activation=choice:tanh,relu"]},
            "so --activation, which changes",
        ),
        (
            {**IDAAC, "samples": ["order_hidden=choice:2,4,8"]},
            "so --order-hidden, which changes the network, cannot be sampled",
        ),
        ({**IDAAC, "samples": ["order-coef=choice:0,0.001"]}, "--order-coef 0 makes a smaller network"),
        ({**PBT, "samples": ["env=choice:catch,coinrun"]}, "so --env, which changes"),
        ({**PBT, "flags": [*PBT["flags"], "--start-from", "x"]}, "leave --start-from out"),
        (
            {**PBT, "algorithm": "dqn", "flags": ["--env", "CartPole-v1", "--eval-every", "1"]},
            "an empty replay",
        ),
        (
            {**PBT, "metric": "rollout/episode_return"},
            "copies the weights of an evaluation: give --eval-every",
        ),
        (
            {**PBT, "flags": [*VECTORS, "--total-steps=20000"], "samples": ["preset=choice:torchrl,cleanrl"]},
            "so --preset, which changes",
        ),
        (
            {"grids": ["preset=torchrl,cleanrl"], "flags": [*VECTORS, "--eval-every=1"], "scheduler": "asha"},
            "give --total-steps after the --",
        ),
        (
            {"samples": ["num-steps=choice:8,64"], "flags": [*CATCH, "--eval-every=5"], "scheduler": "asha"},
            "give --eval-every-steps after the --, at least 4096, and no --eval-every, or 0",
        ),
        (
            {
                "samples": ["num-steps=choice:8,64"],
                "flags": CATCH,
                "scheduler": "asha",
                "metric": "rollout/episode_return",
            },
            "each update of 512 to 4096 env steps: give --metric eval_test/return, and ",
        ),
        (
            {**PBT, "samples": ["num-envs=choice:8,64"], "flags": [*CATCH, "--eval-every-steps=1000"]},
            "their updates differ in env steps",
        ),
        (
            {**PBT, "algorithm": "reinforce", "flags": VECTORS},
            "give --eval-every-steps after the --, and no --eval-every, or 0",
        ),
        ({"samples": ["gamma=uniform:0.9,1.5"]}, "--gamma must be at least 0"),
        ({"algorithm": "a3c", "grids": ["lr=1"]}, "there is no algorithm 'a3c'"),
    ],
)
def test_impossible_sweeps_are_refused_with_one_sentence(wrong, words):
    assert words in refusal(lambda: planned(**wrong))


def test_pbt_samples_the_weight_of_the_order_loss_above_0():
    for values in ("choice:0.001,0.01", "uniform:0,0.01"):
        assert len(planned(**{**IDAAC, "samples": [f"order_coef={values}"]}, trials=3).trials) == 3


def test_the_command_refuses_before_anything_starts(tmp_path):
    where = ("--logdir", tmp_path / "sweep")
    for flags, part in (
        (["--grid", "lr=1e-3"], "give an algorithm and its flags"),
        (["--grid=gamma=7", "--", "ppo", *CATCH], "--gamma must be at least 0"),
        (["--gird", "lr=1", "--", "ppo", *CATCH], "--gird (did you mean --grid?)"),
        (
            ["--grid", "lr=1e-3,1e-4", "--", "impala", *CATCH, "--start-from", tmp_path / "nowhere"],
            f"{tmp_path / 'nowhere'}",
        ),
        (
            ["--metric", "eval_test/retrun", "--grid", "lr=1e-3", "--", "ppo", *CATCH],
            "mean eval_test/return?",
        ),
        (
            ["--metric", "eval_train/return", "--grid", "lr=1", "--", "ppo", "--env", "CartPole-v1"],
            "--metric eval_train/return is not a column",
        ),
        (["--gpus-per-trial", "1.5", "--grid", "lr=1e-3", "ppo", *CATCH], "must be a whole number; got 1.5"),
        (["--ray-address", "127.0.0.1:1", "--grid", "lr=1e-3", "ppo", *CATCH], "there is no Ray to join at"),
        (["--parallel", "0", "--grid", "lr=1e-3", "--", "ppo"], "--parallel must be at least 1"),
        (
            ["--logdir", "", "--metric", "x", "--grid", "lr=1", "--", "ppo", *CATCH],
            "--logdir must be a folder",
        ),
    ):
        assert_refused(Answer(*where, *flags, module="tfrl.tune"), part)
    assert not (tmp_path / "sweep").exists()


def test_the_metric_may_be_any_column_that_a_run_has():
    """Those of a user's callback have any name."""
    ppo, supervised = settings.reader("ppo").parse(CATCH), settings.reader("resnet").of_values({})
    for metric in ("validation/accuracy", "replay/size", "levels/seen", "info/coins", METRIC):
        tune._check_metric(metric, ppo)
    watched = dataclasses.replace(ppo, callbacks="my_module:MyCallback")
    tune._check_metric("mine/number", watched)
    for metric, config in (("mine/number", ppo), ("validation/accuracy", supervised)):
        assert f"--metric {metric} is not a column" in refusal(tune._check_metric, metric, config)


def test_without_an_env_a_sweep_needs_a_metric_of_updates(tmp_path):
    dataset, _ = write(tmp_path / "set", "CartPole-v1", [12] * 4)
    words = ["--logdir", str(tmp_path / "sweep"), "--grid", "lr=1e-3,1e-2"]
    trials = ["--", "bc", "--dataset", str(dataset), "--env", "none"]
    said = refusal(tune.main, [*words, *trials])
    assert "--metric eval_test/return is not a column of a run without an env; use one that begins" in said
    _, sweep = tune._read([*words, "--metric", "validation/accuracy", *trials])
    tune._check_metric(sweep.metric, sweep.config(sweep.trials[0]))


def test_another_sweep_is_refused_in_the_same_folder(tmp_path):
    one, other = (planned(grids=[f"lr={values}"]) for values in ("1e-3", "1e-4"))
    for _ in range(2):
        tune._claim(tmp_path, one)
    said = refusal(tune._claim, tmp_path, other)
    assert "another sweep, with --grid lr=0.001 instead of --grid lr=0.0001; give the same" in said
    (tmp_path / "sweep.json").write_text("{")
    assert "holds another sweep" in refusal(tune._claim, tmp_path, one)


@pytest.mark.parametrize(
    ("there", "here", "said"),
    [
        (
            {"flags": ["--env", "catch", "--seed", "3"]},
            {"flags": CATCH},
            "--seed 3 instead of --torso linear",
        ),
        ({}, {"flags": [*CATCH, "--seed", "3"]}, ", without --seed 3"),
        ({"flags": [*CATCH, "--seed", "3"]}, {}, ", with --seed 3"),
        (
            {"samples": ["lr=uniform:0.1,1"]},
            {"samples": ["lr=uniform:0.1,1"], "seed": 2},
            "of another --seed",
        ),
        (
            {"grids": ["hidden=64,64;8"], "flags": VECTORS},
            {"grids": ["hidden=64"], "flags": VECTORS},
            "--grid hidden=64,64;8 instead of --grid hidden=64",
        ),
        ({"algorithm": "ppg"}, {}, ", with ppg instead of ppo"),
    ],
)
def test_the_difference_between_two_sweeps_is_named(there, here, said):
    plain = {"grids": [] if "samples" in there else ["lr=1e-3"]}
    one, other = (planned(**{**plain, **given}).content() for given in (there, here))
    assert said in difference(one, other)


@pytest.mark.parametrize("word", [[], ["--"]], ids=["bare", "--"])
def test_the_algorithm_and_its_flags_stand_with_or_without_a_separator(word):
    trials = ["ppo", "--env", "catch", "--seed", "7"]
    mine, rest = tune._split(
        ["--grid", "lr=1e-3", "--seed", "3", "--sample=gamma=uniform:0,1", *word, *trials]
    )
    assert rest == trials and mine == ["--grid", "lr=1e-3", "--seed", "3", "--sample=gamma=uniform:0,1"]


def test_flags_that_only_a_sweep_has_may_stand_after_the_algorithm():
    mine, rest = tune._split(["--logdir", "x", "ppo", "--grid", "lr=1", "--seed", "7", "--parallel=2"])
    assert rest == ["ppo", "--seed", "7"] and mine == ["--logdir", "x", "--grid", "lr=1", "--parallel=2"]


def test_a_folder_into_which_others_may_write_is_refused(tmp_path):
    """Nothing in the folder is read before that."""
    sweep = tmp_path / "sweep"
    (sweep / "trial-000").mkdir(mode=0o755, parents=True)
    sweep.chmod(0o755)
    tune.check_owner(sweep)
    (sweep / "trial-000").chmod(0o775)
    assert "other users can write" in refusal(tune.check_owner, sweep)
    (sweep / "trial-000").chmod(0o755)
    sweep.chmod(0o777)
    (sweep / "sweep.json").write_text("{}")  # of another sweep, which would be said if it was read
    words = ["--logdir", str(sweep), "--grid", "lr=1e-3", "--", "ppo", *CATCH]
    assert "other users can write" in refusal(tune.main, words)
    sweep.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(sweep / "trial-000", 65534, 65534)
        assert "other users can write" in refusal(tune.check_owner, sweep)


def trial(tmp_path, **changes):
    plain = TrialState("trial-000", tmp_path, "running", {"lr": 1e-3}, 7200, 0.5, None, None)
    return plain._replace(**changes)


def test_the_trials_are_shown_in_a_live_table_on_a_terminal(tmp_path):
    screen = io.StringIO()
    shown = Console(file=screen, force_terminal=True, width=160)
    trials = [trial(tmp_path), trial(tmp_path, name="trial-001", state="waiting")]
    with tune.live_table(planned(grids=["lr=1e-3"]), lambda: trials, shown):
        pass
    for part in ("trial-000", "running", "0.001", "7,200", "0.5", "trial-001", "waiting"):
        assert part in screen.getvalue()


def test_no_live_table_is_shown_where_there_is_no_terminal(tmp_path):
    screen = io.StringIO()
    with tune.live_table(planned(grids=["lr=1e-3"]), lambda: [trial(tmp_path)], Console(file=screen)):
        pass
    assert not screen.getvalue()


def test_a_metric_that_no_trial_has_is_an_error_in_the_end(tmp_path):
    """A failed trial is never the best one, whatever metric it had before."""
    sweep = dataclasses.replace(planned(grids=["lr=1e-3"]), metric="train/entropie")
    run = make_run(tmp_path)
    done = trial(run, settings=sweep.trials[0], state="done")
    with pytest.raises(TrainingError, match="no trial has the column train/entropie"):
        tune._conclude(sweep, [done])
    failed = done._replace(value=1.0, state="failed", error="killed by signal 9")
    with pytest.raises(TrainingError, match=r"1 of 1 trials failed: trial-000 \(killed by signal 9\)"):
        tune._conclude(sweep, [failed])
