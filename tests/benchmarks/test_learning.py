"""Benchmarks of learning: what is trained and what is only read, and what returns are held against."""

import dataclasses
import sys

import numpy as np
import pytest
from made_runs import make_run
from processes import Answer, assert_refused, script

from benchmarks import command, continuous_control, learning_gymnasium, learning_procgen, training
from tfrl.algorithms import registry as settings
from tfrl.cli.errors import TrainingError, UserError
from tfrl.cli.settings import to_yaml
from tfrl.envs import published
from tfrl.envs.published import published_curve
from tfrl.reporting import runs


def test_flags_are_read_as_everywhere(monkeypatch, tmp_path):
    """1e6 is a whole number, and any spelling of a game is the game; the run is cut off before it starts."""
    started = []
    monkeypatch.setattr(command, "finish", started.append)
    options = learning_procgen.Options(
        "impala", "procgen-fruitbot-v0", total_steps=int(1e6), logdir=str(tmp_path)
    )
    with pytest.raises(UserError, match="impala-fruitbot-seed1 does not exist"):
        learning_procgen.main(options)
    ((_, _, module, *_),) = started
    assert module == "tfrl.impala"
    for flag, words in (
        ("--envs=nosuch", "'nosuch'"),
        ("--flags='--lr", "No closing quotation"),
        ("--flags=--nosuch 1", "no flag --nosuch"),
    ):
        assert_refused(Answer("--total-steps", "1e6", flag, module="benchmarks.learning_procgen"), words)


def test_more_flags_reach_the_trainer(monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(command, "finish", started.append)
    flags = "--torso impala-pooled --level-replay"
    with pytest.raises(UserError, match="does not exist"):
        learning_procgen.main(learning_procgen.Options(flags=flags, logdir=str(tmp_path)))
    ((_, _, _, *given),) = started
    config = settings.reader("ppo").parse(given)
    assert (config.torso, config.level_replay) == ("impala-pooled", True)


def test_runs_that_are_kept_are_compared_and_not_trained_again(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "finish", None)  # nothing is started
    made = [make_run(tmp_path, "fruitbot", seed) for seed in (1, 2)]
    for run in made:
        trained = dataclasses.replace(runs.load(run).config, precision="float32")
        (run / "config.yaml").write_text(to_yaml(trained))
    options = learning_procgen.Options(seeds="1,2", logdir=str(tmp_path), plot=str(tmp_path / "curves.png"))
    learning_procgen.main(options)
    told = capsys.readouterr().out
    assert "fruitbot, ppo" in told and told.count("1,015,808") == 3
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    for run in made:
        ours = runs.load(run)
        assert f"{ours.final_return('test'):.2f}" in told and f"{ours.final_return('train'):.2f}" in told
    with pytest.raises(UserError, match="holds a run with other settings: --precision .* another --logdir"):
        learning_procgen.main(dataclasses.replace(options, precision="bfloat16"))


def test_a_run_without_a_finished_episode_has_no_curve(tmp_path):
    path = make_run(tmp_path, "fruitbot", total_steps=100_000) / "progress.csv"
    path.write_text("env_steps,rollout/episode_return\n16384,\n")
    with pytest.raises(TrainingError, match="no episode has ended in .*; train for more --total-steps"):
        learning_procgen._curve(runs.load(path.parent))
    path.write_text("env_steps,rollout/episode_return\n16384,\n32768,1.5\n")
    np.testing.assert_array_equal(learning_procgen._curve(runs.load(path.parent)), [[32768], [1.5]])


def test_a_curve_is_judged_by_points_and_by_means_over_ten_updates():
    at, published = published_curve("fruitbot", "train")
    early = at <= 507_904
    low, high = published[:, early].min(0), published[:, early].max(0)
    for returns, verdict in ((low - 1, "below"), ((low + high) / 2, "within"), (high + 1, "above")):
        table = learning_procgen._compare("", "fruitbot", [(at[early], returns)])
        points, means = (list(table.columns[column].cells) for column in (3, 6))
        assert points == means == [verdict] * 5  # three windows, half a million, the end
    assert (
        learning_procgen._window_mean(200_000, np.array([36_160, 36_161, 2e5, 2e5 + 1]), np.arange(4.0))
        == 1.5
    )


def test_the_verdict_compares_the_mean_of_several_runs_and_shows_their_range():
    ours = [8.0, 2.0]  # one above the published runs' 3 ... 6, one below, their mean within
    assert learning_procgen._verdict([6.0, 3.0, 4.0], ours) == (
        "3.00 ... 6.00",
        "5.00 (2.00 ... 8.00)",
        "within",
    )
    at, published = published_curve("fruitbot", "train")
    shorter, longer = ((at[at <= last], published[0, at <= last]) for last in (163_840, 507_904))
    assert list(learning_procgen._compare("", "fruitbot", [shorter, longer]).columns[0].cells) == ["163,840"]


def test_sparse_published_curves_give_no_verdict_on_means():
    at, published = published_curve("fruitbot", "train")
    table = learning_procgen._compare("", "fruitbot", [(at[at < 3e6], published[0, at < 3e6])])
    rows = list(zip(table.columns[0].cells, table.columns[6].cells, strict=True))
    assert {verdict for step, verdict in rows if int(step.replace(",", "")) > 1_015_808} == {"-"}
    assert {verdict for step, verdict in rows if int(step.replace(",", "")) <= 1_015_808} == {"within"}


def test_means_over_games_have_the_errors_of_runs_within_games():
    ours = [np.array([0.5, 0.7]), np.array([0.1])]
    theirs = [np.array([0.4, 0.5, 0.6]), np.array([0.0, 0.3, 0.6])]
    mine, published = learning_procgen.over_games(ours, theirs)
    assert (mine.value, published.value) == pytest.approx((0.35, 0.4))
    assert mine.error == pytest.approx(np.sqrt(0.02 / 2 + 0.09 / 1) / 2)  # 0.09: of the published runs
    assert published.error == pytest.approx(np.sqrt(0.01 / 3 + 0.09 / 3) / 2)


@pytest.mark.parametrize("ranges", ["paper", "rliable"])
def test_the_means_of_all_games_stand_beside_the_published_runs(monkeypatch, tmp_path, capsys, ranges):
    """Games that are not trained yet are left out, and a game's return counts by its range."""
    monkeypatch.setattr(command, "finish", None)  # nothing is started
    games = ("jumper", "leaper", "bigfish")
    made = {game: runs.load(make_run(tmp_path, game)) for game in games}
    options = learning_procgen.Options(envs="all", logdir=str(tmp_path), train=False, ranges=ranges)
    learning_procgen.main(options)
    told = capsys.readouterr().out
    assert "over 3 games" in told and told.count("1,000,000 ") >= 2 and "250,000" in told
    for mark in (250_000, 500_000, 1_000_000):
        for level_set in ("train", "test"):
            scores = []
            for game, run in made.items():
                low, high = published.score_range(game, "easy", ranges)
                if level_set == "train":
                    at, returns = run.points("rollout/episode_return")
                    value = returns[(at > mark - 163_840) & (at <= mark)].mean()
                else:
                    at, returns = run.evaluations("test")
                    value = returns[at >= mark][0]
                scores.append((value - low) / (high - low))
            assert f"{np.mean(scores):.3f} \u00b1" in told
    with pytest.raises(UserError, match="has no complete run of these"):
        learning_procgen.main(dataclasses.replace(options, logdir=str(tmp_path / "empty")))


@pytest.mark.long
def test_seeds_are_trained_once_and_their_returns_shown(tmp_path, monkeypatch):
    flags = ["--env", "CartPole-v1", "--total-steps", "64", "--num-envs", "2", "--num-steps", "32"]
    flags += ["--num-minibatches", "2", "--epochs", "1", "--eval-episodes", "2"]
    (run,) = training.train(flags, [3], str(tmp_path))
    assert run.config.seed == 3 and run.is_done and 8 <= run.final_return("test") <= 500
    monkeypatch.setattr(command, "finish", None)  # nothing is started
    (again,) = training.train(flags, [3], str(tmp_path))
    assert again.results == run.results
    table = learning_gymnasium._table([(learning_gymnasium.TASKS[0], [run, again])])
    assert list(table.columns[2].cells) == ["3", "3", "median"]
    assert list(table.columns[7].cells) == ["475", "475", "0 of 2"]
    assert list(table.columns[5].cells) == [f"{run.final_return('test'):.1f}"] * 3


def test_every_learning_task_is_valid_for_its_trainer():
    for task in learning_gymnasium.TASKS:
        config = settings.reader(task.algorithm).parse(["--env", task.env, *task.flags])
        assert (config.preset == "cleanrl") == (task.env == "HalfCheetah-v5")
        assert config.preset != "default"


def test_returns_of_a_peer_are_kept(tmp_path):
    """The peer's script runs once for each seed; a script without a return is an error."""
    program = "import sys; print('final_return=' + sys.argv[sys.argv.index('--seed') + 1] + '.5 [1, 2]')"
    _, path = script(tmp_path, program)
    options = continuous_control.Options(
        torchrl=path, peer_python=sys.executable, learn=True, logdir=str(tmp_path / "logs")
    )
    assert [continuous_control._return_of_peer(options, seed) for seed in (3, 4)] == [3.5, 4.5]
    script(tmp_path, "")
    assert continuous_control._return_of_peer(options, 3) == 3.5
    with pytest.raises(
        TrainingError, match=r"no line in .*torchrl-seed5\.txt that begins with final_return="
    ):
        continuous_control._return_of_peer(options, 5)


CLEANRL = """
import sys
print("SPS: 150")
for episode in range(150):
    print(f"global_step={1000 * episode + 999}, episodic_return={-3 if episode < 40 else episode}.0")
print("global_step=199999, episodic_return=[2.5e1]", sys.argv)
"""


def test_returns_of_cleanrl_stand_beside_ours(tmp_path):
    """They are means of the last 100 episodes that had ended by then."""
    _, path = script(tmp_path, CLEANRL)
    kept = tmp_path / "logs" / "cleanrl-sac-HalfCheetah-v5-seed3.txt"
    options = learning_gymnasium.Options(cleanrl=path, peer_python=sys.executable, logdir=str(kept.parent))
    sums = (
        -120 + sum(range(40, 50)),
        -120 + sum(range(40, 100)),
        sum(range(50, 150)),
        sum(range(51, 150)) + 25,
    )
    expected = [total / episodes for total, episodes in zip(sums, (50, 100, 100, 100), strict=True)]
    assert learning_gymnasium._returns_of_cleanrl(3, options) == pytest.approx(expected)
    assert "'--env-id', 'HalfCheetah-v5', '--seed', '3', '--total-timesteps', '200000'" in kept.read_text()
    script(tmp_path, "")  # what is kept is not made again
    progress = {"env_steps": np.array([40_000.0, 200_000]), "rollout/episode_return": np.array([7.0, 9])}
    config = settings.reader("sac").parse(["--env", "HalfCheetah-v5", "--seed", "3"])
    table = learning_gymnasium._beside_cleanrl([runs.StoredRun(tmp_path, config, progress, None)], options)
    assert list(table.columns[1].cells) == ["tfrl", "CleanRL"] * 2
    assert list(table.columns[4].cells) == ["7", "100", "7", "100"]
    assert list(table.columns[5].cells) == ["9", "99", "9", "99"]
    with pytest.raises(TrainingError, match=r"no line in .*seed4\.txt like"):
        learning_gymnasium._returns_of_cleanrl(4, options)
