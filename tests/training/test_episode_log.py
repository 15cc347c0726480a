"""episodes.csv and the columns of the envs' infos: the same rows on any topology, once each, also resumed."""

import csv
import importlib.util

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from worker_pair import run_workers

import tfrl
from tfrl.run import loop
from tfrl.run.metrics import EPISODE_COLUMNS

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="pip install -r requirements-ray.txt"
)


class Telling(gymnasium.Env):
    """Episodes of 5 or 6 steps, whose infos have numbers: at each step, at the ends, and other things."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.length = 0, int(self.np_random.integers(5, 7))
        return np.zeros(2, np.float32), {"metrics": {"time": 1e9}}  # a reset is no step

    def step(self, action):
        self.time += 1
        done = self.time == self.length
        info = {"metrics": {"time": self.time, "word": "x", "flag": np.bool_(True), "broken": float("nan")}}
        info |= {"long": self.length == 6, "unused": 1.0} if done else {"unused": 2.0}
        return np.zeros(2, np.float32), 0.5, done, False, info


PPO = {"env": "tests.training.test_episode_log:Telling", "num_envs": 4, "num_steps": 16, "num_minibatches": 1}
PPO |= {"epochs": 1, "hidden": "8", "eval_episodes": 2, "lr_schedule": "constant", "log_info": "long, never"}
PPO |= {
    "eager": True,
    "total_steps": 192,
    "normalize_observations": False,
    "run_name": "r",
    "checkpoint_every": 1,
}


def rows_of(run, name="episodes.csv"):
    """The rows of a file without times."""
    with (run.folder / name).open() as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if not k.startswith("time/") and k != "seconds"} for row in rows]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return tfrl.train("ppo", logdir=tmp_path_factory.mktemp("plain"), **PPO)


def test_each_finished_episode_is_a_row(plain):
    with (plain.folder / "episodes.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == EPISODE_COLUMNS
    assert len(rows) == plain.results["episodes"]
    clock = dict.fromkeys(range(4), 0)  # env steps of each env, from the lengths of its episodes
    for row in rows:
        env, length = int(row["env"]), int(row["length"])
        clock[env] += length
        assert length in (5, 6) and float(row["return"]) == length / 2
        assert int(row["env_steps"]) == 4 * clock[env]
    order = [(int(row["env_steps"]), int(row["env"])) for row in rows]
    assert order == sorted(order)
    seconds = [float(row["seconds"]) for row in rows]
    assert seconds == sorted(seconds) and seconds[0] > 0 and seconds[-1] <= plain.results["seconds"] + 0.01


def test_numbers_of_infos_are_columns(plain, capsys):
    """The mean over the steps that have the number; other keys and values are left out."""
    progress, episodes = plain.progress, rows_of(plain)
    assert {name for name in progress if name.startswith("info/")} == {"info/time", "info/flag", "info/long"}
    assert progress["info/flag"].tolist() == [1.0, 1.0, 1.0]
    for update in range(3):
        times, ended = [], []
        for env in range(4):
            lengths = [int(row["length"]) for row in episodes if row["env"] == str(env)]
            # The last episode is unfinished.
            steps = [t for length in (*lengths, 6) for t in range(1, length + 1)]
            times += steps[16 * update : 16 * (update + 1)]
            ends = np.cumsum(lengths).tolist()
            ended += [n == 6 for end, n in zip(ends, lengths, strict=True) if 0 < end - 16 * update <= 16]
        assert progress["info/time"][update] == pytest.approx(np.mean(times))
        assert progress["info/long"][update] == pytest.approx(np.mean(ended))


def test_rows_and_columns_are_the_same_resumed_with_env_processes(plain, tmp_path, capsys):
    """It is killed after its second update, whose rows are written and not saved."""
    save, counts = loop.TrainingRun._save, []

    def killed(run):
        counts.append(run.updates)
        if run.updates == 2:
            raise KeyboardInterrupt
        save(run)

    further = {"env_processes": 2, "logdir": tmp_path}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.TrainingRun, "_save", killed)
        with pytest.raises(KeyboardInterrupt):
            tfrl.train("ppo", **PPO | further)
    before = rows_of(tfrl.Run(tmp_path / "r"))
    assert len(before) > sum(int(row["env_steps"]) <= 64 for row in before)
    whole = tfrl.train("ppo", **PPO | further)
    assert whole.results["resumed_at"] == [64]
    assert rows_of(whole) == rows_of(plain)
    assert rows_of(whole, "progress.csv") == rows_of(plain, "progress.csv")
    assert "No info of the env had a number never, so log_info gave no column" in capsys.readouterr().out


@pytest.mark.long
def test_two_workers_write_the_rows_and_columns_of_one(plain, tmp_path):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in PPO.items() if type(value) is not bool]
    command = ["-m", "tfrl.ppo", *flags, "--eager", "--no-normalize-observations", "--logdir", str(tmp_path)]
    ends = run_workers(command, command)
    assert [code for code, _ in ends] == [0, 0], ends
    two = tfrl.Run(tmp_path / "r")
    assert rows_of(two) == rows_of(plain)
    assert rows_of(two, "progress.csv") == rows_of(plain, "progress.csv")


@pytest.mark.long
@needs_ray
@pytest.mark.parametrize(
    ("algorithm", "here", "on_ray", "settings"),
    [
        ("impala", {"lag": 1}, {"lag": 1, "actors": 2}, {}),
        ("reinforce", {}, {"observers": 2}, {"max_steps": 12}),
        (
            "dqn",
            {"lag": 1},
            {"lag": 1, "actors": 2},
            {"iteration_steps": 64, "learning_starts": 64, "batch_size": 8, "train_every": 16},
        ),
    ],
)
def test_envs_on_ray_give_the_rows_and_columns_of_this_process(tmp_path, algorithm, here, on_ray, settings):
    settings |= {"env": PPO["env"], "num_envs": 4, "hidden": "8", "total_steps": 192, "eval_episodes": 2}
    settings |= {"log_info": "long", "run_name": "r"}
    if algorithm == "impala":
        settings |= {"num_steps": 16}
    one = tfrl.train(algorithm, logdir=tmp_path / "here", **settings, **here)
    other = tfrl.train(algorithm, logdir=tmp_path / "ray", **settings, **on_ray)
    assert len(rows_of(one)) > 20 and rows_of(other) == rows_of(one)
    names = [name for name in one.progress if name.startswith("info/")]
    assert set(names) == {"info/flag", "info/long", "info/time"}
    for name in names:
        np.testing.assert_array_equal(other.progress[name], one.progress[name])


@pytest.mark.long
def test_whole_episodes_of_reinforce_are_rows(tmp_path):
    """An update has the episodes of all envs; its env steps are counted at the end of each."""
    run = tfrl.train(
        "reinforce", env=PPO["env"], num_envs=4, hidden="8", total_steps=100, eval_episodes=2, logdir=tmp_path
    )
    rows = rows_of(run)
    assert len(rows) == run.results["episodes"] and len(rows) % 4 == 0
    assert int(rows[-1]["env_steps"]) == run.results["env_steps"] == sum(int(r["length"]) for r in rows)
    steps = [int(row["env_steps"]) for row in rows]
    assert steps == sorted(steps)
