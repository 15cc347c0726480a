"""python -m benchmarks.off_policy: SAC, TD3, DDPG and DQN beside other projects' scripts.

SAC, TD3 and DDPG learn InvertedDoublePendulum-v5, one gradient step of 256 transitions an env step, networks
of 2 x 256; DQN learns CartPole-v1, 128 transitions every 10 env steps: CleanRL's settings, which are our
--preset cleanrl. (stable-baselines3's DDPG has its actor learn at each step, CleanRL's and so ours at every
second.) One process after the other, round by round, so that all see the same machine.

Nothing of theirs is here. --libraries names those that --peer-python has, of sbx and stable_baselines3 (a
virtual environment with `pip install sbx-rl` has both); benchmarks/baselines_script.py trains them. --cleanrl
is a folder with CleanRL's sac_continuous_action.py, td3_continuous_action.py, ddpg_continuous_action.py and
dqn.py (https://github.com/vwxyzjn/cleanrl). All are started with `--env-id ID --seed N --total-timesteps N
--learning-starts 100`. They print a line that begins with `SPS:` every 1,000 env steps, which CleanRL's do
every 100; CleanRL's need AutoresetMode.SAME_STEP for Gymnasium 1.

Env steps a second count from the end of the first 1,000, which compile. Where the machine is not quiet, the
column for a second of processor time tells more; `taskset -c 1` before the command holds all to one core.
The second table has SAC's update alone, what storing and sampling transitions take of an env step
(`benchmarks/replay_floor.py`), and how fast anybody could be for whom all but the arithmetic of the gradient
steps took no time (`benchmarks/arithmetic.py`).
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import arithmetic, baselines_script, command, peers, replay_floor, speed
from tfrl.algorithms import registry as settings
from tfrl.cli.errors import UserError
from tfrl.cli.flags import COUNT, Range

_STEPS, _RANDOM_STEPS = 1000, 100  # between two lines; before the first gradient step


@dataclasses.dataclass(frozen=True)
class Contest:
    """The task that one algorithm is measured on.

    Attributes:
      env: the env.
      script: CleanRL's, in the folder --cleanrl.
      times: the lines for one of --updates: a step of DQN takes less time.
      variants: further rows of ours, by name, and their flags.
    """

    env: str
    script: str
    times: int = 1
    variants: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


_LIBRARIES = {"sbx": "SBX", "stable_baselines3": "stable-baselines3"}
_AT_ONCE = {"tfrl, 8 at once": ("--train-every", "8")}
_PENDULUM = "InvertedDoublePendulum-v5"
_CONTESTS = {
    "sac": Contest(_PENDULUM, "sac_continuous_action.py", variants=_AT_ONCE),
    "td3": Contest(_PENDULUM, "td3_continuous_action.py", variants=_AT_ONCE),
    "ddpg": Contest(_PENDULUM, "ddpg_continuous_action.py", variants=_AT_ONCE),
    "dqn": Contest("CartPole-v1", "dqn.py", times=10),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """The measurement."""

    algorithms: str = ",".join(_CONTESTS)
    """The algorithms, with commas between."""
    cleanrl: str = ""
    """The folder of CleanRL's scripts."""
    libraries: str = ""
    """Libraries that the peers' Python has, of sbx and stable_baselines3, with commas between."""
    peer_python: str = "python3"
    """The Python that has what these scripts import."""
    updates: Annotated[int, Range(1, 10_000)] = 5
    """Thousands of env steps that count; one more comes first. DQN: ten times as many."""
    runs: Annotated[int, COUNT] = 3
    """Rounds, of which the median counts."""
    floor_seconds: Annotated[float, Range(0, 3600, above=True)] = 10.0
    """Seconds of each measurement of SAC's update alone."""


def main(options: Options) -> None:
    """Measures and prints."""
    names = _check(options)
    found: dict[tuple[str, str], list[speed.Speed]] = {}
    for _ in range(options.runs):
        for algorithm in names:
            for name, measured in _round(options, algorithm):
                found.setdefault((algorithm, name), []).append(measured)
    alone = _alone(options.floor_seconds) if "sac" in names else {}
    replay = {algorithm: replay_floor.replay_seconds(*_flags(algorithm)) for algorithm in names}
    limits = {algorithm: _limit(algorithm, options.floor_seconds) for algorithm in names}
    figures = {"options": dataclasses.asdict(options), "cores": os.cpu_count(), "updates alone": alone}
    print(json.dumps({**figures, "replay seconds": replay, "limits": limits, "runs": peers.as_json(found)}))
    title = f"env steps a second, medians of {options.runs} runs; in brackets ours in multiples of it"
    console = Console()
    console.print(peers.table(title, "", found))
    console.print(_parts(found, alone, replay, limits))


def _check(options: Options) -> list[str]:
    """The algorithms. Raises UserError for what would fail after minutes."""
    names = [name.strip() for name in options.algorithms.split(",")]
    if not {*names} <= {*_CONTESTS}:
        known = ", ".join(_CONTESTS)
        raise UserError(f"--algorithms must be of {known}, with commas between; got {options.algorithms}.")
    for name in names:
        if options.cleanrl:
            peers.check_file(str(Path(options.cleanrl) / _CONTESTS[name].script), "--cleanrl:")
        settings.reader(name).parse(_flags(name)[1])
    if not {*_libraries(options)} <= {*_LIBRARIES}:
        raise UserError(
            f"--libraries must be of {', '.join(_LIBRARIES)}, with commas between; got {options.libraries}."
        )
    command.check_program(options.peer_python, "--peer-python")
    return names


def _libraries(options: Options) -> list[str]:
    return [name.strip() for name in options.libraries.split(",")] if options.libraries else []


def _flags(algorithm: str) -> tuple[str, list[str]]:
    """The algorithm and the flags of ours that all rows share."""
    return algorithm, ["--preset", "cleanrl", "--env", _CONTESTS[algorithm].env, "--precision", "float32"]


def _round(options: Options, algorithm: str) -> list[tuple[str, speed.Speed]]:
    """Ours, its variants and the peers, once each."""
    contest = _CONTESTS[algorithm]
    lines = options.updates * contest.times + 1
    found = [
        (name, _our_run(algorithm, lines, more))
        for name, more in {peers.OURS: (), **contest.variants}.items()
    ]
    scripts: dict[str, tuple[str, list[str]]] = {}
    if options.cleanrl:
        scripts["CleanRL"] = (str(Path(options.cleanrl) / contest.script), [])
    for library in _libraries(options):
        words = ["--library", library, "--algorithm", algorithm]
        scripts[_LIBRARIES[library]] = (baselines_script.__file__, words)
    for name, (path, more) in scripts.items():
        words = peers.script(options.peer_python, path, contest.env, seed=1, steps=_STEPS * lines)
        words += ["--learning-starts", str(_RANDOM_STEPS), *more]
        found.append((name, speed.of_script(words, _STEPS, lines)))
    return found


def _our_run(algorithm: str, lines: int, more: Sequence[str]) -> speed.Speed:
    flags = [*_flags(algorithm)[1], "--total-steps", str(_STEPS * lines), *more]
    flags += ["--iteration-steps", str(_STEPS), "--learning-starts", str(_RANDOM_STEPS)]
    if algorithm == "dqn":  # as CleanRL's: over half of the run
        flags += ["--exploration-steps", str(_STEPS * lines // 2)]
    return speed.of_trainer(f"tfrl.{algorithm}", [*flags, "--eval-episodes", "1"], _STEPS, lines)


def _alone(seconds: float) -> dict[str, dict[str, float]]:
    """Rates of SAC's update alone by way, with either clock."""
    clocks = {"a CPU second": False, "a second": True}
    return {name: replay_floor.update_rates(seconds, by_wall=by_wall) for name, by_wall in clocks.items()}


def _limit(algorithm: str, seconds: float) -> float:
    """Env steps a second where envs and all else but the arithmetic of the gradient steps took no time."""
    config = settings.reader(algorithm).parse(_flags(algorithm)[1])
    each = arithmetic.gradient_step(algorithm, config) * config.updates_per_step
    code = "from benchmarks.arithmetic import product_rate as f; "
    return float(command.answer(f"{code}print(f('float32', {seconds!r}))")) / each


def _parts(
    found: peers.Found,
    alone: dict[str, dict[str, float]],
    replay: dict[str, dict[str, float]],
    limits: dict[str, float],
) -> Table:
    """What the trainer's update comes to beside one that is nothing else, the share of the replay, limits."""
    table = Table("", "", box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_header=False)
    for clock, rates in alone.items():
        for way, rate in rates.items():
            beside = "" if way == "trainer" else f" ({rates['trainer'] / rate:.2f}x)"
            table.add_row(f"SAC's updates in {clock}, {way}", f" {rate:,.0f}{beside}")
    for algorithm, parts in replay.items():
        of_step = 1 / peers.median(found[algorithm, peers.OURS]).per_cpu_second
        words = ", ".join(f"{name} {value / of_step:.1%}" for name, value in parts.items())
        table.add_row(f"{algorithm}'s replay, of the time of an env step", f" {words}")
    for algorithm, limit in limits.items():
        each = [
            f"{name} {peers.median(of).median / limit:.2f}x"
            for (which, name), of in found.items()
            if which == algorithm
        ]
        table.add_row(f"{algorithm}: env steps/s that arithmetic allows", f" {limit:,.0f}: {', '.join(each)}")
    return table


if __name__ == "__main__":
    command.run(Options, main)
