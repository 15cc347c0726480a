"""The folder of programs that the recipes of cluster/ find first."""

import sys

import pytest
from recipes import CLUSTER, write_tool


@pytest.fixture
def tools(tmp_path):
    """A folder for PATH: `python` makes TF_CONFIG for real, and shows it instead of training.

    EXIT_CODE has its exit code, or one for each node.
    """
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    (tmp_path / "cluster").symlink_to(CLUSTER)  # as in the image
    write_tool(
        folder / "python",
        f'if [ "$2" = cluster.tf_config ]; then exec {sys.executable} "$@"; fi\n'
        'echo "CPUS $SRUN_CPUS_PER_TASK"; echo "TRAIN $TF_CONFIG"; echo "ARGUMENTS $*"\n'
        'codes=(${EXIT_CODE:-0}); exit "${codes[SLURM_NODEID]:-${codes[0]}}"\n',
    )
    return folder
