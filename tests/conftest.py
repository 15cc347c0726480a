"""Four logical CPUs for all tests of this process, the parts of a small run, a store, a disk."""

import dataclasses
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import pytest
from small_run import SMALL

from tfrl.run.checkpoint import CheckpointStore

LOGICAL_CPUS = 4

# Some test files use another's helpers, also where that one's folder is not collected.
sys.path.append(str(Path(__file__).with_name("resnet")))

# The tests and their processes ignore what the caller's shell says of screens and clusters. The processes
# start faster if Python may keep what it has compiled.
for _name in ("CI", "COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TF_CONFIG", "PYTHONDONTWRITEBYTECODE"):
    os.environ.pop(_name, None)
CALLERS_GPUS = os.environ.get("CUDA_VISIBLE_DEVICES")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # replicas are of the CPU, and so are the bits that runs share

# Files whose tests mostly wait, for processes that start or for a time to pass; and folders of short tests.
WAIT = {
    "remote",
    "cluster",
    "test_console",
    "test_lost_workers",
    "test_multi_worker",
    "test_rendezvous",
    "test_stop",
    "test_watchdog",
}
SHORT = {"cli", "config", "envs", "evaluation", "experience", "ops", "reporting"}
LONGEST = "test_uneven_workers"  # of a quarter of an hour: at the end, the other processes would wait


CUT = "time is up"  # why a test was left out
PROGRAMS = "TFRL_TESTS_PROGRAMS"  # the folder of the programs that XLA has compiled for these tests


def pytest_configure(config):
    """The tests of one `make test` share the programs that XLA compiles in their own processes.

    The processes that they start, and the long tests, compile every program themselves.
    """
    if config.option.markexpr != "not long":
        return
    if PROGRAMS not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="tfrl-tests-")
        config.add_cleanup(folder.cleanup)
        os.environ[PROGRAMS] = folder.name  # for the processes of pytest-xdist


def pytest_addoption(parser):
    parser.addoption(
        "--deadline",
        type=float,
        metavar="SECONDS",
        help="seconds since 1970; no test begins later",
    )


@pytest.hookimpl(trylast=True)  # after those that are not wanted have gone
def pytest_collection_modifyitems(config, items):
    """Puts two files that compute between two that wait, and short files last: no core is idle for long.

    Among the long tests, the promises come first, and the longest file of all begins them.
    """
    files = dict.fromkeys(item.path for item in items)
    waiting = [file for file in files if {file.stem, file.parent.name} & WAIT]
    short = [file for file in files if file.parent.name in SHORT]
    long = [file for file in files if file not in waiting and file not in short]
    order = {}
    for file in waiting:
        order |= dict.fromkeys((file, *long[:2]))
        del long[:2]
    order = [*order, *long, *short]
    items.sort(key=lambda item: order.index(item.path))
    if "long" in config.option.markexpr.replace("not long", ""):
        promised = {item.path for item in items if item.get_closest_marker("promise")}
        items.sort(
            key=lambda item: (
                item.path.stem != LONGEST,
                item.path not in promised,
                not item.get_closest_marker("promise"),
            )
        )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Leaves out a test that would begin after the deadline."""
    deadline = item.config.option.deadline
    if deadline is not None and time.time() > deadline:
        pytest.skip(CUT)


def pytest_terminal_summary(terminalreporter):
    """Names the tests that the deadline has left out."""
    reports = terminalreporter.stats.get("skipped", ())
    for name in sorted(each.nodeid for each in reports if CUT in str(each.longrepr)):
        terminalreporter.write_line(f"left out, {CUT}: {name}")


def pytest_collection_finish(session):
    """Splits the CPU, and gives operations one thread, as `tfrl.ppo_procgen` does.

    It does so after the test files are imported, and before TensorFlow runs anything.

    Where no test of them uses TensorFlow, nothing waits for its import.
    """
    tf = sys.modules.get("tensorflow")
    if tf is None:
        return
    flags = {}
    if PROGRAMS in os.environ:
        cache = f"--tf_xla_persistent_cache_directory={os.environ[PROGRAMS]}"
        # Last, because TensorFlow takes a text that begins with a space for the name of a file.
        callers = os.environ.get("TF_XLA_FLAGS", "")
        flags["TF_XLA_FLAGS"] = f"{cache} --tf_xla_persistent_cache_device_types=CPU {callers}"
    with mock.patch.dict(os.environ, flags):  # TensorFlow reads it now
        cpu = tf.config.list_physical_devices("CPU")[0]
        try:
            tf.config.threading.set_intra_op_parallelism_threads(1)
            tf.config.set_logical_device_configuration(
                cpu, [tf.config.LogicalDeviceConfiguration()] * LOGICAL_CPUS
            )
        except RuntimeError:
            raise pytest.UsageError(
                "a test file uses TensorFlow when it is imported; do so in tests alone"
            ) from None


@pytest.fixture(scope="session", autouse=True)
def draw():
    """Runs in this process draw no learning curve: it is a quarter of a small run. Gives how they do."""
    if "tensorflow" not in sys.modules:  # then no test here trains
        yield None
        return
    from tfrl.training.callbacks import LearningCurve

    on_end = LearningCurve.on_end
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LearningCurve, "on_end", lambda *_: None)
        yield on_end


@pytest.fixture(autouse=True)
def environ():
    """What a test changes in the environment, --log-level for example, is not told to later processes."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def drawn(draw, monkeypatch):
    """Runs of this test draw their learning curve."""
    from tfrl.training.callbacks import LearningCurve

    monkeypatch.setattr(LearningCurve, "on_end", draw)


@pytest.fixture(scope="session")
def small():
    """Settings of a run that takes seconds; keyword arguments change them."""
    return lambda **changes: dataclasses.replace(SMALL, **changes)


@pytest.fixture(scope="session")
def learner():
    """Makes a trainer's Learner from settings."""
    from learners import Stepwise, make  # TensorFlow

    return lambda config: make(config, Stepwise)


@pytest.fixture
def directory(tmp_path):
    """Where the checkpoints of a run go."""
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def store(directory):
    """The store of that run."""
    return CheckpointStore(directory, keep=3)


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a disk of a size, "2m" say, and gives its folder. Skips the test where that is not allowed."""
    place = tmp_path / "small"

    def mount(size):
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode != 0:
            pytest.skip("a full disk needs a small tmpfs, which only root can mount")
        return place

    yield mount
    if place.is_mount():
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def gpus(monkeypatch):
    """Lets the processes of a test see the GPUs; their number. Without any the test is skipped."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if CALLERS_GPUS is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", CALLERS_GPUS)
    count = _count_gpus()
    if not count:
        pytest.skip("TensorFlow finds no GPU")
    return count


@functools.cache
def _count_gpus():
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return 0  # without a process that imports TensorFlow
    program = "import tensorflow as tf; print(len(tf.config.list_physical_devices('GPU')))"
    return int(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)


@pytest.fixture
def converted(monkeypatch):
    """The names of the functions that AutoGraph rewrites from now on, each time that it is asked to."""
    from tensorflow.python.autograph.pyct import transpiler  # nothing public tells

    names, convert = [], transpiler.PyToPy.transform_function

    def noted(self, function, *rest):
        names.append(function.__qualname__)
        return convert(self, function, *rest)

    monkeypatch.setattr(transpiler.PyToPy, "transform_function", noted)
    return names
