"""Programs in the place of a cluster's own, for the recipes of cluster/."""

import os
import subprocess
from pathlib import Path

from tfrl.workers import tf_config

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"


def write_tool(path, script):
    path.write_text(f"#!/bin/bash\n{script}")
    path.chmod(0o755)


def run(command, tools, **environ):
    environ = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), **environ}
    return subprocess.run(
        command, capture_output=True, text=True, env=environ, cwd=tools.parents[1], timeout=30
    )


def configs_of(text):
    return [tf_config.parse(line.removeprefix("TRAIN ")) for line in text.splitlines() if "TRAIN" in line]
