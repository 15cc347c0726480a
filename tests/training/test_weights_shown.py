"""Histograms, images and graphs in TensorBoard, of runs of any algorithm."""

import io

import imageio.v3 as imageio
import learners
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.graph_pb2 import GraphDef

from tfrl import config as settings
from tfrl.run.checkpoint import CheckpointStore
from tfrl.run.metrics import MetricsWriter
from tfrl.training.off_policy import OffPolicyLearner
from tfrl.training.on_policy import OnPolicyLearner

PPO = "--env catch --torso cookbook --num-envs 4 --num-steps 16 --num-minibatches 2 --epochs 1"
PPO += " --total-steps 256"
SAC = (
    "--env Pendulum-v1 --hidden 8 --learning-starts 20 --iteration-steps 50 --total-steps 100 --batch-size 8"
)
RUNS = {
    "ppo": (OnPolicyLearner, PPO, {"actor_and_critic"}, {0, 128, 256}),
    "sac": (OffPolicyLearner, SAC, {"actor", "critic1", "critic2"}, {0, 100}),
}


def shown(folder):
    """What TensorBoard shows of a run."""
    events = EventAccumulator(str(folder), size_guidance={"histograms": 0, "images": 0})
    events.Reload()
    return events


@pytest.mark.parametrize("name", ["ppo", pytest.param("sac", marks=pytest.mark.long)])
def test_a_run_shows_its_weights_and_its_graph(name, tmp_path):
    kind, flags, scopes, steps = RUNS[name]
    more = [
        "--eval-episodes",
        "2",
        "--precision",
        "float32",
        "--histograms-every",
        "2",
        "--tensorboard-graph",
    ]
    where = ["--logdir", str(tmp_path), "--run-name", "run"]
    config = settings.reader(name).parse([*flags.split(), *more, *where])
    assert learners.train(config, kind) == 0
    events = shown(config.run_dir)
    saved = CheckpointStore(config.run_dir / "checkpoints", keep=1).load(print).learner
    names = [key for key in saved if key.startswith("weights/")]
    tags = events.Tags()
    assert {*names} <= {*tags["histograms"]}
    for key in names:
        found = events.Histograms(key)
        assert {event.step for event in found} == steps
        last = found[-1].histogram_value
        assert last.num == saved[key].size
        np.testing.assert_allclose([last.min, last.max], [saved[key].min(), saved[key].max()], rtol=1e-5)
    assert {key for key in names if saved[key].ndim in (2, 4)} == {*tags["images"]}
    graph = GraphDef.FromString(events.SerializedGraph())
    assert {node.name.partition("/")[0] for node in graph.node} >= scopes


def test_a_run_shows_neither_by_default(tmp_path):
    where = ["--logdir", str(tmp_path), "--run-name", "run", "--eval-episodes", "2"]
    config = settings.reader("ppo").parse([*PPO.split(), *where])
    learners.train(config)
    tags = shown(config.run_dir).Tags()
    assert not tags["histograms"] and not tags["images"] and not tags["graph"]


def test_the_image_of_a_kernel(tmp_path):
    kernel = np.arange(2 * 3 * 1 * 4, dtype=np.float32).reshape(2, 3, 1, 4)
    writer = MetricsWriter(tmp_path, ["x"], resume_at=None, warn=print)
    writer.weights(5, {"conv/kernel": kernel, "bias": np.zeros(3, np.float32), "flat": np.zeros((600, 2))})
    writer.close()
    events = shown(tmp_path)
    (image,) = events.Images("weights/conv/kernel")
    pixels = imageio.imread(io.BytesIO(image.encoded_image_string))
    assert (image.step, image.width, image.height, pixels.shape) == (5, 3, 8, (8, 3))
    wanted = np.concatenate([kernel[:, :, 0, k] for k in range(4)])
    np.testing.assert_array_equal(pixels, np.round(255 * wanted / 23))
    (flat,) = events.Images("weights/flat")
    assert (flat.height, flat.width) == (512, 2) and "weights/bias" not in events.Tags()["images"]
