"""A Ray that the tests of a session share, as on a cluster: started by itself, joined by address."""

import contextlib
import importlib.util
import os
from types import SimpleNamespace

import pytest

from benchmarks.ray_nodes import ENVIRON, Nodes
from tfrl.remote import LOOPBACK

# Ray reads these when it is imported, which a test may do before the first one that uses `node`.
os.environ |= {LOOPBACK: "0", "RAY_AUTH_MODE": "token", **ENVIRON}


@pytest.fixture(scope="session")
def node(tmp_path_factory):
    """A Ray with 6 CPUs, and its `address`."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("pip install -r requirements-ray.txt")
    with contextlib.closing(Nodes(tmp_path_factory.mktemp("r"))) as nodes:
        os.environ |= nodes.environ
        yield nodes.start(cpus=6)


@pytest.fixture
def gpu_node(tmp_path):
    """A Ray that runs, of 4 CPUs and 2 GPUs that nobody looks for, and its variables."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("pip install -r requirements-ray.txt")
    with contextlib.closing(Nodes(tmp_path)) as nodes:
        node = nodes.start(cpus=4, gpus=2)
        yield SimpleNamespace(address=node.address, environ=nodes.environ, process=node.process)
