"""The evaluator of a cluster: evaluates the checkpoints of a run while its workers train.

It takes no part in the strategy. The task type `evaluator` of TF_CONFIG makes a process an evaluator
(docs/distributed.md). Its metrics go to its own event file in the run's folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tfrl.algorithms.acting import SavedPolicy
from tfrl.cli.errors import UserError
from tfrl.cli.streams import once, quiet_start
from tfrl.config.run import RLSettings
from tfrl.experience.episodes import evaluation_metrics, play_level_set, with_gap
from tfrl.networks.weights import PolicySource, find_policy
from tfrl.reporting import runs
from tfrl.run import files
from tfrl.run.checkpoint import CheckpointStore
from tfrl.run.console import Console
from tfrl.run.folder import RESULTS_FILE
from tfrl.run.metrics import EventFile

POLL_EVERY = 2.0  # seconds between two searches for a checkpoint


def follow(config: RLSettings, sleep: Callable[[float], None] = time.sleep) -> int:
    """Evaluates each new checkpoint until the run is complete.

    With --eval-every and --eval-every-steps it waits for a checkpoint at or after the next multiple of these.
    The workers evaluate the last update for results.json.

    Args:
      config: the settings; the settings of the network come from the run's config.yaml.
      sleep: a function that waits for a number of seconds.

    Returns:
      The exit code, 0. A signal ends the evaluator without saving, because it has no state.
    """
    console = Console(enabled=True)
    store = CheckpointStore(config.run_dir / "checkpoints", keep=1)
    events = EventFile(config.run_dir)
    console.message(f"Following the checkpoints in {config.run_dir}.")
    player: SavedPolicy | None = None
    warn = once(console.warn)
    any_checkpoint = not (config.eval_every or config.eval_every_steps)
    evaluated, updates = (0, 0), store.updates()  # updates and env steps
    while not (updates and updates[-1] >= config.num_updates) and not _ended_early(config):
        now = (updates[-1], store.env_steps()) if updates else evaluated
        is_due = now[0] > evaluated[0] and (any_checkpoint or config.evaluates_at(*now, since=evaluated))
        is_between = now[1] >= (now[0] + 1) * config.steps_per_update  # it was saved within an update
        if is_due and not is_between:
            source = _find(config, updates[-1], warn)
            if source is not None:
                evaluated = now
                if player is None:  # built once, because tracing takes seconds
                    with quiet_start():
                        player = SavedPolicy(source, greedy=config.eval_greedy)
                else:
                    player.set_weights(source.weights)
                found: dict[str, float] = {}
                for level_set in config.level_sets:  # the same envs and random numbers as of the workers
                    played = play_level_set(player, source.config, level_set, config.eval_episodes)
                    found |= evaluation_metrics(source.config, level_set, played)
                found = with_gap(source.config, found)
                try:
                    events.scalars(source.env_steps, found)
                except OSError as error:  # as in training, a full disk only loses a point of the curves
                    warn(
                        f"TensorBoard's events in {config.run_dir} cannot be written ({files.reason(error)})."
                    )
                returns = (f"{s} {found[f'eval_{s}/return']:.2f}" for s in config.level_sets)
                console.message(f"{source.env_steps:,} env steps: return {', '.join(returns)}")
        sleep(POLL_EVERY)
        updates = store.updates()
    console.message("The run is complete.")
    return 0


def _ended_early(config: RLSettings) -> bool:
    """True if the run ended early, at --max-episodes or --solved-at."""
    if config.solved_at is None and config.max_episodes is None:
        return False
    results = config.run_dir / RESULTS_FILE
    return results.is_file() and runs.load(config.run_dir).is_done_for(config)


def _find(config: RLSettings, update: int, warn: Callable[[str], None]) -> PolicySource | None:
    """The policy of the checkpoint; None if the checkpoint is unreadable or already removed."""
    try:
        return find_policy(config.run_dir, str(update), warn)
    except UserError as error:
        warn(str(error))
        return None
