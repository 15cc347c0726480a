"""IDAAC with level replay on several workers takes the steps of one process, also after a kill."""

import numpy as np
import pytest
from worker_pair import FAULTY, results, run_alone, run_workers

from tfrl.cli.errors import PeerError

FLAGS = "--env bigfish --torso linear --precision float32 --run-name run --num-envs 8 --num-steps 32"
FLAGS += " --num-levels 20 --num-minibatches 2 --value-epochs 2 --order-coef 0.01 --level-replay"
FLAGS += " --eval-episodes 2 --checkpoint-every 1 --total-steps 1024"


@pytest.mark.long
def test_killed_workers_of_idaac_with_level_replay_resume_exactly_as_one_process(tmp_path):
    alone, killed = ([*FLAGS.split(), "--logdir", str(tmp_path / name)] for name in ("alone", "killed"))
    code, said = run_alone("-m", "tfrl.daac", *alone)
    assert code == 0, said
    faults = [[*FAULTY, "SIGKILL", str(i), "2", str(tmp_path / f"marker-{i}"), *killed] for i in (0, 1)]
    codes = {code for code, _ in run_workers(*faults, COMMAND="tfrl.daac")}
    assert -9 in codes
    assert codes <= {-9, PeerError.exit_code}  # a slow worker may lose the other one before its own signal
    ends = run_workers(*[["-m", "tfrl.daac", *killed]] * 2)
    assert [code for code, _ in ends] == [0, 0], ends
    found, expected = results(tmp_path / "killed"), results(tmp_path / "alone")
    assert found["workers"] == 2 and found["resumed_at"] == [2 * 8 * 32]
    assert found["weights_sha256"] == expected["weights_sha256"] and found["eval"] == expected["eval"]
    tables = [(tmp_path / name / "run" / "levels.csv").read_text() for name in ("alone", "killed")]
    assert tables[0] == tables[1]
    scores = np.array([float(row.split(",")[2]) for row in tables[0].splitlines()[1:]])
    assert (scores > 0).sum() > 4
