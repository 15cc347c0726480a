"""Recorded sets: what is written is read, sets of others are read, and faults get a sentence."""

import json
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from processes import ROOT
from recordings import episodes_of, spaces_of, write
from refusals import refusal

from tfrl.cli.errors import UserError
from tfrl.envs.observations import CHOICES, FLAGS, IMAGE, MASK, NUMBERS, ArraySpec, Part
from tfrl.envs.spec import Box, Discrete, MultiDiscrete
from tfrl.experience import recorded
from tfrl.experience.recorded import Spaces, env_settings, facts_of, in_common, open_set
from tfrl.experience.transitions import Transitions


def read(folder, env):
    spaces = spaces_of(env)
    return [episode for shard in open_set(str(folder)).shards for episode in shard.episodes(spaces)]


def test_what_is_written_is_read_by_tfrl_and_by_tensorflow_datasets(tmp_path):
    import tensorflow_datasets as tfds

    folder, episodes = write(tmp_path / "set", "Pendulum-v1", [3, 5, 2, 4, 1, 6])
    for found, wanted in zip(read(folder, "Pendulum-v1"), episodes, strict=True):
        np.testing.assert_array_equal(found.observations, wanted.observations)
        np.testing.assert_allclose(found.actions, wanted.actions, atol=1e-6)
        np.testing.assert_array_equal(found.rewards, wanted.rewards)
        assert found.terminated == wanted.terminated
    builder = tfds.builder_from_directory(str(folder))
    assert builder.info.metadata["env"] == "Pendulum-v1" and builder.info.metadata["episodes"] == 6
    loaded = [list(one["steps"].as_numpy_iterator()) for one in builder.as_dataset(split="train")]
    assert [len(steps) for steps in loaded] == [4, 6, 3, 5, 2, 7]
    first, *_, before, last = loaded[0]
    assert first["is_first"] and not first["is_last"] and before["discount"] == 0
    assert last["is_last"] and last["is_terminal"] and last["discount"] == 0
    assert not loaded[1][-1]["is_terminal"] and loaded[1][-2]["discount"] == 1
    np.testing.assert_allclose(first["action"], 2 * episodes[0].actions[0], rtol=1e-6)  # the env's: [-2, 2]


def test_every_space_goes_there_and_back():
    parts = [
        Part(("camera", "left"), IMAGE, (4, 5, 3), "uint8"),
        Part(("arm", "angles"), NUMBERS, (2, 3), "float64"),
        Part(("tool",), CHOICES, (2,), "int64", counts=(3, 4), starts=(1, -1)),
        Part(("flags",), FLAGS, (3,), "int8"),
        Part(("action_mask",), MASK, (4,), "int8"),
    ]
    generator = np.random.default_rng(1)
    for given in (parts, parts[1:4]):  # rows of bytes, and rows of float32
        spec = ArraySpec.of_parts(given)
        spaces = Spaces(spec, Discrete(4, start=2))
        shown = {
            "camera": {"left": generator.integers(0, 255, (6, 4, 5, 3), np.uint8)},
            "arm": {"angles": generator.normal(size=(6, 2, 3)).astype(np.float32)},
            "tool": generator.integers(0, 3, (6, 2)).astype(np.int32) + np.array([1, -1], np.int32),
            "flags": generator.integers(0, 2, (6, 3)).astype(np.uint8),
            "action_mask": np.ones((6, 4), np.uint8),
        }
        wanted = {part.keys[0]: shown[part.keys[0]] for part in spec.parts}
        rows = spaces.observations(wanted, "here")
        assert rows.shape == (6, *spec.shape) and rows.dtype == spec.dtype
        tf.nest.map_structure(np.testing.assert_array_equal, spaces.shown(rows), wanted)
    square = {"env_shape": (2, 2)}
    for action in (
        Discrete(4, 2),
        MultiDiscrete((2, 3), (0, 5)),
        MultiDiscrete((2, 3, 4, 2), (0, 5, 1, 0), **square),
        MultiDiscrete((2,) * 4, (0,) * 4, env_dtype="bool", **square),  # a MultiBinary of flags
        Box((-1.0, 0.0), (3.0, 0.5)),
        Box((-1.0, 0.0, -2.0, 0.0), (3.0, 0.5, 2.0, 1.0), **square),
    ):
        spaces, taken = Spaces(ArraySpec((3,), "float32"), action), action.uniform(generator, 9)
        shown = spaces.taken(taken)
        assert shown.shape[1:] == (getattr(action, "env_shape", None) or action.shape)
        np.testing.assert_allclose(spaces.actions(shown, "here"), taken, atol=1e-6)


def test_a_number_of_an_action_whose_bounds_are_equal_is_zero():
    spaces = Spaces(ArraySpec((3,), "float32"), Box((-1.0, 2.0), (1.0, 2.0)))
    np.testing.assert_array_equal(
        spaces.actions(np.array([[0.5, 2.0], [-1.0, 2.0]]), "here"), [[0.5, 0], [-1, 0]]
    )


def test_a_set_that_does_not_fit_gets_a_sentence_that_names_the_file(tmp_path):
    folder, _ = write(tmp_path / "set", "Pendulum-v1", [3] * 6)
    file = folder / "pendulum_v1_episodes-train.tfrecord-00001"
    with pytest.raises(
        UserError, match=r"tfrecord-00000 has observations of float32 \[3\].*observes float32 \[4\]"
    ):
        read(folder, "CartPole-v1")
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    with pytest.raises(UserError, match="tfrecord-00001 is damaged at episode 1"):
        read(folder, "Pendulum-v1")
    file.write_bytes(whole[:80] + bytes([whole[80] ^ 255]) + whole[81:])
    with pytest.raises(UserError, match="tfrecord-00001 is damaged at episode 0"):
        read(folder, "Pendulum-v1")
    file.unlink()
    with pytest.raises(UserError, match="tfrecord-00001 is missing"):
        read(folder, "Pendulum-v1")


def test_numbers_that_are_not_finite_and_actions_out_of_range_get_a_sentence():
    (episode,) = episodes_of("CartPole-v1", [4])
    spaces = spaces_of("CartPole-v1")
    with pytest.raises(UserError, match="FILE has the action 2"):
        spaces.actions(episode.actions + 2, "FILE")
    with pytest.raises(UserError, match="FILE has actions of float32"):
        spaces.actions(episode.actions.astype(np.float32), "FILE")
    choices = ArraySpec.of_parts([Part((), CHOICES, (2,), "int64", counts=(3, 3), starts=(0, 0))])
    with pytest.raises(UserError, match="FILE has observations that are NaN or infinite"):
        Spaces(choices, Discrete(2)).observations(np.array([[0, np.nan]]), "FILE")
    raw = recorded.RawEpisode(episode.observations, episode.actions, np.full(4, 1e300), terminated=True)
    with pytest.raises(UserError, match="FILE has rewards that are NaN or infinite"):
        spaces.episode(raw, "FILE")
    episode.observations[2, 1] = np.nan
    with pytest.raises(UserError, match="FILE has observations that are NaN or infinite"):
        spaces.observations(episode.observations, "FILE")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: path.mkdir(), "has no set: neither dataset_info.json"),
        (lambda path: path.write_text(""), "is a file; give the folder"),
        (lambda path: None, "does not exist"),
    ],
)
def test_a_folder_without_a_set_gets_a_sentence(tmp_path, make, sentence):
    make(tmp_path / "set")
    with pytest.raises(UserError, match=sentence):
        open_set(str(tmp_path / "set"))


def test_a_folder_of_several_sets_is_refused_and_of_versions_the_newest_is_read(tmp_path):
    for name in ("versions/9.0.0", "versions/10.0.0", "sets/a", "sets/b"):
        write(tmp_path / name, "CartPole-v1", [3])
    assert recorded._rlds_folder(tmp_path / "versions") == tmp_path / "versions/10.0.0"
    said = refusal(recorded.check_set, str(tmp_path / "sets"))
    assert f"has several sets: {tmp_path / 'sets/a'}, {tmp_path / 'sets/b'}; name those" in said
    assert "has an empty name" in refusal(recorded.check_set, f"{tmp_path / 'sets/a'},,")


def test_a_set_without_episodes_gets_a_sentence(tmp_path):
    folder, _ = write(tmp_path / "set", "CartPole-v1", [3])
    info = json.loads((folder / "dataset_info.json").read_text())
    info["splits"][0]["shardLengths"] = []
    (folder / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match=r"set has no (episodes|split)"):
        open_set(str(folder))


def test_an_rlds_set_of_somebody_else_is_read(tmp_path):
    """By tensorflow-datasets' own writer: float64, images, and an episode that does not end."""
    import tensorflow_datasets as tfds

    of = tfds.features
    step = {
        "observation": of.FeaturesDict({"image": of.Image(shape=(8, 8, 3)), "speed": of.Scalar(np.float64)}),
        "action": of.Scalar(np.int64),
        "reward": of.Scalar(np.float64),
        **{name: of.Scalar(np.bool_) for name in ("is_first", "is_last", "is_terminal")},
    }
    identity = tfds.core.dataset_info.DatasetIdentity(
        name="theirs", version=tfds.core.Version("1.0.0"), data_dir=str(tmp_path / "x"), module_name="theirs"
    )
    (tmp_path / "x").mkdir()
    info = tfds.core.DatasetInfo(builder=identity, features=of.FeaturesDict({"steps": of.Dataset(step)}))
    writer = tfds.core.SequentialWriter(info, max_examples_per_shard=2)
    writer.initialize_splits(["train"])
    images = np.random.default_rng(0).integers(0, 255, (3, 4, 8, 8, 3), np.uint8)
    for e in range(3):
        steps = [
            {
                "observation": {"image": images[e, t], "speed": e + t / 10},
                "action": t % 3,
                "reward": 0.5,
                "is_first": t == 0,
                "is_last": t == 3 and e < 2,
                "is_terminal": t == 3 and e == 0,
            }
            for t in range(4)
        ]
        writer.add_examples({"train": [{"steps": steps}]})
    writer.close_all()
    facts = json.loads(facts_of(str(tmp_path / "x"), "train"))["facts"]
    assert facts["action"]["n"] == 3 and {part["kind"] for part in facts["observation"]["parts"]} == {
        IMAGE,
        NUMBERS,
    }
    parts = [Part(("image",), IMAGE, (8, 8, 3), "uint8"), Part(("speed",), NUMBERS, (1,), "float64")]
    spaces = Spaces(ArraySpec.of_parts(parts), Discrete(3))
    found = [one for shard in open_set(str(tmp_path / "x")).shards for one in shard.episodes(spaces)]
    assert [len(one.rewards) for one in found] == [3, 3, 3]
    assert [one.terminated for one in found] == [True, False, False]
    back = spaces.shown(found[1].observations)
    np.testing.assert_array_equal(back["image"], images[1])
    np.testing.assert_allclose(back["speed"][:, 0], 1 + np.arange(4) / 10, rtol=1e-6)


def test_a_minari_set_is_read(tmp_path, monkeypatch):
    minari = pytest.importorskip("minari")
    import gymnasium
    from minari.data_collector import EpisodeBuffer

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    env, buffers = gymnasium.make("CartPole-v1"), []
    for e in range(3):
        length = 4 + e
        buffers.append(
            EpisodeBuffer(
                observations=[np.full(4, e + t, np.float32) for t in range(length + 1)],
                actions=[np.int64(t % 2) for t in range(length)],
                rewards=[1.0] * length,
                terminations=[False] * (length - 1) + [e == 0],
                truncations=[False] * (length - 1) + [e != 0],
                infos={},
            )
        )
    minari.create_dataset_from_buffers(
        "test/cartpole-v0", buffers, env=env, eval_env="CartPole-v1", algorithm_name="made up"
    )
    for name in ("minari:test/cartpole-v0", str(tmp_path / "test" / "cartpole-v0")):
        opened = open_set(name)
        assert opened.env == "CartPole-v1"
        found = [one for shard in opened.shards for one in shard.episodes(spaces_of("CartPole-v1"))]
        assert [len(one.rewards) for one in found] == [4, 5, 6]
        assert [one.terminated for one in found] == [True, False, False]
        np.testing.assert_array_equal(found[2].observations[3], np.full(4, 5, np.float32))
        np.testing.assert_array_equal(found[1].actions, [0, 1, 0, 1, 0])
        plain = {"env": "CartPole-v1", "env_kwargs": {}, "max_episode_steps": None}
        assert env_settings(name) == {name: plain}
    other = gymnasium.make(
        "CartPole-v1", sutton_barto_reward=True, render_mode="rgb_array", max_episode_steps=20
    )
    minari.create_dataset_from_buffers("test/other-v0", buffers, env=other, algorithm_name="made up")
    kwargs = {"sutton_barto_reward": True}
    about = {"env": "CartPole-v1", "env_kwargs": kwargs, "max_episode_steps": 20}
    assert env_settings("minari:test/other-v0") == {"minari:test/other-v0": about}
    with pytest.raises(
        UserError, match=r"was recorded with --env-kwargs \{\}, and minari:test/other-v0 with --env-k"
    ):
        in_common(env_settings("minari:test/cartpole-v0,minari:test/other-v0"), about)
    endless = gymnasium.make("CartPole-v1", sutton_barto_reward=True, max_episode_steps=10**6)
    for name, more, limit in (("all", {}, 1_000_000), ("evaluated", {"eval_env": other}, 20)):
        minari.create_dataset_from_buffers(
            f"test/{name}-v0", buffers, env=endless, algorithm_name="made up", **more
        )
        found = env_settings(f"minari:test/{name}-v0")[f"minari:test/{name}-v0"]
        assert found == about | {"max_episode_steps": limit} and isinstance(found["max_episode_steps"], int)


# Transitions


def transitions(folder, env="CartPole-v1", **changes):
    settings = {"seed": 1, "batch_size": 8, "gamma": 0.9} | changes
    return Transitions(open_set(str(folder)), spaces_of(env), **settings)


def test_shards_of_validation_episodes_alone_are_left_out_of_the_batches(tmp_path):
    folder, _ = write(tmp_path / "set", "CartPole-v1", [4] * 20, shard=1)
    held, seen = transitions(folder, validation=0.1, window=1), set()
    for number in range(0, 60, 6):
        seen |= {row.tobytes() for row in held.sample(number, 6, 1)[0].observation.reshape(-1, 4)}
    assert len(held.validation[1]) == 2 * 4 and len(seen) == 18 * 4
    held.close()


def test_a_batch_has_the_transitions_of_the_set(tmp_path):
    folder, episodes = write(tmp_path / "set", "CartPole-v1", [3, 5, 2, 4, 1, 6])
    held = transitions(folder, learned_rewards=lambda rewards: 2 * rewards)
    batch, noise = held.sample(0, 50, 3)
    assert batch.observation.shape == (50, 8, 1, 4) and noise.shape == (50, 8, 1, 3)
    seen = set()
    for shown, following, action, reward, discount in zip(
        *(x.reshape(400, -1) for x in (batch.observation, batch.next_observation, batch.action)),
        *(x.reshape(400) for x in (batch.reward, batch.discount)),
        strict=True,
    ):
        e, t = int(shown[0] + 1e-4), round(float(shown[0] % 1) * 100)
        one = episodes[e]
        np.testing.assert_array_equal(following, one.observations[t + 1])
        assert action[0] == one.actions[t] and reward == 2 * one.rewards[t]
        ended = t == len(one.rewards) - 1 and one.terminated
        assert discount == (0 if ended else np.float32(0.9))
        seen.add((e, t))
    assert len(seen) == sum(len(one.rewards) for one in episodes)
    numbers = np.concatenate([one.observations[:-1] for one in episodes])
    np.testing.assert_allclose(held.scaling.mean, numbers.mean(0), atol=1e-5)
    np.testing.assert_allclose(1 / held.scaling.scale, numbers.std(0), atol=1e-5)


def test_a_batch_has_returns_of_several_steps(tmp_path):
    """As those of the replay, of which --dataset takes the other half of each batch."""
    folder, episodes = write(tmp_path / "set", "CartPole-v1", [3, 5, 2, 4, 1, 6])
    batch, _ = transitions(folder, learned_rewards=lambda rewards: 2 * rewards, n_step=3).sample(0, 50, 0)
    for shown, following, reward, discount in zip(
        *(x.reshape(400, -1) for x in (batch.observation, batch.next_observation)),
        *(x.reshape(400) for x in (batch.reward, batch.discount)),
        strict=True,
    ):
        one, t = episodes[int(shown[0] + 1e-4)], round(float(shown[0] % 1) * 100)
        steps = min(3, len(one.rewards) - t)
        np.testing.assert_array_equal(following, one.observations[t + steps])
        wanted = sum(0.9**k * 2 * float(one.rewards[t + k]) for k in range(steps))
        np.testing.assert_allclose(reward, wanted, rtol=1e-6)
        ended = t + steps == len(one.rewards) and one.terminated
        np.testing.assert_allclose(discount, 0 if ended else 0.9**steps, rtol=1e-6)


def test_workers_draw_the_parts_of_one_batch(tmp_path):
    folder, _ = write(tmp_path / "set", "CartPole-v1", [9] * 8)
    whole, noise = transitions(folder).sample(3, 2, 1)
    halves = [transitions(folder).sample(3, 2, 1, slice(4 * w, 4 * w + 4)) for w in range(2)]
    for k in range(7):
        np.testing.assert_array_equal(np.concatenate([half[0][k] for half in halves], axis=1), whole[k])
    np.testing.assert_array_equal(np.concatenate([half[1] for half in halves], axis=1), noise)


def test_a_stream_of_shards_is_the_same_after_a_resume_and_shows_all_of_them(tmp_path):
    folder, _ = write(tmp_path / "set", "CartPole-v1", [20] * 12, shard=2)
    streamed = transitions(folder, window=2)
    assert not streamed.is_whole and "2 of 6 shards" in streamed.in_words()
    every = [streamed.sample(step, 1, 0)[0].observation for step in range(60)]
    again = transitions(folder, window=2)
    np.testing.assert_array_equal(np.concatenate(every[25:35]), again.sample(25, 10, 0)[0].observation)
    of_steps = [{int(value + 1e-4) // 2 for value in shown[0, :, 0, 0]} for shown in every]
    assert set().union(*of_steps) == set(range(6))
    assert all(len(shards) <= 2 for shards in of_steps)  # no more than the window holds
    assert len({tuple(sorted(shards)) for shards in of_steps}) > 4  # and the window moves
    streamed.close()
    again.close()


def test_validation_episodes_are_in_no_batch(tmp_path):
    folder, _ = write(tmp_path / "set", "CartPole-v1", [5] * 12, shard=5)
    for window in (None, 2):
        held = transitions(folder, validation=0.25, window=window)
        episodes = {int(value + 1e-4) for value in held.sample(0, 200, 0)[0].observation[..., 0].reshape(-1)}
        validated = {int(value + 1e-4) for value in held.validation[0][:, 0]}
        assert validated == {2, 6, 10} and episodes == set(range(12)) - validated
        held.close()
    for share, count in ((0.4, 5), (0.3, 4), (0.5, 6), (0.1, 1)):  # of 12
        held = transitions(folder, validation=share)
        assert len({int(value + 1e-4) for value in held.validation[0][:, 0]}) == count, share
        held.close()


def test_a_set_that_cannot_be_held_is_refused(tmp_path, monkeypatch):
    from tfrl.workers import machine

    folder, _ = write(tmp_path / "set", "CartPole-v1", [200] * 12, shard=2)
    monkeypatch.setattr(machine, "memory", lambda: 150_000)
    held = transitions(folder)
    assert held.window == 2 and not held.is_whole
    held.close()
    with pytest.raises(UserError, match=r"does not fit.*use --held-shards 2\."):
        transitions(folder, window=5)
    monkeypatch.setattr(machine, "memory", lambda: 20_000)
    with pytest.raises(UserError, match="use smaller shards"):
        transitions(folder)


def test_the_spaces_of_a_set_are_printed_without_its_env(tmp_path):
    folder, _ = write(tmp_path / "set", "CartPole-v1", [5] * 3)
    (folder / "env.json").unlink()
    command = [sys.executable, "-m", "tfrl.collect", "--describe", str(folder), "--facts"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(found.stdout)["facts"]["action"] == {"kind": "Discrete", "n": 2, "start": 0}
