"""What the code does on a GPU, computed on the CPU: XLA compiles more, and the results are the same."""

import learners
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels

from resnet import operations
from tfrl.algorithms.acting import ActingActorCritic
from tfrl.algorithms.registry import reader
from tfrl.envs import registry
from tfrl.workers import machine, strategy

IMAGES = ["--env", "catch", "--torso", "cookbook", "--num-levels", "0"]
SHORT = ["--num-envs", "8", "--num-steps", "16", "--num-minibatches", "2", "--precision", "float32"]


@pytest.fixture
def learner(tmp_path, monkeypatch):
    """Makes the learner of a command, as on a GPU if it is told so."""
    made, original = [], strategy.make

    def make(algorithm, *flags, on_gpu):
        def runtime(*arguments):
            found = original(*arguments)
            found.uses_gpu = on_gpu
            return found

        monkeypatch.setattr(strategy, "make", runtime)
        monkeypatch.setattr(operations, "_has_gpu", lambda: on_gpu)
        logdir = str(tmp_path / str(len(made)))
        made.append(learners.make(reader(algorithm).parse([*flags, "--logdir", logdir, "--run-name", "run"])))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize(
    ("algorithm", "flags"),
    [
        pytest.param("ppo", [*IMAGES, "--epochs", "2"], marks=pytest.mark.promise),
        ("ppo", [*IMAGES, "--epochs", "2", "--replicas", "2"]),
        ("ppo", ["--env", "Pendulum-v1", "--epochs", "2", "--num-envs", "32"]),
        ("impala", [*IMAGES, "--lag", "1"]),
        ("impala", ["--env", "CartPole-v1", "--num-envs", "32"]),
    ],
)
@pytest.mark.long
def test_an_update_is_the_same(learner, algorithm, flags):
    """Rounding differs, so the second update may take other actions."""
    found = []
    for on_gpu in (False, True):
        one = learner(algorithm, *SHORT, *flags, "--seed", "3", on_gpu=on_gpu)
        found.append(learners.updated(one, 1))
        assert one.session.runtime.uses_gpu == on_gpu
    (((metrics,), weights), ((expected,), others)) = found
    assert metrics.keys() == expected.keys()
    for name, value in metrics.items():
        assert value == pytest.approx(expected[name], rel=1e-3, abs=1e-4, nan_ok=True), name
    for name, weight in weights.items():
        np.testing.assert_allclose(weight, others[name], atol=2e-5)


def _runs_on_gpus(node):
    """Whether this TensorFlow has a kernel for GPUs of an operation in a graph, of its types."""
    types = {name: value.type for name, value in node.attr.items() if value.WhichOneof("value") == "type"}
    return any(
        kernel.device_type in ("GPU", "DEFAULT")
        and all(
            types.get(c.name, c.allowed_values.list.type[0]) in c.allowed_values.list.type
            for c in kernel.constraint
        )
        for kernel in kernels.get_registered_kernels_for_op(node.op).kernel
    )


@pytest.mark.skipif(not tf.test.is_built_with_cuda(), reason="a TensorFlow without kernels for GPUs")
@pytest.mark.parametrize("algorithm", ["ppo", pytest.param("impala", marks=pytest.mark.long)])
def test_a_gpu_gathers_a_minibatch_of_images_itself(learner, algorithm):
    """The CPU would need a copy of the whole rollout for each gradient step."""
    agent = learner(algorithm, *SHORT, *IMAGES, on_gpu=True).agent
    shown, rows = tf.TensorSpec((16, 8, 64, 64, 3), tf.uint8), tf.TensorSpec((4,), tf.int32)
    traced = tf.function(lambda x, at: agent.gather([x], at, axis=1)).get_concrete_function(shown, rows)
    functions = {f.signature.name: f for f in traced.graph.as_graph_def().library.function}
    for node in traced.graph.as_graph_def().node:
        of_xla = (
            node.op.endswith("PartitionedCall")
            and functions[node.attr["f"].func.name].attr["_XlaMustCompile"].b
        )
        assert of_xla or node.op == "Placeholder" or _runs_on_gpus(node), node.op


@pytest.mark.parametrize(
    "flags",
    [
        [*IMAGES],
        pytest.param(
            [*IMAGES, "--memory", "lstm", "--memory-size", "16", "--memory-inputs"], marks=pytest.mark.long
        ),
        ["--env", "Pendulum-v1", "--hidden", "8"],
    ],
)
def test_one_array_has_all_results_of_a_call_that_acts(monkeypatch, flags):
    monkeypatch.setattr(operations, "_has_gpu", lambda: True)
    config = reader("ppo").parse(["--num-envs", "32", *flags])
    network = config.make_network("float32")
    weights = {name: tf.constant(vector) for name, vector in network.initial().items()}
    generator = np.random.default_rng(0)
    observation, action = registry.specs(config)
    rows = [
        generator.integers(0, 2, (1, 32, *observation.shape)).astype(observation.dtype),
        generator.random((1, 32, network.noise_size), np.float32),
    ]
    if network.memory_size:
        rows.append(generator.random((1, 32, network.memory_size), np.float32))
    found = [
        ActingActorCritic(network, config, lambda: weights, on_gpu=on_gpu, at_once=1).sample(*rows)
        for on_gpu in (False, True)
    ]
    (actions, extras), (expected, others) = found
    assert actions.dtype == expected.dtype == action.dtype
    assert actions.shape == (1, 32, *action.shape)
    np.testing.assert_allclose(actions, expected, atol=1e-5)
    assert list(extras) == list(others) == ["log_prob", "value", *(["state"] if network.state_size else [])]
    for name, values in extras.items():
        assert others[name].shape == values.shape
        np.testing.assert_allclose(values, others[name], atol=1e-5)


def test_few_numbers_of_rows_reach_a_gpu(learner):
    """cuDNN tries out its algorithms for each number of rows, and an evaluation has all of them."""
    assert [len(machine.filled(np.zeros((n, 2)))) for n in (1, 2, 3, 5, 64, 65, 300)] == [
        2,
        2,
        4,
        8,
        64,
        128,
        300,
    ]
    agents = [learner("ppo", *SHORT, *IMAGES, on_gpu=on_gpu).agent for on_gpu in (False, True)]
    observation, _ = registry.specs(agents[0]._config)
    shown = np.random.default_rng(0).integers(0, 256, (5, *observation.shape)).astype(observation.dtype)
    found = [(agent.acting.act(shown), agent.values(shown, observation.shape)) for agent in agents]
    for ours, theirs in zip(*found, strict=True):
        assert ours.shape == theirs.shape == (5,)
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_gpu_that_tensorflow_leaves_alone_does_not_count(monkeypatch):
    """--device cpu, on a machine with a GPU: oneDNN's operations stay."""
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: ["GPU:0"])
    assert not operations._has_gpu()
