"""Shell completion, by bash itself."""

import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")


@pytest.fixture(scope="module")
def script():
    command = [sys.executable, "-m", "tfrl.completion"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "tensorflow" not in done.stderr
    return done.stdout


def complete(script, line):
    """What bash offers for the last word of the line."""
    words = line.split(" ")
    test = f'{script}\nCOMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _tfrl; echo "${{COMPREPLY[*]}}"'
    done = subprocess.run(["bash", "-c", test, "bash", *words], capture_output=True, text=True, check=True)
    assert not done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("python -m tfrl.ev", ["tfrl.evaluate"]),
        ("python -m cluster.", ["cluster.launch", "cluster.tf_config"]),
        ("python -m tfrl.evaluate logs/run --lev", ["--levels"]),
        ("python -m tfrl.evaluate --levels ", ["train", "test", "both"]),
        ("python -m tfrl.record --form", ["--format"]),
        ("python -m tfrl.record --no-", ["--no-overlay", "--no-window", "--no-greedy"]),
        ("python -m tfrl.ppo_procgen --update-f", ["--update-freq"]),
        ("python -m tfrl.ppo_procgen --preset openai-", ["openai-easy", "openai-hard"]),
        ("python -m resnet.train --aug", ["--augment"]),
        ("python -m resnet --dr", ["--draw"]),
        ("python -m cluster.launch --max-r", ["--max-restarts"]),
        ("python -m cluster.launch --ru", []),  # its examples have a --run-name
        ("python -m tfrl.evaluate lo", []),  # files, by `-o default`
        ("python script.py --lev", []),
        ("tfrl ev", ["evaluate"]),
        ("tfrl evaluate logs/run --lev", ["--levels"]),
        ("tfrl evaluate --levels ", ["train", "test", "both"]),
        ("tfrl ppo-", []),
        ("python -m tfrl eval", ["evaluate"]),
        ("python -m tfrl evaluate logs/run --lev", ["--levels"]),
        ("python -m cluster.launch --workers 2 -- python -m tfrl.evaluate --lev", ["--levels"]),
        ("python -m tfrl.tune --grid lr=1 -- ppo --update-f", ["--update-freq"]),
        ("tfrl tune ppo --update-f", ["--update-freq"]),
        ("python -m tfrl.tune --logdir ppo --paral", ["--parallel"]),
    ],
)
def test_bash_completes(script, line, offered):
    assert complete(script, line) == offered


def test_bash_completes_python(script):
    done = subprocess.run(["bash", "-c", f"{script}\ncomplete -p python"], capture_output=True, text=True)
    assert done.stdout.split() == ["complete", "-o", "bashdefault", "-o", "default", "-F", "_tfrl", "python"]
