"""python -m tfrl.suite: games x seeds, one run after another, and a report at the end.

What is done is skipped and what was cut off goes on, so the same command finishes an interrupted suite.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tfrl import commands, config, report, runs
from tfrl.config import Config
from tfrl.envs.games import games
from tfrl.errors import TrainingError, UserError

_ENDING = (2, 130, 143)  # bad settings are bad for the next run as well; the others were told to stop
_HELP = """usage: python -m tfrl.suite [--envs GAME,GAME,...|all] [--seeds N,N,...] [FLAG ...]

Trains every game with every seed, skips what is done, and writes LOGDIR/report.html.

  --envs    games with commas between, or all of procgen's 16 (all)
  --seeds   seeds with commas between (1,2,3)

All other flags are those of python -m tfrl.ppo_procgen, and the same for every run.
"""


@dataclass(frozen=True)
class _Task:
    config: Config
    arguments: list[str]


def main(arguments: Sequence[str]) -> int:
    """Runs the suite; the exit code: 130 or 143 where a run was told to stop."""
    if any(a in ("-h", "--help") for a in arguments):
        print(_HELP, end="")
        return 0
    tasks = plan(arguments)
    failed = []
    for number, task in enumerate(tasks, 1):
        title = f"[{number}/{len(tasks)}] {task.config.run_dir}"
        if _is_done(task.config):
            print(f"{title}: done before", flush=True)
            continue
        print(title, flush=True)
        code = subprocess.call([sys.executable, "-m", "tfrl.ppo_procgen", *task.arguments])
        if code in _ENDING:
            return code
        if code:
            failed.append(task.config.run_dir.name)
    finished = [runs.load(task.config.run_dir) for task in tasks if _is_done(task.config)]
    if finished:
        print(report.write(finished, tasks[0].config.run_dir.parent))
    if failed:
        raise TrainingError(f"{len(failed)} of {len(tasks)} runs failed: {', '.join(failed)}.")
    return 0


def plan(arguments: Sequence[str]) -> list[_Task]:
    """The runs of a command line, checked before the first one starts.

    Raises:
      UserError: a setting cannot be meant, or would give two runs one folder.
    """
    own = {"--envs": "all", "--seeds": "1,2,3"}
    rest: list[str] = []
    tokens = iter(arguments)
    for token in tokens:
        name, equals, value = token.partition("=")
        if name not in own:
            rest.append(token)
            continue
        own[name] = value if equals else next(tokens, "")
        if not own[name]:
            raise UserError(f"{name} needs a value.")
    for flag in ("--env", "--seed", "--run-name"):
        if any(token.partition("=")[0] == flag for token in rest):
            raise UserError(f"a suite names its runs itself: give --envs and --seeds instead of {flag}.")
    names = games() if own["--envs"] == "all" else own["--envs"].split(",")
    tasks = []
    for env in names:
        for seed in own["--seeds"].split(","):
            arguments = [*rest, "--env", env.strip(), "--seed", seed.strip()]
            tasks.append(_Task(config.parse(arguments), arguments))
    return tasks


def _is_done(settings: Config) -> bool:
    if not (settings.run_dir / "results.json").is_file():
        return False
    run = runs.load(settings.run_dir)
    return run.results is not None and run.env_steps >= settings.num_updates * settings.batch_size


if __name__ == "__main__":
    commands.run(main)
