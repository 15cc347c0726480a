"""The display of a run: a live bar in a terminal, or a line every few seconds in a pipe or in CI.

The training loop only stores numbers here. A thread shows them, also during a long call of TensorFlow.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tfrl.cli.flags import ENDLESS
from tfrl.cli.streams import Unbreakable, spelled, tell

_RATE_WINDOW = 32  # updates over which the time left is estimated
_SPEED = "time/env_steps_per_second"
_ROLLOUT = "time/rollout_seconds"
_RETURN, _EVALUATED, _REWARD = SHOWN = (
    *("rollout/episode_return", "eval_test/return", "rollout/mean_reward"),
)
"""The metrics of the progress line beside the speed, each with its first value of the run."""


class Console:
    """Shows one run.

    Attributes:
        progress: how far the run is; `start` begins to show it.

    Args:
        enabled: False on workers other than the chief, which only print warnings on stderr.
        stream: the output; a live display on a terminal, plain lines otherwise.
        interval: seconds between plain lines.
    """

    def __init__(self, *, enabled: bool = True, stream: TextIO | None = None, interval: float = 10.0) -> None:
        self.progress = Progress(1, 0)
        self._starting = threading.Lock()  # a second signal stops the display from another thread
        self._view: _View
        out = stream or sys.stdout
        shown: Any = Unbreakable(out)
        if not enabled:
            self._view = _View()
        elif out.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("CI"):
            self._view = _Terminal(shown)
        else:
            self._view = _Plain(shown, interval)

    def summary(self, rows: Mapping[str, str]) -> None:
        """A table of two columns, before training."""
        self._view.table((), list(rows.items()))
        self._view.line("")

    def start(self, progress: Progress) -> None:
        """Starts to show the progress."""
        with self._starting:
            self.progress = progress
            self._view.start(progress)

    def message(self, text: str) -> None:
        """A line above the bar."""
        self._view.line(spelled(text))

    def warn(self, text: str) -> None:
        """Prints a line that begins with "warning: " above the bar, or on stderr without a bar."""
        self._view.warning(spelled(text))

    def results(
        self, header: Sequence[str], rows: Sequence[Sequence[str]], next_commands: Sequence[str] = ()
    ) -> None:
        """Ends the progress and shows a table of results and the commands to type next."""
        self.progress.phase = "done"
        self.stop()
        self._view.line("")
        self._view.table(header, rows)
        if next_commands:
            self._view.line("\nNext:")
        for command in next_commands:
            self._view.line(f"  {command}")

    def stop(self) -> None:
        """Ends the progress display, and leaves its last state visible. Has no effect without a display."""
        with self._starting:
            self._view.stop()


class Progress:
    """The progress of the run. One thread writes it and another reads it, each field by itself.

    Args:
      total_steps, start_step: the length of the run, and the first step of this process.
      clock: gives the time in seconds.
      unit: the name of a step.
      highlights: makes the texts from an update's metrics; None: speed, returns and reward.
      initial: the first values of the run of metrics in `SHOWN`, if earlier processes have written them.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: float = 0,
        clock: Callable[[], float] = time.monotonic,
        *,
        unit: str = "env steps",
        highlights: Callable[[Mapping[str, float]], list[str]] | None = None,
        initial: Mapping[str, float] | None = None,
    ) -> None:
        self.total_steps = total_steps
        self.env_steps: float = start_step
        self.phase = "starting"  # such as "collecting" or "saving"
        self._is_endless = total_steps >= ENDLESS
        self._unit = unit
        self._highlights = highlights or self._episode_texts
        self._first = dict(initial or {})  # the first known values of `SHOWN`
        self._initial = dict(self._first)  # those that are older than the last update
        self._clock = clock
        self._started = clock()
        self._metrics: Mapping[str, float] = {}
        # False at the last step until its metrics are there, because an evaluation may come before.
        self._is_over = False
        # (time, steps) after the last updates; the first mark is the first steady step of the first update.
        self._marks: deque[tuple[float, float]] = deque(maxlen=_RATE_WINDOW)
        self._origin: float | None = start_step  # while the first mark is within the first update

    def advance_to(self, env_steps: float, *, steady: bool = False) -> None:
        """Takes the state within an update. It takes 0.1 µs, so it may be called at every env step.

        `steady`: True if the pace is that of the rest of the run, so that it predicts the time left.
        """
        self.env_steps = min(env_steps, self.total_steps)
        if steady and not self._marks:
            self._marks.append((self._clock(), self.env_steps))

    def finish_update(self, env_steps: int, metrics: Mapping[str, float]) -> None:
        """Takes the state after an update, and its metrics, named as in progress.csv."""
        self.env_steps = env_steps
        self._is_over = env_steps >= self.total_steps
        self._initial = dict(self._first)
        evaluated = {_EVALUATED: self._metrics[_EVALUATED]} if _EVALUATED in self._metrics else {}
        self._metrics = evaluated | dict(metrics)
        self._note_first(metrics)
        rollout = metrics.get(_ROLLOUT, math.nan)
        if self._origin is not None and len(self._marks) == 1 and rollout > 0:
            # The steady steps of the first update follow its rollout, and its tracing, which does not count.
            self._marks[0] = self._marks[0][0] - rollout, self._origin
        elif self._origin is not None and len(self._marks) == 2:
            self._marks.popleft()  # the second update has the pace of the others
            self._origin = None
        self._marks.append((self._clock(), self.env_steps))

    def note(self, metrics: Mapping[str, float]) -> None:
        """Takes metrics from before the first update."""
        self._metrics = {**self._metrics, **metrics}
        self._note_first(metrics)

    def _note_first(self, metrics: Mapping[str, float]) -> None:
        known = {name: metrics[name] for name in SHOWN if not math.isnan(metrics.get(name, math.nan))}
        self._first = known | self._first

    def finish(self, results: Mapping[str, Any]) -> None:
        """Shows a complete run, whatever ended it, and its speed from results.json."""
        self._is_over = True
        if "env_steps_per_second" in results:
            self._metrics = {**self._metrics, _SPEED: results["env_steps_per_second"]}

    def forget_pace(self) -> None:
        """Forgets the speed, and begins a new estimate of the time left, because the pace changes here."""
        self._metrics = {k: v for k, v in self._metrics.items() if k != _SPEED}
        self._marks = deque([(self._clock(), self.env_steps)], maxlen=_RATE_WINDOW)
        self._origin = None

    @property
    def elapsed(self) -> float:
        """Seconds since this process began to train."""
        return self._clock() - self._started

    @property
    def seconds_left(self) -> float:
        """An estimate from the pace since the first mark; NaN before."""
        if not (marks := self._marks):
            return math.nan
        began, steps = marks[0]
        if self.env_steps <= steps:
            return math.nan
        pace = (self._clock() - began) / (self.env_steps - steps)
        return max(0.0, self.total_steps - self.env_steps) * pace

    @property
    def fraction(self) -> float:
        """The part done, 0 to 1."""
        if self._is_over:
            return 1.0
        return min(self.env_steps, self.total_steps - 1) / self.total_steps

    def percent_text(self) -> str:
        """Rounded down: 100% means done; "endless" for a run without a length."""
        if self._is_endless:
            return "endless"
        return f"{math.floor(self.fraction * 1000) / 10:.1f}%"

    def steps_text(self) -> str:
        """Steps done and in all."""
        if self._is_endless:
            return f"{int(self.env_steps):,} {self._unit}"
        return f"{int(self.env_steps):,} / {self.total_steps:,} {self._unit}"

    def eta_text(self) -> str:
        """The time left, "ETA --" without an estimate, or the time that the run took."""
        if self.fraction == 1.0 or self.phase == "done":
            return f"took {duration(self.elapsed)}"
        left = math.nan if self._is_endless else self.seconds_left
        return f"ETA {duration(left) if left > 0 else '--'}"

    def metric_texts(self) -> list[str]:
        """Texts for the metrics of the last update; none before the first one."""
        return self._highlights(self._metrics)

    def _episode_texts(self, metrics: Mapping[str, float]) -> list[str]:
        """Speed, returns and reward, with their first values of the run."""
        texts = []
        speed = metrics.get(_SPEED, math.nan)
        if not math.isnan(speed):
            texts.append(f"{speed:,.0f} steps/s" if speed >= 10 else f"{speed:.2g} steps/s")
        normalized = metrics.get("rollout/normalized_return", math.nan)
        notes = [] if math.isnan(normalized) else [f"normalised {normalized:.2f}"]
        for name, title, digits in (
            (_RETURN, "return", ".2f"),
            (_EVALUATED, "evaluation", ".2f"),
            (_REWARD, "reward", ".3g"),
        ):
            if math.isnan(value := metrics.get(name, math.nan)):
                continue
            about = notes if name == _RETURN else []
            if name in self._initial:
                about = [*about, f"init {self._initial[name]:{digits}}"]
            texts.append(f"{title} {value:{digits}}" + (f" ({', '.join(about)})" if about else ""))
        return texts

    def line(self) -> str:
        """The whole progress in one plain line."""
        parts = [self.percent_text(), self.steps_text(), *self.metric_texts()]
        parts.insert(3 if len(parts) > 2 else 2, self.eta_text())
        return " | ".join([*parts, self.phase])


def duration(seconds: float) -> str:
    """Seconds in the two largest units, rounded down: "35 s", "48 min", "2 h 05 min", "3 d 04 h"."""
    minutes, hours, days = (int(seconds // unit) for unit in (60, 3600, 86_400))
    if seconds < 60:
        return f"{int(seconds)} s"
    if seconds < 3600:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60:02d} min" if days == 0 else f"{days} d {hours % 24:02d} h"


class _View:
    """The output of workers other than the chief: warnings on stderr."""

    def start(self, progress: Progress) -> None:
        pass

    def stop(self) -> None:
        pass

    def line(self, text: str) -> None:
        pass

    def warning(self, text: str) -> None:
        tell(f"warning: {text}")

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        pass


class _Plain(_View):
    """Plain lines, each flushed at once."""

    def __init__(self, stream: TextIO, interval: float) -> None:
        self._stream = stream
        self._interval = interval
        self._lock = threading.Lock()
        self._shown = ""  # the last line of the progress
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, progress: Progress) -> None:
        self._progress, self._shown = progress, ""
        self._stopped.clear()
        self._thread = threading.Thread(target=self._repeat, name="console", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self._thread = None
            if (last := self._progress.line()) != self._shown:
                self.line(last)

    def line(self, text: str) -> None:
        with self._lock:  # the thread and the main thread both write lines
            self._stream.write(text + "\n")
            self._stream.flush()

    def warning(self, text: str) -> None:
        self.line(f"warning: {text}")

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        lines = [list(header)] * bool(header) + [list(row) for row in rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for cells in lines:
            padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            self.line("  ".join(padded).rstrip())

    def _repeat(self) -> None:
        while not self._stopped.wait(self._interval):
            self._shown = self._progress.line()
            self.line(self._shown)


class _Terminal(_View):
    """A live bar with other lines above it."""

    def __init__(self, stream: TextIO) -> None:
        self._console = RichConsole(file=stream, highlight=False, markup=False, emoji=False)
        self._live: Live | None = None

    def start(self, progress: Progress) -> None:
        self._live = Live(
            get_renderable=lambda: _render(progress, self._console.width),
            console=self._console,
            refresh_per_second=4,
        )
        self._live.start()

    def stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def line(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def warning(self, text: str) -> None:
        self._console.print(Text.assemble(("warning: ", "bold yellow"), (text, "yellow")), soft_wrap=True)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Table(show_header=bool(header), box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for position, name in enumerate(header or [""] * len(rows[0])):
            table.add_column(name, style="dim" if position == 0 else "", overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        self._console.print(table)


def _render(progress: Progress, width: int) -> RenderableType:
    """Two lines: the bar and the last update, each without the texts that find no room."""
    texts = [Text(progress.percent_text(), "bold"), Text(progress.eta_text(), "cyan")]
    if width >= 75:  # 15 for the bar
        texts.insert(1, Text(progress.steps_text()))
    bar = Table.grid(expand=True, padding=(0, 2, 0, 0))
    bar.add_column(ratio=1)
    for _ in texts:
        bar.add_column(no_wrap=True, justify="right")
    bar.add_row(ProgressBar(total=1.0, completed=progress.fraction), *texts)
    phase = f"{progress.phase:<10}"  # as wide as "collecting", so that the next texts do not move
    parts = [phase, *progress.metric_texts(), f"elapsed {duration(progress.elapsed)}"]
    while len(parts) > 1 and len(" · ".join(parts)) > width:
        parts.pop()
    return Group(bar, Text(" · ".join(parts), "dim", no_wrap=True, overflow="ellipsis"))
