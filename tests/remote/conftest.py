"""A Ray that the tests of a session share, as on a cluster: started by itself, joined by address."""

import importlib.util
import os
import secrets
from pathlib import Path

import pytest
from ray_nodes import ENVIRON, Node, free_port


@pytest.fixture(scope="session")
def node(tmp_path_factory):
    """A Ray with 6 CPUs, and its `address`."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("pip install -r requirements-ray.txt")
    port = free_port()
    folder = Path(tmp_path_factory.mktemp("r"))
    (folder / "token").write_text(secrets.token_hex(32))
    os.environ |= ENVIRON | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
    head = ("--head", "--port", str(port), "--include-dashboard", "false", "--node-ip-address", "127.0.0.1")
    node = Node(folder, *head, "--temp-dir", str(folder), cpus=6)
    try:
        node.wait()
        node.address = f"127.0.0.1:{port}"
        yield node
    finally:
        node.end()
