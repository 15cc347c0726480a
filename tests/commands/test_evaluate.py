"""Evaluation, and videos: against scripted envs, and with policies read back from files."""

import dataclasses
import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import pytest
from learners import initial_arrays
from made_runs import make_run
from refusals import refusal
from scripted import Acting, scripted, still

import tfrl
from tfrl import evaluate, record
from tfrl.algorithms.policies import SavedPolicy
from tfrl.algorithms.ppo import Config
from tfrl.algorithms.registry import reader
from tfrl.algorithms.runs import find_policy, of_run
from tfrl.cli.errors import UserError
from tfrl.envs import registry
from tfrl.envs.spec import EnvSpec
from tfrl.experience.episodes import level_spec, play
from tfrl.networks.weights import keep_best
from tfrl.reporting import video
from tfrl.run import files
from tfrl.run.checkpoint import CheckpointStore, State
from tfrl.run.folder import BEST_FILE
from tfrl.run.rng import Use

parse = reader("ppo_procgen").parse


def test_statistics_of_an_evaluation(monkeypatch):
    """128 episodes, two in each env."""
    lengths, returns = [2, 3, 4, 5] * 16, [0.0, 0.0, 1.0, 1.0, 2.0, 8.0, 10.0, 34.0] * 8
    scripted(monkeypatch, lengths, returns)
    row = evaluate.evaluate_levels(Acting(still), Config(env="coinrun"), "test", 128)
    assert (row["return_mean"], row["return_median"], row["return_iqm"]) == (7.0, 1.5, 3.0)
    # Two episodes of one env are alike here, so they count as one.
    assert row["return_standard_error"] == pytest.approx(np.std(returns, ddof=1) / 8)
    assert row["normalized_return"] == pytest.approx((7 - 5) / (10 - 5))
    assert (row["solve_rate"], row["length_mean"], row["episodes"]) == (0.75, 3.5, 128)


# A policy from files


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An untrained run of catch, with two torsos, whose best policy is another one than its last."""
    folder = tmp_path_factory.mktemp("logs")
    settings = {"torso": "cookbook", "precision": "float32", "share_torso": False}
    path = make_run(folder, "fruitbot", total_steps=40_000, **settings)
    text = (path / "config.yaml").read_text().replace("env: fruitbot", "env: catch")
    (path / "config.yaml").write_text(text)
    (path / "results.json").unlink()
    weights = initial_arrays(of_run(path).make_network("float32"))
    (path / "export").mkdir()
    np.savez(path / "export" / "weights.npz", **weights)
    (path / "export" / "config.yaml").write_text(text)
    keep_best(path, {k: v + 1 for k, v in weights.items()}, score=0.5, env_steps=100)
    return path


@pytest.mark.parametrize("out", ["no/such/folder.json", "."])
def test_an_unwritable_file_is_reported_after_the_table(run, tmp_path, out, capsys):
    flags = ["--episodes", "2", "--levels", "test", "--out", str(tmp_path / out)]
    assert "cannot write" in refusal(evaluate.main, [str(run), *flags])
    assert "catch" in capsys.readouterr().out


def test_a_policy_takes_no_scaled_images(run):
    with pytest.raises(UserError, match="takes integers of 0 to 255, uint8; got float64"):
        tfrl.load(run)(np.zeros((10, 5, 1)))


def test_a_reader_that_is_gone_loses_only_the_table(run, tmp_path, monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit):
            evaluate.main(
                [str(run), "--episodes", "2", "--levels", "test", "--out", str(tmp_path / "e.json")]
            )
    assert json.loads((tmp_path / "e.json").read_text())["evaluations"]


def test_evaluation_is_the_same_twice_and_from_an_export_alone(run, capsys):
    arguments = ["--episodes", "20", "--seed", "7"]
    assert evaluate.main([str(run), *arguments]) == 0
    table = capsys.readouterr().out
    first = (run / "eval.json").read_bytes()
    evaluate.main([str(run), *arguments])
    assert (run / "eval.json").read_bytes() == first
    evaluate.main([str(run / "export"), *arguments])
    alone = json.loads((run / "export" / "eval.json").read_text())
    assert alone["evaluations"] == json.loads(first)["evaluations"]
    assert [e["levels"] for e in alone["evaluations"]] == ["train", "test"]
    assert "catch" in table and max(map(len, table.splitlines())) <= 80
    assert re.search(r"return ±\s.*standard error ", table, re.DOTALL)


def test_a_wider_network_goes_from_its_settings_to_files_and_back(tmp_path, capsys):
    import tensorflow as tf

    from tfrl.networks.weights import export

    wide = parse(["--env", "catch", "--torso-width", "2", "--precision", "float32"])
    network = wide.make_network("float32")
    weights = initial_arrays(network)
    vectors = {name: tf.constant(vector) for name, vector in network.initial().items()}
    assert weights["torso/stage1_conv/kernel"].shape == (3, 3, 1, 32)
    export(tmp_path, wide, weights, precision="float32", env_steps=1)
    assert "torso_width: 2" in (tmp_path / "config.yaml").read_text()
    observations = np.random.default_rng(0).integers(0, 256, (2, 10, 5, 1), np.uint8)
    saved = tf.saved_model.load(str(tmp_path / "policy"))
    logits = saved.policy(tf.constant(observations))["logits"]
    np.testing.assert_allclose(
        logits, network.outputs(vectors, tf.constant(observations))[0], rtol=1e-4, atol=1e-6
    )
    assert evaluate.main([str(tmp_path), "--episodes", "2"]) == 0
    assert record.main([str(tmp_path), "--episodes", "1", "--format", "gif"]) == 0
    settings = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(settings.replace("torso_width: 2\n", ""))
    with pytest.raises(UserError, match="another network"):
        evaluate.main([str(tmp_path), "--episodes", "2"])


def test_an_evaluation_leaves_the_rest_of_a_gpu_to_others_and_computes_in_float32(run, monkeypatch):
    import tensorflow as tf

    grown = []
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["a GPU"] * (kind == "GPU"))
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", lambda *how: grown.append(how))
    tf.config.experimental.enable_tensor_float_32_execution(True)
    assert evaluate.main([str(run), "--episodes", "1", "--precision", "float32"]) == 0
    assert grown and {*grown} == {("a GPU", True)}
    assert not tf.config.experimental.tensor_float_32_execution_enabled()


@pytest.mark.parametrize("how", ["sample", "greedy"])
def test_actions_are_drawn_unless_greedy(run, how):
    source = find_policy(run, "last")
    flags = ["--greedy"] if how == "greedy" else []
    assert evaluate.main([str(run), "--episodes", "20", "--levels", "train", *flags]) == 0
    (row,) = json.loads((run / "eval.json").read_text())["evaluations"]
    policy = SavedPolicy(source, greedy=how == "greedy")
    played = play(policy, level_spec(source.config, "train", 20), range(20), episodes_each=1)
    assert row["return_mean"] == played.returns.mean()


@pytest.mark.parametrize("flags", [[], ["--greedy"], ["--no-greedy"]])
@pytest.mark.parametrize("of_run", [True, False])
def test_actions_are_chosen_as_the_runs_own_evaluation_does_unless_a_flag_says_otherwise(run, of_run, flags):
    path = run / "config.yaml"
    text = path.read_text()
    assert "eval_greedy: false" in text
    path.write_text(text.replace("eval_greedy: false", f"eval_greedy: {str(of_run).lower()}"))
    try:
        assert evaluate.main([str(run), "--episodes", "1", "--levels", "train", *flags]) == 0
    finally:
        path.write_text(text)
    (row,) = json.loads((run / "eval.json").read_text())["evaluations"]
    greedy = flags == ["--greedy"] or (of_run and not flags)
    assert row["actions"] == ("greedy" if greedy else "sampled")


def test_greedy_actions_are_the_most_likely_ones(run, capsys):
    source = find_policy(run, "last")
    greedy, drawn = (SavedPolicy(source, greedy=how) for how in (True, False))
    observations = (255 * np.eye(50, dtype=np.uint8)).reshape(50, 10, 5, 1)
    uniforms = np.full((50, 1), 0.99, np.float32)
    actions = greedy.act(observations, uniforms)
    np.testing.assert_array_equal(actions, greedy.probabilities(observations).argmax(axis=1))
    assert (actions != drawn.act(observations, uniforms)).any()


def test_the_best_policy_is_kept_until_a_better_one(run, tmp_path):
    weights = {"actor/head/bias": np.zeros(3, np.float32)}
    made = make_run(tmp_path, total_steps=40_000)
    for score, env_steps, kept in ((1.0, 10, 10), (0.5, 20, 10), (2.0, 30, 30), (2.0, 40, 30), (0.1, 15, 15)):
        keep_best(made, weights, score=score, env_steps=env_steps)
        assert find_policy(made, "best").env_steps == kept
    # An evaluator may be behind the last evaluation of the run.
    for score, env_steps, kept in ((0.05, 12, 15), (0.2, 14, 14), (0.1, 20, 14)):
        keep_best(made, weights, score=score, env_steps=env_steps, follows=True)
        assert find_policy(made, "best").env_steps == kept
    assert find_policy(run, "best").weights.keys() == find_policy(run, "last").weights.keys()


def test_an_evaluator_and_a_worker_may_write_the_best_policy_at_once(tmp_path):
    weights = {"actor/head/bias": np.zeros(3, np.float32)}
    made = make_run(tmp_path, total_steps=40_000)
    keep_best(made, weights, score=1.0, env_steps=10)
    content = (made / BEST_FILE).read_bytes()
    (made / BEST_FILE).with_name(".best.npz.evaluator.tmp.npz").touch()  # of one that was killed
    with files.replacing(made / BEST_FILE) as staged:
        staged.write_bytes(content)
        keep_best(made, weights, score=2.0, env_steps=20, follows=True)
        assert find_policy(made, "best").env_steps == 20
    assert find_policy(made, "best").env_steps == 10
    assert [path.name for path in (made / BEST_FILE).parent.iterdir()] == ["best.npz"]


def an_array(_):
    file = io.BytesIO()
    np.save(file, np.zeros(3))
    return file.getvalue()


def of_unknown_compression(archive):
    at = archive.index(b"PK\1\2") + 10  # in the entry of its first array
    return archive[:at] + bytes([99]) + archive[at + 1 :]


@pytest.mark.parametrize("damage", [lambda _: b"PK damaged", an_array, of_unknown_compression])
def test_a_damaged_best_policy_is_refused_and_replaced(damage, tmp_path):
    made = make_run(tmp_path, total_steps=40_000)
    weights = {"actor/head/bias": np.zeros(3, np.float32)}
    keep_best(made, weights, score=1.0, env_steps=10)
    (made / BEST_FILE).write_bytes(damage((made / BEST_FILE).read_bytes()))
    assert "best.npz is damaged" in refusal(find_policy, made, "best")
    keep_best(made, weights, score=0.5, env_steps=20)
    assert find_policy(made, "best").env_steps == 20


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_failed_write_of_the_best_policy_keeps_the_previous_one(tmp_path):
    made = make_run(tmp_path, total_steps=40_000)
    weights = {"actor/head/bias": np.zeros(3, np.float32)}
    keep_best(made, weights, score=1.0, env_steps=10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # writing fails as on a full disk
    try:
        with pytest.raises(OSError):
            keep_best(made, weights, score=2.0, env_steps=20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert find_policy(made, "best").env_steps == 10
    assert [path.name for path in (made / BEST_FILE).parent.iterdir()] == ["best.npz"]


def test_an_evaluator_outlives_a_full_disk(run, tmp_path, capsys, monkeypatch):
    from tfrl.training import callbacks as evaluator

    monkeypatch.setattr(signal, "signal", lambda *_: None)  # it would keep SIGTERM for itself
    path = shutil.copytree(run, tmp_path / "run")
    config = dataclasses.replace(of_run(path), logdir=str(tmp_path), run_name="run", eval_episodes=2)
    store = CheckpointStore(path / "checkpoints", keep=2)
    learner = {f"weights/{name}": value for name, value in np.load(path / "export" / "weights.npz").items()}
    store.save(1, State(learner, [{}]), env_steps=config.steps_per_update)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def wait(_):
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        store.save(config.num_updates, State({}, [{}]), env_steps=config.total_steps)

    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # writing fails as on a full disk
    try:
        assert evaluator.follow(config, sleep=wait) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capsys.readouterr().out
    assert "cannot be written (File too large)." in said
    assert "16,384 env steps: return train" in said and "The run is complete." in said


def test_a_policy_of_other_observations_is_refused(run):
    with pytest.raises(UserError, match="observations"):
        evaluate.main([str(run), "--envs", "coinrun"])
    with pytest.raises(UserError, match="did you mean coinrun"):
        evaluate.main([str(run), "--envs", "coinrum"])


def test_envs_may_have_gyms_spelling():
    """procgen's C++ code would end the process."""
    config = Config(env="coinrun")
    assert evaluate._task(config, "procgen-coinrun-v0", evaluate.Options()).env == "coinrun"


def test_weights_of_another_network_are_refused(run, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    settings = (run / "config.yaml").read_text().replace("torso: cookbook", "torso: nature")
    (other / "config.yaml").write_text(settings.replace("env: catch", "env: coinrun"))
    (other / "weights.npz").write_bytes((run / "export" / "weights.npz").read_bytes())
    with pytest.raises(UserError, match="another network"):
        evaluate.main([str(other), "--episodes", "1"])
    (other / "weights.npz").write_bytes(b"PK damaged")
    with pytest.raises(UserError, match="damaged"):
        evaluate.main([str(other), "--episodes", "1"])


def test_an_export_has_the_steps_at_which_the_run_ended(run, tmp_path):
    """--solved-at ends a run earlier than its settings say."""
    ended = tmp_path / "ended"
    shutil.copytree(run, ended)
    (ended / "export" / "policy.json").write_text('{"env_steps": 123}')
    assert find_policy(ended / "export", "last").env_steps == 123


def test_an_export_beside_foreign_results_counts_the_steps_of_its_settings(run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(run / "export", other)
    (other / "results.json").write_text('{"env_steps": "many"}')
    assert find_policy(other, "last").env_steps == find_policy(run, "last").env_steps


# Videos


def read_mp4(path):
    """Its frames, decoded to pictures by ffmpeg."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([video.ffmpeg(), "-loglevel", "error", "-i", path, f"{folder}/%04d.png"], check=True)
        return np.stack([imageio.imread(file) for file in sorted(Path(folder).iterdir())])


def pictures(count):
    """Frames that differ plainly: a white square that moves."""
    frames = np.zeros((count, 96, 128, 3), np.uint8)
    for t in range(count):
        frames[t, 16 : 16 + 32, 8 * t : 8 * t + 32] = 255
    return frames


@pytest.mark.parametrize("suffix", [".mp4", ".gif"])
def test_a_written_video_is_read_back(suffix, tmp_path):
    path = tmp_path / f"video{suffix}"
    frames = pictures(9)
    with video.writing(path, fps=15) as append:
        for frame in frames:
            append(frame)
    back = read_mp4(path) if suffix == ".mp4" else imageio.imread(path, plugin="pillow", index=None)
    assert back.shape == frames.shape
    assert np.abs(back.astype(int) - frames).mean() < 6


def test_mp4_is_written_beside_a_setuptools_without_pkg_resources(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pkg_resources", None)
    monkeypatch.delitem(sys.modules, "imageio_ffmpeg", raising=False)
    with video.writing(tmp_path / "video.mp4", fps=15) as append:
        append(pictures(1)[0])
    assert len(read_mp4(tmp_path / "video.mp4")) == 1


def test_the_encoders_message_is_the_error(tmp_path):
    path = tmp_path / "missing" / "video.mp4"
    with pytest.raises(OSError, match="No such file"), video.writing(path, fps=15) as append:
        while True:  # ffmpeg ends at its first frame
            append(pictures(1)[0])


@pytest.mark.parametrize("kind", ["mp4", "gif"])
def test_a_run_is_recorded(kind, run):
    assert record.main([str(run), "--format", kind, "--episodes", "3"]) == 0
    (path,) = (run / "videos").glob(f"*.{kind}")
    frames = read_mp4(path) if kind == "mp4" else imageio.imread(path, plugin="pillow", index=None)
    assert len(frames) == 10  # 9 steps, and the end
    assert frames.shape[1:] == (576, 512, 3)
    tile = frames[0, :256, :256]
    assert (tile.max(axis=2) > 200).mean() == pytest.approx(2 / 50 * 0.5, abs=0.01)  # ball and paddle
    assert frames[-1].mean() < frames[-2].mean()  # episodes that are over are darker
    assert not list((run / "videos").glob(".*"))


def test_a_video_of_another_seed_or_choice_of_actions_has_another_name(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("videos"))
    few, names = ["--format", "gif", "--episodes", "1", "--max-steps", "1"], set()
    for flags in ([], ["--seed", "7"], ["--greedy"], ["--no-greedy", "--seed", "7"]):
        assert record.main([str(copy), *few, *flags]) == 0
        names |= {path.stem.partition("-test-")[2].partition("-")[2] for path in copy.glob("videos/*")}
    assert names == {"", "seed7", "greedy", "seed7-no-greedy"}


def test_a_recording_that_is_cut_off_leaves_nothing(tmp_path):
    def interrupted(observations, uniforms):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        video.save(Acting(interrupted), Config(env="catch"), tmp_path / "video.mp4", record.Options())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("levels", ["train", "test"])
def test_a_recording_has_envs_of_its_own(tmp_path, levels):
    config, seen = Config(env="catch", seed=3), []

    def watch(observations, uniforms):
        seen.append(observations.copy())
        return still(observations, uniforms)

    options = record.Options(episodes=8, levels=levels, max_steps=1)
    video.save(Acting(watch), config, tmp_path / "v.gif", options)
    expected = registry.make(level_spec(config, levels, 8, Use.RECORDING)).observe().observation
    np.testing.assert_array_equal(seen[0], expected)


def test_procgen_is_rendered_in_full_size():
    spec = EnvSpec(env="coinrun", num_envs=2, seed=0, render=True)
    env = registry.make(spec)
    frames = env.render()
    plain = registry.make(EnvSpec(env="coinrun", num_envs=2, seed=0))
    np.testing.assert_array_equal(env.observe().observation, plain.observe().observation)
    assert [f.shape for f in frames] == [(512, 512, 3)] * 2
    assert np.asarray(frames[0]).std() > 5
    assert env.solved().dtype == bool
    env.close()
    plain.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one run"),
        (["--random", "pong"], "no env 'pong'"),
        (["--random", "coinrun", "--episodes", "0"], "--episodes must be at least 1 and at most 100; got 0."),
        (["--random", "coinrun", "--episodes", "1e9"], "--episodes must be at least 1 and at most 100"),
        (["run", "--checkpoint", "\u00b2"], "--checkpoint must be last, best or the number"),
        (["run", "--checkpoint", "9" * 5000], "--checkpoint must be last, best or the number"),
        (["--format", "avi"], "--format must be one of"),
        (
            ["--random", "coinrun", "--out", "clip"],
            "--out must be a file that ends in .mp4 or .gif; got 'clip'.",
        ),
        (["--random", "coinrun", "--no-greedy"], "--no-greedy has no effect with --random; leave it out."),
        (["--random", "coinrun", "--checkpoint", "best"], "--checkpoint has no effect with --random; leave"),
        (["run", "--out", "a.gif", "--format", "mp4"], "--format has no effect with --out, whose ending is"),
        (["run", "--window", "--format", "gif"], "--format has no effect with --window; leave it out."),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(UserError, match=re.escape(message)):
        record.main(arguments)
