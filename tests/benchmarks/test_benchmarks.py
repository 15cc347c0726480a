"""Benchmarks: what they could not do is refused before they measure, and Ctrl-C lets their trainers save."""

import dataclasses
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import PATIENCE, ROOT, Answer, assert_refused, script

from benchmarks import (
    arithmetic,
    command,
    floor_within,
    floors,
    mutants,
    peers,
    replay_floor,
    speed,
    throughput,
)
from benchmarks.turns import Side
from tfrl.algorithms import registry as settings
from tfrl.cli.errors import TrainingError


@pytest.mark.parametrize(
    ("module", "flags", "part"),
    [
        ("learning_procgen", ["--envs", "fruitbot,catch"], "no curve of catch was published"),
        ("learning_procgen", ["--envs", "nosuch"], "there is no env 'nosuch'"),
        ("learning_procgen", ["--total-steps", "0"], "--total-steps must be at least 1"),
        ("learning_procgen", ["--seeds", "1,x"], "--seeds must be a whole number; got 'x'"),
        ("learning_procgen", ["--seeds", "3..1"], "--seeds 3..1 has no seed"),
        ("learning_offline", ["--algorithms", "bc,sac"], "--algorithms must be of bc, iql, td3_bc, cql"),
        ("weights", ["--only", "ppo,nothing"], "there is no run nothing"),
        ("learning_procgen", ["--plot", "nowhere/curve.png"], "nowhere is no folder to write in"),
        (
            "learning_procgen",
            ["--plot", "curve.doc"],
            "--plot must be the name of a PNG file; got 'curve.doc'",
        ),
        ("learning_procgen", ["--algorithms", "ppo,ddpg"], "ddpg"),
        ("throughput", ["--env", "nosuch"], "there is no env 'nosuch'"),
        ("throughput", ["--env", "catch"], "--env must be one of procgen's games"),
        ("throughput", ["--updates", "0"], "--updates must be at least 1"),
        ("throughput", ["--num-steps", "100"], "--num-steps must be divisible by --num-minibatches 8"),
        ("throughput", ["--precisions", "float16"], "--precisions must be auto, or of float32 and bfloat16"),
        (
            "throughput",
            ["--algorithm", "impala", "--within"],
            "--within is for algorithms that act",
        ),
        ("throughput", ["--cleanrl", "no-such-program x.py"], "there is no program no-such-program"),
        ("continuous_control", ["--torchrl", "nowhere.py"], "--torchrl nowhere.py is not a file"),
        ("continuous_control", ["--updates", "1"], "--updates must be at least 2"),
        ("continuous_control", ["--peer-python", "no-such"], "--peer-python: there is no program no-such"),
        ("continuous_control", ["--precision", "half"], "--precision must be one of auto, float32, bfloat16"),
        ("continuous_control", ["--seeds", "x"], "--seeds must be a whole number; got 'x'"),
        ("continuous_control", ["--learn"], "--learn compares with TorchRL's script: name it by --torchrl"),
        ("learning_gymnasium", ["--envs", "coinrun"], "--envs must be of CartPole-v1, Pendulum-v1"),
        (
            "learning_gymnasium",
            ["--algorithms", "td3", "--envs", "CartPole-v1"],
            "--envs must be of Pendulum-v1",
        ),
        (
            "learning_gymnasium",
            ["--algorithms", "ppg"],
            "--algorithms must be of ppo, dqn, ddpg, td3, sac, with",
        ),
        ("off_policy", ["--algorithms", "ppo"], "--algorithms must be of sac, td3, ddpg, dqn, with commas"),
        ("off_policy", ["--cleanrl", "nowhere"], "--cleanrl: nowhere/sac_continuous_action.py is not a file"),
        ("off_policy", ["--libraries", "sb3"], "--libraries must be of sbx, stable_baselines3"),
        ("off_policy", ["--updates", "0"], "--updates must be at least 1"),
        ("off_policy", ["--peer-python", "no-such"], "--peer-python: there is no program no-such"),
        ("learning_gymnasium", ["--cleanrl", "no.py"], "--cleanrl no.py is not a file"),
        ("learning_gymnasium", ["--cleanrl", __file__], "--cleanrl is for sac on HalfCheetah-v5, which"),
        ("learning_gymnasium", ["--seeds", "0.5"], "--seeds must be a whole number; got '0.5'"),
        ("learning_gymnasium", ["--episodes", "0"], "--episodes must be at least 1"),
        ("learning_gymnasium", ["--precision", "half"], "--precision must be one of auto"),
        ("learning_gymnasium", ["--plot", "curve.doc"], "--plot must be the name of a PNG file"),
        ("scaling", ["--updates", "0"], "--updates must be at least 1"),
        ("turns", ["--minutes", "0"], "--minutes must be above 0"),
        ("turns", ["--env", "nosuch"], "there is no env 'nosuch'"),
        ("scaling", ["--torso", "nosuch"], "is not a network of the zoo"),
        ("images", ["--model", "nosuch"], "is not a network of the zoo"),
        ("baselines", ["--model", "nosuch"], "is not a network of the zoo"),
    ],
)
def test_impossible_measurements_are_refused_at_once(module, flags, part):
    assert_refused(Answer(*flags, module=f"benchmarks.{module}"), part)


TICKING = """
import sys, time
with open(sys.argv[1], "ab", buffering=0) as file:
    while True:
        file.write(b".")
        time.sleep(0.01)
"""


def test_a_side_works_only_in_its_turns_and_counts_only_them(tmp_path):
    done = tmp_path / "done"
    done.touch()
    process = subprocess.Popen([sys.executable, "-c", TICKING, done])
    side = Side(process, lambda: done.stat().st_size)
    try:
        side.turn(1.0)
        before = done.stat().st_size
        time.sleep(1.0)
        assert done.stat().st_size <= before + 1 and side.is_ready
        side.turn(1.0)
        assert done.stat().st_size > before
        a_second, of_cpu = side.rates()
        assert 0.3 * done.stat().st_size < a_second < 0.7 * done.stat().st_size, "about 2 s, and not 3"
        assert of_cpu > a_second, "it sleeps"
    finally:
        process.kill()
        process.wait()


BUSY = """
import time
def use(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass
use(1)
for _ in range(4):
    use(0.25)
    time.sleep(0.25)
    print("SPS: 1")
time.sleep(0.5)
"""


def test_a_peers_speed_is_measured_between_its_lines(tmp_path):
    """The start and the end of the process do not count; sleep takes no processor time."""
    found = speed.of_script(script(tmp_path, BUSY), steps=1000, updates=4)
    assert found.per_cpu_second == pytest.approx(1000 / 0.25, rel=0.2)
    # On a busy machine it takes longer, or a line is read late and the next one seems early.
    assert 0.1 < found.median / (1000 / 0.5) < 1.5
    assert 0.1 < found.whole / (1000 / 0.5) < 1.1
    assert found.cpu_seconds > 2 and found.wall_seconds > 3.5 and found.peak_memory_mb > 5


def test_a_peers_phase_may_have_several_lines(tmp_path):
    """Four lines are two phases of two; what is slow between them counts once."""
    program = "import time\nfor _ in range(2):\n    for _ in range(2): print('SPS: 1')\n    time.sleep(0.5)"
    found = speed.of_script(script(tmp_path, program), steps=1000, updates=2, lines_each=2)
    assert 0.1 < found.median / (1000 / 0.5) < 1.5


@pytest.mark.parametrize("updates", [2, 4])
def test_a_peer_that_makes_other_updates_than_it_was_asked_for_has_no_speed(tmp_path, updates):
    words = script(tmp_path, f"print('SPS: 1\\n' * {updates})")
    with pytest.raises(TrainingError, match=rf"peer\.py \.\.\. ended after {updates} updates, not 3\.$"):
        speed.of_script(words, steps=1000, updates=3)


def test_a_peer_that_fails_is_named(tmp_path):
    with pytest.raises(TrainingError, match=r"peer\.py \.\.\. ended with code 1\.$"):
        speed.of_script(script(tmp_path, "print('SPS: 1')\nraise SystemExit(1)"), steps=1000, updates=3)


def test_our_speed_comes_from_progress_csv(tmp_path, monkeypatch):
    """A module stands for the trainer; its file grows by two rows at the end."""
    (tmp_path / "grows.py").write_text(
        "import pathlib, sys, time\n"
        "folder = pathlib.Path(sys.argv[sys.argv.index('--logdir') + 1], 'speed')\n"
        "folder.mkdir()\n"
        "with (folder / 'progress.csv').open('w') as file:\n"
        "    for rows in ('env_steps\\n', '1\\n', '2\\n', '3\\n4\\n'):\n"
        "        time.sleep(0.4)\n"
        "        print(rows, end='', file=file, flush=True)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = speed.of_trainer("grows", [], steps=100, updates=4)
    assert 0.1 < found.whole / (300 / 0.8) < 1.1


@pytest.mark.long
def test_the_floor_of_small_networks_is_measured():
    """The 320 minibatches of an update take at most some milliseconds each."""
    code = "from benchmarks.update_floor import measure as f; print(f('cleanrl', 0.1, compiled=False))"
    assert 2048 / (320 * 0.02) < float(command.answer(code)) < 2048 / (320 * 1e-5)


def test_every_small_fault_has_its_place_in_the_code():
    assert len(mutants.MUTANTS) >= 40
    for mutant in mutants.MUTANTS:
        text = mutants.mutated(mutant)
        assert text != (ROOT / mutant.path).read_text()
        compile(text, mutant.path, "exec")


def test_the_cost_of_a_replay_is_measured():
    """The cost is in seconds per env step; 128 transitions are drawn after every tenth step."""
    flags = ["--preset", "cleanrl", "--env", "CartPole-v1"]
    found = replay_floor.replay_seconds("dqn", flags, steps=2000)
    assert found.keys() == {"storing", "sampling"}
    assert all(1e-7 < seconds < 1e-3 for seconds in found.values())


@pytest.mark.parametrize(
    ("algorithm", "env", "each"),
    [
        # Pendulum-v1 shows 3 numbers and takes one: an actor of 3-2-1 has 16 operations, SAC's of 3-2-2 20,
        # a critic of 4-2-1 20.
        ("ddpg", "Pendulum-v1", 4 * 16 + 6 * 20),
        ("td3", "Pendulum-v1", 2.5 * 16 + 9 * 20),
        ("sac", "Pendulum-v1", 4 * 20 + 12 * 20),
        ("dqn", "CartPole-v1", 5 * 2 * (4 * 2 + 2 * 2)),
    ],
)
def test_the_arithmetic_of_a_gradient_step_is_counted(algorithm, env, each):
    config = settings.reader(algorithm).parse(["--env", env, "--hidden", "2", "--batch-size", "8"])
    config = dataclasses.replace(config, double=True, dueling=False) if algorithm == "dqn" else config
    assert arithmetic.gradient_step(algorithm, config) == 8 * each


def test_a_program_without_measurements_is_reported_with_its_last_line():
    with pytest.raises(TrainingError, match="ended with code 1: ZeroDivisionError: division by zero$"):
        command.answer("1 / 0")
    assert command.answer("print('warning'); print(1.5)") == "1.5"


def test_the_table_has_our_speed_first_and_its_ratios_to_the_others():
    slow, fast = (speed.Speed(rate, rate, 2 * rate, 10, 5, 100) for rate in (100.0, 250.0))
    found = {("torchrl", "tfrl"): [fast, slow, fast], ("torchrl", "torchrl"): [slow]}
    found |= {("cleanrl", "tfrl"): [slow], ("cleanrl", "tfrl, otherwise"): [slow], ("cleanrl", "sb3"): [fast]}
    table = peers.table("title", "preset", found, {"torchrl": {"XLA": 400.0}, "cleanrl": {"XLA": 400.0}})
    cells = list(zip(*(column.cells for column in table.columns), strict=True))
    names = ["tfrl", "torchrl", "floor, XLA", "tfrl", "tfrl, otherwise", "sb3", "floor, XLA"]
    assert [row[1] for row in cells] == names
    assert cells[0][2:5] == (" 250", " 250", " 500")
    assert cells[1][2:] == (" 100 (2.50x)", " 100 (2.50x)", " 200 (2.50x)", "10.0", "5.0")
    assert cells[2][4] == " 400 (1.25x)" and cells[5][2] == " 250 (0.40x)" and cells[6][4] == " 400 (0.50x)"
    assert cells[4][2:5] == (" 100", " 100", " 200")


def test_seeds_are_numbers_and_ranges():
    assert command.seeds("1..3, 7,2") == [1, 2, 3, 7]
    assert command.seeds("0") == [0]


@pytest.mark.long
def test_bfloat16_without_a_gain_is_omitted_with_a_message(capfd):
    """This is the rule of `--precision auto`; bfloat16 is still measured on request."""
    found = throughput.precisions("auto")
    told = capfd.readouterr().err
    flags = set(Path("/proc/cpuinfo").read_text().split())
    if "amx_bf16" in flags or {"avx512_bf16", "AuthenticAMD"} <= flags:
        assert found == ["float32", "bfloat16"] and not told
    else:
        assert found == ["float32"]
        assert told == (
            "bfloat16 is left out, which --precision auto does not take here; "
            "--precisions bfloat16 measures it.\n"
        )
    assert throughput.precisions("bfloat16, float32") == ["bfloat16", "float32"]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, (1, 3)),
        ({"algorithm": "impala", "actors": 2}, (1, 1)),
        ({"algorithm": "drac"}, (1, 6)),  # three epochs of two views
        ({"algorithm": "ppg"}, (3, 14)),  # two networks: one epoch and six; acting by both, old logits by one
        ({"algorithm": "ppg", "single": True}, (2, 7)),
    ],
)
def test_the_passes_of_a_frame_follow_from_the_algorithm(options, found):
    config = throughput._config(throughput.Options(**options))
    assert throughput.passes(config)[:2] == found


def test_the_faster_floor_counts(monkeypatch):
    rates = {"whole_floor": [3.0, 1.0], "parts_floor": [2.0, 2.0], "keras_floor": [5.0, 3.0]}
    monkeypatch.setattr(throughput, "_in_process", lambda way, *_: rates[way].pop(0))
    monkeypatch.setattr(throughput, "_our_run", lambda *_: {"env_steps_per_second": 6.0})
    found = throughput._floor_around(throughput.Options(), "float32", floors.Passes(1, 3))
    assert (found["own_floor"], found["keras_floor"]) == (2.5, 4.0)
    assert (found["floor"], found["ratio_to_floor"]) == (4.0, 1.5)


def test_the_floor_of_plain_keras_is_measured(monkeypatch):
    monkeypatch.setattr(floors, "_FORWARD_BATCHES", (2,))
    monkeypatch.setattr(floors, "_KERAS_BATCHES", (2,))
    assert floors.keras_floor("float32", 0.1, floors.Passes(1, 3)) > 0


def test_a_floor_within_a_run_allows_for_changes_of_the_machines_speed():
    """The machine halves its speed in the middle, and the run still equals its floor."""
    each = floors.Passes(forwards=2, gradients=3)
    fast, slow = (100 * k * (2 * 0.01 + 3 * 0.03) for k in (1, 2))  # seconds of 100 env steps at the floor
    samples = [
        floor_within.Sample(99.0, 0.5, 0.5, ends=True),  # the first update, which traces
        floor_within.Sample(0.5 * fast, 0.01, 0.03, ends=False),
        floor_within.Sample(0.5 * fast, 0.01, 0.03, ends=True),
        floor_within.Sample(slow, 0.02, 0.06, ends=True),
    ]
    found = floor_within.rates(samples, each, env_steps=100, skipped=1)
    assert found["env_steps_per_second"] == found["floor"] == pytest.approx(200 / (fast + slow))
    assert found["ratio_to_floor"] == pytest.approx(1.0)


# Children

SAVES = """
import pathlib, signal, sys, time
def save(which, _):
    time.sleep(0.5)
    pathlib.Path(sys.argv[1]).write_text("saved")
    sys.exit(128 + which)
signal.signal(signal.SIGINT, save)
signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[2]).touch()
time.sleep(600)
"""
PARENT = "import sys; from tfrl.cli import endings; from benchmarks import command\n"
PARENT += "endings.run(lambda arguments: command.finish([sys.executable, '-c', *arguments]) and 0)"


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_child_saves_before_the_benchmark_ends(tmp_path, how, code):
    saved, ready = tmp_path / "saved", tmp_path / "ready"
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, SAVES, str(saved), str(ready)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + PATIENCE
    while not ready.exists():
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.02)
    process.send_signal(how)
    _, stderr = process.communicate(timeout=PATIENCE)
    assert (process.returncode, stderr, saved.read_text()) == (code, "", "saved")


def test_a_failed_child_is_named_and_a_complete_one_reports_its_memory():
    with pytest.raises(TrainingError, match=r"^-c import sys; sys\.exit\(3\) \.\.\. ended with code 3\.$"):
        command.finish([sys.executable, "-c", "import sys; sys.exit(3)"])
    assert command.finish([sys.executable, "-c", "x = b'x' * 200_000_000"]).ru_maxrss > 200_000
