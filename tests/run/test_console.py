import errno
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import rich.console

from tfrl.cli.flags import ENDLESS
from tfrl.run.console import Console, Progress, _render, duration

ROOT = Path(__file__).parents[2]

SESSION = """
import time
from tfrl.run.console import Console, Progress
console = Console(enabled=ENABLED, interval=0.1)
console.summary({"game": "fruitbot", "run folder": "/a folder/[bold]logs[/bold]/" + "x" * 90})
console.start(Progress(25_000_000, 24_000_000))
console.message("compiling :cat:")
console.progress.phase = "updating"
console.progress.advance_to(24_008_192.5, steady=True)
time.sleep(1.5)  # several refreshes, also on a busy machine
metrics = {"time/env_steps_per_second": 121.4, "rollout/episode_return": 3.214}
metrics["rollout/normalized_return"] = 0.144
console.progress.finish_update(24_016_384, metrics)
console.warn("the disk is full")
console.progress.phase = "collecting"
time.sleep(1.5)
console.results(("levels", "return"), [("train", "3.2"), ("unseen", "2.9")], ["python -m tfrl.record logs/x"])
"""


def run_session(enabled=True, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
    script = SESSION.replace("ENABLED", str(enabled))
    return subprocess.run([sys.executable, "-c", script], env=environment, timeout=30, **options)


def test_plain_lines_in_a_pipe():
    done = run_session(capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert "\x1b" not in done.stdout and "\r" not in done.stdout
    lines = done.stdout.splitlines()
    assert lines[:2] == ["game        fruitbot", "run folder  /a folder/[bold]logs[/bold]/" + "x" * 90]
    before = "96.0% | 24,008,192 / 25,000,000 env steps | ETA -- | updating"
    assert lines.count(before) >= 2, "lines must come while the main thread is busy"
    after = [line for line in lines if line.endswith("| collecting")]
    assert re.fullmatch(
        r"96\.0% \| 24,016,384 / 25,000,000 env steps \| 121 steps/s \| ETA \d+ \w+ \| "
        r"return 3\.21 \(normalised 0\.14\) \| collecting",
        after[0],
    )
    assert "compiling :cat:" in lines and "warning: the disk is full" in lines
    assert lines[-6:] == [
        "levels  return",
        "train   3.2",
        "unseen  2.9",
        "",
        "Next:",
        "  python -m tfrl.record logs/x",
    ]


def test_disabled_console_shows_nothing_but_warnings():
    done = run_session(enabled=False, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"warning: the disk is full\n")


def test_lines_come_while_one_call_blocks_and_at_once():
    script = "import time; from tfrl.run.console import Console, Progress\n"
    script += "console = Console(interval=0.1); console.start(Progress(100)); time.sleep(30)"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout.readline() == "0.0% | 0 / 100 env steps | ETA -- | starting\n"
        finally:
            child.kill()


def test_a_second_signal_may_stop_it_while_it_starts(monkeypatch, capsys):
    starting, start = threading.Event(), threading.Thread.start

    def start_slowly(thread):
        if thread.name == "console":
            starting.set()
            time.sleep(0.2)
        start(thread)

    console = Console()
    with ThreadPoolExecutor() as signals:
        stopped = signals.submit(lambda: starting.wait(30) and console.stop())
        monkeypatch.setattr(threading.Thread, "start", start_slowly)
        console.start(Progress(100))
        stopped.result()
    assert capsys.readouterr().out == "0.0% | 0 / 100 env steps | ETA -- | starting\n"


def test_a_reader_that_goes_away_does_not_end_the_run():
    reader, writer = os.pipe()
    os.close(reader)
    done = run_session(stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_names_that_the_terminal_cannot_show_are_replaced():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Console(stream=stream).message("logs/größe")
    assert raw.getvalue() == b"logs/gr??e\n"


@pytest.mark.parametrize("columns", [80, 120])
def test_live_display_fits_the_terminal(columns):
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    with os.fdopen(controller, "rb", buffering=0) as screen:
        done = run_session(stdin=terminal, stdout=terminal, stderr=terminal)
        os.close(terminal)
        output = b""
        try:
            while data := screen.read(65_536):
                output += data
        except OSError as error:  # the way Linux reports the end of a terminal
            assert error.errno == errno.EIO
    assert done.returncode == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode())
    live = [line for line in re.split(r"[\r\n]+", text) if "env steps" in line or "elapsed" in line]
    assert live and all(len(line) <= columns and "…" not in line for line in live)
    assert any("━" in line and "24,016,384 / 25,000,000 env steps" in line for line in live)
    wanted = r"collecting · 121 steps/s · return 3\.21 \(normalised 0\.14\) · elapsed \d+ s"
    assert any(re.fullmatch(wanted, line.rstrip()) for line in live)
    assert "compiling :cat:" in text and "warning: the disk is full" in text and "\x1b[33m" in output.decode()
    assert output.rstrip().endswith(b"python -m tfrl.record logs/x") and b"\x1b[?25h" in output


class FakeClock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def make_progress(total=1000, start=0):
    clock = FakeClock()
    return Progress(total, start, clock), clock


def test_time_left_counts_from_where_this_process_started():
    progress, clock = make_progress(total=100_000, start=90_000)
    assert progress.eta_text() == "ETA --"
    clock.now += 500
    progress.advance_to(90_900)
    progress.finish_update(91_000, {})
    assert progress.eta_text() == "ETA --", "the first update compiles"
    clock.now += 100
    progress.advance_to(92_000)
    assert progress.seconds_left == 800, "8000 steps are left, and 1000 took 100 s"
    assert progress.percent_text() == "92.0%"


def test_the_first_update_gives_an_estimate_by_its_own_steady_steps():
    progress, clock = make_progress(total=100_000, start=90_000)
    clock.now += 50
    progress.advance_to(90_200, steady=False)
    clock.now += 300
    progress.advance_to(90_300, steady=True)
    assert progress.eta_text() == "ETA --", "the first one compiles"
    for steps in (90_400, 90_500):
        clock.now += 7
        progress.advance_to(steps, steady=True)
    assert progress.seconds_left == pytest.approx(95 * 7), "9500 steps are left, of which 100 take 7 s"
    assert progress.steps_text() == "90,500 / 100,000 env steps"


@pytest.mark.parametrize("tracing", [0, 500])
def test_the_time_left_after_the_first_update_includes_its_rollout(tracing):
    """Its steady steps are gradient steps, which take a second here. Tracing comes before them."""
    progress, clock = make_progress(total=4096)
    clock.now += 209 + tracing
    progress.advance_to(600, steady=True)
    clock.now += 1
    progress.finish_update(1024, {"time/env_steps_per_second": 4.9, "time/rollout_seconds": 209})
    assert progress.line().startswith("25.0% | 1,024 / 4,096 env steps | 4.9 steps/s | ETA 10 min")
    clock.now += 105
    progress.finish_update(2048, {"time/env_steps_per_second": 9.8, "time/rollout_seconds": 104})
    assert progress.seconds_left == pytest.approx(2 * 105), "as long as the second one"


def test_the_last_steps_of_a_run_are_not_its_end():
    """The run ends when its metrics are written; an evaluation may come before that."""
    progress, clock = make_progress(total=1000)
    for steps in (400, 1000):
        clock.now += 60
        progress.advance_to(steps, steady=True)
    assert progress.line() == "99.9% | 1,000 / 1,000 env steps | ETA -- | starting"
    progress.finish_update(1000, {})
    assert progress.line() == "100.0% | 1,000 / 1,000 env steps | took 2 min | starting"


def test_a_slower_phase_is_announced_and_estimated_by_its_own_pace():
    """Learning begins after thousands of random steps a second, for example."""
    progress, clock = make_progress(total=100_000)
    progress.advance_to(0, steady=True)
    clock.now += 1
    progress.finish_update(5000, {"time/env_steps_per_second": 5000.0, "rollout/episode_return": 2.0})
    assert (
        progress.line()
        == "5.0% | 5,000 / 100,000 env steps | 5,000 steps/s | ETA 19 s | return 2.00 | starting"
    )
    clock.now += 60
    progress.advance_to(5001)
    progress.forget_pace()
    assert "steps/s" not in progress.line() and progress.eta_text() == "ETA --"
    clock.now += 30
    progress.advance_to(5011)
    assert progress.seconds_left == (100_000 - 5011) * 3
    assert progress.line().endswith(" | return 2.00 | ETA 3 d 07 h | starting")


def test_time_left_follows_the_latest_updates():
    progress, clock = make_progress(total=1_000_000)
    for update in range(200):
        clock.now += 1 if update < 100 else 5
        progress.finish_update(100 * (update + 1), {})
    assert progress.seconds_left == pytest.approx((1_000_000 - 20_000) / 100 * 5)


def test_a_run_that_ends_early_has_no_time_left():
    progress, clock = make_progress(total=1000)
    clock.now += 60
    progress.finish_update(500, {})
    progress.phase = "done"
    assert progress.eta_text() == "took 1 min"


def test_percent_is_below_100_until_the_end():
    progress, clock = make_progress(total=100_000)
    progress.finish_update(99_999, {})
    assert progress.percent_text() == "99.9%"
    clock.now += 3 * 3600 + 300
    progress.finish_update(100_352, {})  # the last rollout may go past the end
    assert (progress.percent_text(), progress.eta_text()) == ("100.0%", "took 3 h 05 min")


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("phase", ["collecting", "evaluating on train levels"])
def test_entries_without_room_are_omitted_and_not_cut(width, phase):
    progress, clock = make_progress(total=25_000_000, start=24_000_000)
    progress.advance_to(24_000_000, steady=True)
    clock.now += 100_000
    metrics = {"time/env_steps_per_second": 12_345.0, "rollout/episode_return": -3.2}
    progress.finish_update(24_016_384, metrics | {"rollout/normalized_return": 0.1})
    progress.phase = phase
    screen = rich.console.Console(file=io.StringIO(), width=width)
    screen.print(_render(progress, width))
    bar, rest = screen.file.getvalue().splitlines()
    assert "96.0%" in bar and "ETA 69 d 11 h" in bar and "\u2501" * 5 in bar and phase in rest
    assert ("24,016,384 / 25,000,000 env steps" in bar) == (width >= 80)
    assert ("elapsed 1 d 03 h" in rest) == (width == 120 or (width == 80 and phase == "collecting"))
    assert "\u2026" not in bar + rest


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({}, []),
        ({"rollout/episode_return": float("nan"), "time/env_steps_per_second": 12_345.6}, ["12,346 steps/s"]),
        ({"rollout/episode_return": -1.0}, ["return -1.00"]),
        ({"time/env_steps_per_second": 1 / 3}, ["0.33 steps/s"]),
    ],
)
def test_missing_metrics_are_omitted(metrics, expected):
    progress, _ = make_progress()
    progress.finish_update(1, metrics)
    assert progress.metric_texts() == expected


def test_advancing_prints_nothing_between_two_intervals():
    """The method is called at every env step, so it must not write each time."""
    stream = io.StringIO()
    console = Console(stream=stream, interval=60)
    console.start(Progress(1_000_000))
    before = stream.getvalue()
    for step in range(10_000):
        console.progress.advance_to(step)
    assert stream.getvalue() == before
    console.stop()
    assert "9,999" in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (3599, "59 min"),
        (7500, "2 h 05 min"),
        (86_399, "23 h 59 min"),
        (86_400, "1 d 00 h"),
        (273_600.5, "3 d 04 h"),
    ],
)
def test_durations_have_their_two_largest_units(seconds, text):
    assert duration(seconds) == text


def test_returns_and_rewards_stand_beside_their_first_values_of_the_run():
    progress = Progress(1000, initial={"rollout/episode_return": 1.5})  # of an earlier process
    progress.note({"eval_test/return": 2.0})  # of a baseline
    assert progress.metric_texts() == ["evaluation 2.00"]
    progress.finish_update(100, {"rollout/episode_return": 3.0, "rollout/mean_reward": 0.25})
    texts = ["return 3.00 (init 1.50)", "evaluation 2.00 (init 2.00)", "reward 0.25"]
    assert progress.metric_texts() == texts
    metrics = {"rollout/episode_return": 4.0, "rollout/normalized_return": 0.5, "rollout/mean_reward": 1.0}
    progress.finish_update(200, metrics | {"eval_test/return": 5.0})
    shown = "return 4.00 (normalised 0.50, init 1.50), evaluation 5.00 (init 2.00), reward 1 (init 0.25)"
    assert ", ".join(progress.metric_texts()) == shown


def test_the_last_line_has_the_speed_of_the_whole_run_once(capsys):
    console = Console(interval=0.1)
    console.start(Progress(1000))
    console.progress.finish_update(1000, {"time/env_steps_per_second": 900.0})
    console.progress.finish({"env_steps_per_second": 450.0})
    console.progress.phase = "done"
    time.sleep(0.5)
    console.stop()
    lines = capsys.readouterr().out.splitlines()
    assert "450 steps/s" in lines[-1] and "900" not in lines[-1]
    console = Console(interval=60)
    console.start(Progress(1000))
    console.stop()
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_run_that_ended_before_its_last_step_is_shown_as_complete():
    progress = Progress(1_000_000)
    progress.finish_update(1000, {})
    progress.finish({})
    assert progress.line().startswith("100.0% | 1,000 / 1,000,000 env steps | took ")


def test_a_run_without_an_end_shows_neither_a_share_nor_the_time_left():
    progress = Progress(ENDLESS, 0)
    progress.finish_update(1000, {"time/env_steps_per_second": 50.0})
    assert progress.line() == "endless | 1,000 env steps | 50 steps/s | ETA -- | starting"
