"""`tfrl.collect`: whole shards, the same bits after a kill and on any number of processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import gymnasium
import numpy as np
import pytest
from processes import ROOT
from refusals import refusal

import tfrl
from tfrl.collect import main, record
from tfrl.experience import episodes
from tfrl.experience.recorded import Manifest, Spaces, actions_in_words, open_set

FILE = "cartpole_v1_episodes-train.tfrecord-"


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """25 episodes of random actions, in three files."""
    folder = tmp_path_factory.mktemp("sets") / "whole"
    assert main(flags(folder)) == 0
    return folder


def flags(folder, *more):
    return [
        "--random",
        "CartPole-v1",
        "--episodes",
        "25",
        "--shard-episodes",
        "10",
        "--out",
        str(folder),
        *more,
    ]


def test_an_episode_that_is_cut_off_ends_with_the_observation_after_its_last_action(tmp_path, monkeypatch):
    for module in ("tfrl.collect", "tfrl.experience.episodes"):
        monkeypatch.setattr(f"{module}.LONGEST_EPISODE", 20)
    steady = lambda observation: np.zeros(1, np.float32)  # noqa: E731
    tfrl.collect(steady, env="Pendulum-v1", episodes=32, out=tmp_path / "set")
    spaces = Spaces(*tfrl_specs("Pendulum-v1"))
    episodes = [one for shard in open_set(str(tmp_path / "set")).shards for one in shard.episodes(spaces)]
    for one in episodes:
        assert len(one.rewards) == 20 and not one.terminated
        assert (one.observations[-1] != one.observations[-2]).any()


def test_a_function_sees_one_episode_after_the_other(tmp_path):
    seen = []
    steady = lambda observation: seen.append(observation) or 1  # noqa: E731
    tfrl.collect(steady, env="CartPole-v1", episodes=3, out=tmp_path / "set")
    found = list(open_set(str(tmp_path / "set")).shards[0].episodes(Spaces(*tfrl_specs())))
    assert len(found) == 3
    np.testing.assert_array_equal(np.concatenate([one.observations[:-1] for one in found]), seen)


def test_random_episodes_may_have_processes_for_their_envs(tmp_path, monkeypatch):
    processes, play = [], episodes.play

    def noted(policy, spec, *arguments, **options):
        processes.append(spec.num_processes)
        return play(policy, spec, *arguments, **options)

    monkeypatch.setattr("tfrl.collect.play", noted)
    words = ["--random", "CartPole-v1", "--episodes", "2", "--out", str(tmp_path / "set")]
    assert main([*words, "--env-processes", "2"]) == 0
    assert processes == [2]


def test_a_set_has_the_episodes_that_were_asked_for(whole, capsys):
    about = json.loads((whole / "metadata.json").read_text())
    assert [len(shard["lengths"]) for shard in about["shards"]] == [10, 10, 5] and about["episodes"] == 25
    assert (
        about["env"] == "CartPole-v1" and about["policy"] == "uniform" and about["tfrl"] == tfrl.__version__
    )
    facts = Spaces(*tfrl_specs())
    found = [one for shard in open_set(str(whole)).shards for one in shard.episodes(facts)]
    assert [len(one.rewards) for one in found] == [n for shard in about["shards"] for n in shard["lengths"]]
    assert (
        all(one.terminated for one in found) and len({one.observations[0].tobytes() for one in found}) == 25
    )
    # Each step is the env's own: with the recorded action it goes from one observation to the next.
    env = gymnasium.make("CartPole-v1").unwrapped
    env.reset()
    for one in found[:3]:
        for t, action in enumerate(one.actions[:-1]):
            env.state = one.observations[t].astype(np.float64)
            env.steps_beyond_terminated = None
            shown, *_ = env.step(int(action))
            np.testing.assert_allclose(shown, one.observations[t + 1], atol=1e-5)


def tfrl_specs(env="CartPole-v1"):
    from tfrl.config.run import Task
    from tfrl.envs import registry

    return registry.specs(Task(env=env))


def test_a_longer_set_and_an_interrupted_one_have_the_same_bits(whole, tmp_path, monkeypatch):
    folder = tmp_path / "parts"
    assert main(flags(folder, "--episodes", "13")) == 0
    assert main(flags(folder)) == 0
    assert content(folder) == content(whole)
    assert main(flags(folder)) == 0  # it is complete
    # A process that is killed after a file, and before the counts, has not recorded the file.
    monkeypatch.setattr(Manifest, "save", lambda self, *rest: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(flags(tmp_path / "killed"))
    monkeypatch.undo()
    assert (tmp_path / "killed" / f"{FILE}00000").exists()
    assert main(flags(tmp_path / "killed")) == 0
    assert content(tmp_path / "killed") == content(whole)


@pytest.mark.long
def test_processes_and_kills_do_not_change_a_set(whole, tmp_path):
    folder, command = tmp_path / "set", [sys.executable, "-m", "tfrl.collect", *flags(tmp_path / "set")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    for _ in range(600):
        if (folder / "dataset_info.json").exists():
            break
        time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    subprocess.run([*command, "--actors", "2"], env=environment, check=True)
    assert content(folder) == content(whole)


def test_another_set_in_the_folder_stays(whole, tmp_path):
    before = content(whole)
    sentence = refusal(main, flags(whole, "--seed", "2"))
    assert "has a set with another seed: 1 there, 2 here" in sentence and content(whole) == before
    (tmp_path / "notes.txt").write_text("mine")
    assert "has no set of tfrl.collect" in refusal(main, flags(tmp_path))
    assert "exclude each other" in refusal(main, ["x", "--greedy", "--epsilon", "0.1"])
    assert "exclude each other" in refusal(main, flags(tmp_path / "new", "--steps", "9"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--random CartPole-v1 --greedy", "--greedy has no effect with --random; leave it out."),
        ("--random CartPole-v1 --sample", "--sample has no effect with --random; leave it out."),
        ("--random CartPole-v1 --checkpoint best", "--checkpoint has no effect with --random; leave it out."),
        ("--describe x --episodes 5", "--episodes has no effect with --describe; leave it out."),
        ("--describe x --random CartPole-v1", "--random has no effect with --describe; leave it out."),
        ("--describe x --facts --picture y.png", "--picture has no effect with --facts; leave it out."),
        ("--describe x run", "--describe takes no run; got run."),
        ("run --split test", "--split has no effect without --describe; leave it out."),
    ],
)
def test_flags_without_effect_are_refused(words, said):
    assert refusal(main, words.split()) == said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"episodes": 0}, "episodes must be at least 1 and at most 2147483647; got 0."),
        ({"episodes": "many"}, "episodes must be a whole number; got 'many'."),
        ({"steps": -1}, "steps must be at least 1 and at most 2147483647; got -1."),
        ({"shard_episodes": 0}, "shard_episodes must be at least 1 and at most 2147483647; got 0."),
        ({"seed": -1}, "seed must be at least 0 and at most 2147483647; got -1."),
        ({"epsilon": 3}, "epsilon must be at least 0 and at most 1; got 3.0."),
        ({"epsilon": 0.1, "greedy": False}, "greedy and epsilon exclude each other: give one of them."),
        ({"greedy": True}, "greedy and epsilon need a policy of a run; leave them out."),
    ],
)
def test_arguments_of_the_function_have_the_ranges_of_the_flags(arguments, said, tmp_path):
    with pytest.raises(tfrl.SettingsError) as caught:
        tfrl.collect("random", env="CartPole-v1", out=tmp_path / "set", **arguments)
    assert str(caught.value) == said and not (tmp_path / "set").exists()


def test_numbers_of_numpy_are_numbers(tmp_path):
    numbers = {"episodes": np.int64(2), "seed": np.int32(3)}
    tfrl.collect("random", env="CartPole-v1", out=tmp_path / "set", **numbers)
    assert json.loads((tmp_path / "set/metadata.json").read_text())["about"]["seed"] == 3


def test_the_number_of_episodes_is_told(whole, tmp_path, capsys, monkeypatch):
    assert main(flags(whole, "--episodes", "3")) == 0
    steps = json.loads((whole / "metadata.json").read_text())["steps"]
    shown = capsys.readouterr()
    assert shown.err == f"The set has 25 episodes and {steps} env steps.\n" and shown.out == f"{whole}\n"
    folder, save = tmp_path / "set", Manifest.save

    def save_and_end(self, *rest):
        save(self, *rest)
        raise SystemExit(130)  # as at a signal

    monkeypatch.setattr(Manifest, "save", save_and_end)
    with pytest.raises(SystemExit):
        main(flags(folder))
    said = f"Stopped; {folder} has 10 episodes, and the same command continues.\n"
    assert capsys.readouterr().err == said


def test_the_actions_of_a_set_are_named_as_they_are(tmp_path):
    assert [actions_in_words(greedy, None) for greedy in (False, True)] == ["sampled", "greedy"]
    assert actions_in_words(False, 0.1) == "greedy with epsilon 0.1"
    # A set of an older version has other words for the same actions.
    older = {"env": "CartPole-v1", "actions": "sampled", "epsilon": 0.1}
    (tmp_path / "metadata.json").write_text(json.dumps({"about": older, "shards": []}))
    Manifest.of(tmp_path, "CartPole-v1", {**older, "actions": "greedy with epsilon 0.1"})


def test_a_set_that_cannot_be_described_is_named_with_the_flag(tmp_path):
    said = refusal(main, ["--describe", str(tmp_path / "nothere")])
    assert said == f"--describe {tmp_path / 'nothere'} does not exist."


def test_a_full_disk_keeps_the_complete_files(small_disk, whole):
    disk = small_disk("1m")
    assert main(flags(disk / "set", "--episodes", "10")) == 0
    before = content(disk / "set")
    litter = disk / "litter"
    with contextlib.suppress(OSError), litter.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    sentence = refusal(main, flags(disk / "set"))
    assert "No space left on device" in sentence and "keeps its 10 episodes" in sentence
    assert content(disk / "set") == before
    litter.unlink()
    assert main(flags(disk / "set")) == 0
    assert content(disk / "set") == content(whole)


def test_a_set_is_described(whole, tmp_path, capsys):
    assert main(["--describe", str(whole), "--picture", str(tmp_path / "returns.png")]) == 0
    shown = capsys.readouterr().out
    assert "CartPole-v1" in shown and "25, of which 25 terminated" in shown and "3 shards" in shown
    assert (tmp_path / "returns.png").read_bytes().startswith(b"\x89PNG")


class Pair(gymnasium.Env):
    """Shows a Dict with an image and a Tuple, for 5 steps; its actions count from 3."""

    observation_space = gymnasium.spaces.Dict(
        {
            "image": gymnasium.spaces.Box(0, 255, (8, 8, 3), np.uint8),
            "pair": gymnasium.spaces.Tuple(
                (gymnasium.spaces.Discrete(4, start=1), gymnasium.spaces.Box(-1, 1, (2,)))
            ),
        }
    )
    action_space = gymnasium.spaces.Discrete(3, start=3)

    def _shown(self):
        image = np.full((8, 8, 3), 10 * self.t, np.uint8)
        return {"image": image, "pair": (1 + self.t % 4, np.float32([self.t / 10, -1]))}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._shown(), {}

    def step(self, action):
        assert action in (3, 4, 5)
        self.t += 1
        return self._shown(), float(action), False, self.t == 5, {}


def test_a_function_plays_and_a_dict_is_recorded(tmp_path):
    import tensorflow_datasets as tfds

    def policy(observation):
        assert observation["image"].shape == (8, 8, 3) and isinstance(observation["pair"], tuple)
        return 3 + int(observation["pair"][0]) % 3

    folder = tfrl.collect(policy, env=Pair, episodes=3, out=tmp_path / "set", shard_episodes=2)
    builder = tfds.builder_from_directory(str(folder))
    for one in builder.as_dataset(split="train"):
        steps = list(one["steps"].as_numpy_iterator())
        assert len(steps) == 6 and [step["action"] for step in steps[:-1]] == [4, 5, 3, 4, 4]
        assert [step["observation"]["image"][0, 0, 0] for step in steps] == [0, 10, 20, 30, 40, 50]
        assert [step["observation"]["pair"]["0"].item() for step in steps] == [1, 2, 3, 4, 1, 2]
        assert [step["reward"] for step in steps[:-1]] == [4, 5, 3, 4, 4] and not steps[-1]["is_terminal"]
    with pytest.raises(tfrl.SettingsError, match="needs an env"):
        tfrl.collect(policy, out=tmp_path / "other")


def test_a_policy_of_a_run_plays_with_epsilon(tmp_path, monkeypatch):
    """A stand-in for a network, which always pushes to the left: the share of other actions tells epsilon."""
    from tfrl.collect import EpsilonGreedy
    from tfrl.config.run import Task
    from tfrl.record import UniformPolicy

    class Left:
        memory = staticmethod(lambda envs: None)
        draw_noise = staticmethod(lambda generator, steps: np.zeros((steps, 1), np.float32))

        def act(self, observations, noise):
            return np.zeros(len(observations), np.int32)

    policy = EpsilonGreedy(Left(), UniformPolicy(*tfrl_specs()), 0.5)
    made = record(lambda: policy, Task(env="CartPole-v1"), {}, tmp_path / "set", steps=600)
    assert made.steps >= 600
    found = [
        one
        for shard in open_set(str(tmp_path / "set")).shards
        for one in shard.episodes(Spaces(*tfrl_specs()))
    ]
    assert np.concatenate([one.actions for one in found]).mean() == pytest.approx(0.25, abs=0.06)
