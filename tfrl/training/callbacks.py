"""Work beside training: evaluations, what follows updates and evaluations, and the evaluator of a cluster.

It does not touch the training envs or the run's random numbers, so the training does not depend on it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfrl.algorithms.policies import SavedPolicy
from tfrl.algorithms.runs import find_policy
from tfrl.cli.errors import UserError
from tfrl.cli.settings import Settings
from tfrl.cli.streams import quiet_start
from tfrl.config.run import RLSettings
from tfrl.envs import registry
from tfrl.envs.facts import FACTS_FILE
from tfrl.envs.registry import TRAIN
from tfrl.experience.episodes import (
    ActingPolicy,
    Episodes,
    evaluation_metrics,
    level_spec,
    play,
    play_level_set,
    split_episodes,
    with_gap,
)
from tfrl.experience.levels import LevelSampler
from tfrl.networks.weights import PolicySource, keep_best, keep_evaluated
from tfrl.reporting import runs
from tfrl.reporting.video import Recording, open_picture, save
from tfrl.run import files
from tfrl.run.callbacks import Callback, RunOfCallback
from tfrl.run.checkpoint import CheckpointStore
from tfrl.run.console import Console
from tfrl.run.folder import RESULTS_FILE
from tfrl.run.metrics import LEVELS_FILE, EventFile
from tfrl.run.session import Session
from tfrl.workers import machine

if TYPE_CHECKING:
    from tfrl.networks.network import Network


def evaluate(config: RLSettings, session: Session, policy: ActingPolicy) -> dict[str, float]:
    """Evaluates a policy on all level sets; returns the metrics. Every worker plays its share of the envs.

    All workers make the same calls.

    Raises:
      Stopped: a worker got a signal to stop. That worker stops at once; the others stop at the end of the
        level set.
    """
    metrics: dict[str, float] = {}
    session.raise_if_stopped()
    num_envs, each = split_episodes(config.eval_episodes)
    mine = list(range(session.runtime.worker, num_envs, session.runtime.num_workers))

    def show(count: int) -> None:
        session.console.progress.phase = f"evaluating{levels}, {count} of {len(mine) * each} episodes"

    for level_set in config.level_sets:
        levels = f" on {level_set} levels" if TRAIN in config.level_sets else ""
        session.phase(f"evaluating{levels}")
        # Returns, lengths and solved flags. Every worker fills in those of its envs.
        found = np.zeros((3, num_envs, each))
        if mine:
            spec, stopped = level_spec(config, level_set, num_envs), lambda: session.stop.signalled
            played = play(policy, spec, mine, episodes_each=each, broken_off=stopped, on_episode=show)
            found[:, mine] = played.returns, played.lengths, played.solved
        session.phase(f"gathering episodes{levels}")  # other workers may still be playing
        session.raise_if_stopped()  # before the results are used: some episodes may be incomplete
        returns, lengths, solved = session.runtime.sum_over_workers(found)
        metrics |= evaluation_metrics(config, level_set, Episodes(returns, lengths, solved > 0))
    return with_gap(config, metrics)


# Callbacks

_VIDEO_STEPS = 300
# The names that the algorithms give these metrics. The first one that an update has is shown.
_CRITIC = ("train/value_loss", "train/q_loss")
_ACTOR = ("train/policy_loss", "train/actor_loss")

WAITS = ("time/learner_wait_fraction", "time/actor_wait_fraction")
"""The metrics that say how long learner and actors waited for each other."""


def of_run(config: RLSettings, session: Session, network: Network) -> list[Callback]:
    """The callbacks of every run, in call order. All workers have them; only the chief writes."""
    found: list[Callback] = [] if registry.family(config.env).names else [EnvFacts(config, session)]
    if config.level_sets:  # a run without an env has no evaluations
        found += [EvaluationTable(config, session), BestPolicy(config, session)]
    found.append(LearningCurve(config, session))
    if config.tensorboard_graph or config.histograms_every:
        channels = {shape[-1] for shape in registry.specs(config)[0].image_shapes}
        traced = network.graph_def if config.tensorboard_graph else None
        found.append(
            WeightSummaries(session, every=config.histograms_every, channels=sorted(channels), graph=traced)
        )
    found += [EvaluatedPolicies(config, session)] if config.keep_policies != "best" else []
    return [*found, Videos(config, session)] if config.record_every else found


class EnvFacts(Callback):
    """Prints notes and warnings about an env of Gymnasium, and writes the facts that a policy needs.

    Only the chief prints and writes.
    """

    def __init__(self, config: RLSettings, session: Session) -> None:
        self._facts = registry.facts_text(config)
        self._notes, self._warnings = registry.advice(config)
        self._console, self._needed = session.console, session.needed

    def on_start(self, run: RunOfCallback) -> None:
        """Prints, and writes the file. If the disk is full, loading the policy makes an env instead."""
        if not run.is_chief:
            return
        for note in self._notes:
            self._console.message(f"note: {note}.")
        for warning in self._warnings:
            self._console.warn(f"{warning}.")
        if self._facts is not None:
            self._needed.add(FACTS_FILE)
            with contextlib.suppress(OSError):
                files.write(run.folder / FACTS_FILE, self._facts)


class EvaluationTable(Callback):
    """Prints a row for each evaluation, with a header above the first row of a process."""

    def __init__(self, config: RLSettings, session: Session) -> None:
        self._level_sets = config.level_sets
        self._console = session.console
        self._widths: list[int] = []

    def on_evaluation(self, run: RunOfCallback, evaluation: Mapping[str, float]) -> None:
        """Prints returns and lengths with standard deviations, and the losses of the last update."""
        metrics = {**run.metrics, **evaluation}
        cells = {run.config.counts: f"{run.env_steps:,}", "seconds": f"{run.seconds:,.0f}"}
        for level_set in self._level_sets:
            name = "return ± std" if len(self._level_sets) == 1 else f"return ± std, {level_set}"
            cells[name] = _spread(metrics, f"eval_{level_set}/return", 2)
        cells["length ± std"] = _spread(metrics, "eval_test/episode_length", 1)
        for name, losses in (("critic loss", _CRITIC), ("actor loss", _ACTOR)):
            loss = next((metrics[loss] for loss in losses if loss in metrics), math.nan)
            cells[name] = "-" if math.isnan(loss) else f"{loss:.4g}"
        lines = [list(cells.values())]
        if not self._widths:
            least = {"env steps": 11, "seconds": 7, "length ± std": 13}
            self._widths = [
                max(len(name), least.get(name, 15 if name.startswith("return") else 0)) for name in cells
            ]
            lines = [list(cells), *lines]
        for line in lines:
            padded = (cell.rjust(width) for cell, width in zip(line, self._widths, strict=True))
            self._console.message("  ".join(padded))


def _spread(metrics: Mapping[str, float], name: str, digits: int) -> str:
    """The mean and the standard deviation over the episodes."""
    return f"{metrics[name]:.{digits}f} \u00b1 {metrics[f'{name}_std']:.{digits}f}"


class BestPolicy(Callback):
    """Keeps the weights of the best evaluation, beside the rolling checkpoints.

    `metric` is the metric of an evaluation that compares them; larger is better.
    """

    def __init__(self, config: Settings, session: Session, metric: str = "eval_test/return") -> None:
        self._session, self._metric = session, metric
        self._warn = functools.cache(session.console.warn)  # each sentence once

    def on_evaluation(self, run: RunOfCallback, evaluation: Mapping[str, float]) -> None:
        """Writes `checkpoints/best.npz`, on the chief."""
        if not self._session.runtime.is_chief:
            return
        score = evaluation[self._metric]
        try:
            keep_best(run.folder, run.weights(), score=score, env_steps=run.env_steps)
            self._session.unwritten.discard("the best policy")
        except OSError as error:
            self._session.unwritten.add("the best policy")
            self._warn(
                f"The best policy so far could not be saved ({files.reason(error)}). Training continues."
            )


class LevelScores(Callback):
    """Writes `levels.csv`: the score, staleness, probability and episodes of each level, on the chief.

    Args:
      levels: has the scores.
      every: updates between two files. There is one after each evaluation, too.
    """

    def __init__(self, levels: LevelSampler, every: int) -> None:
        self._levels, self._every = levels, every

    def on_update(self, run: RunOfCallback, metrics: dict[str, float]) -> None:
        """Writes the file after some updates: with an evaluator in another process there is no evaluation."""
        if run.updates % self._every == 0:
            self._write(run)

    def on_evaluation(self, run: RunOfCallback, evaluation: Mapping[str, float]) -> None:
        """Writes the file."""
        self._write(run)

    def _write(self, run: RunOfCallback) -> None:
        """If the disk is full, the file stays as it was."""
        if run.is_chief:
            with contextlib.suppress(OSError):
                files.write(run.folder / LEVELS_FILE, self._levels.table())


class EvaluatedPolicies(Callback):
    """Saves the policy of each evaluation in the run's `policies` folder, and prints its path.

    With --keep-policies last, it removes the policies of earlier evaluations.
    """

    def __init__(self, config: RLSettings, session: Session) -> None:
        self._alone = config.keep_policies == "last"
        self._session = session
        self._warn = functools.cache(session.console.warn)  # each sentence once

    def on_evaluation(self, run: RunOfCallback, evaluation: Mapping[str, float]) -> None:
        """Writes `policies/STEPS_RETURN.npz`, on the chief."""
        if not run.is_chief:
            return
        score = evaluation["eval_test/return"]
        try:
            path = keep_evaluated(
                run.folder, run.weights(), score=score, env_steps=run.env_steps, alone=self._alone
            )
            self._session.console.message(f"policy: {path}")
        except OSError as error:
            self._session.unwritten.add("policies of evaluations")
            self._warn(
                f"The policies of evaluations cannot be saved ({files.reason(error)}). Training continues."
            )


class LearningCurve(Callback):
    """Draws `plots/learning_curve.png` at the end of the run, on the chief, and prints its path.

    With --show, it opens the picture.
    """

    def __init__(self, config: RLSettings, session: Session) -> None:
        self._session, self._shows = session, config.show

    def on_end(self, run: RunOfCallback, results: Mapping[str, Any]) -> None:
        """Draws the curves of the complete progress.csv."""
        if not self._session.runtime.is_chief:
            return
        try:
            from tfrl.reporting import plots  # matplotlib takes a second

            path = plots.save_learning_curve(runs.load(run.folder, run.config))
            self._session.console.message(f"learning curve: {path}")
        except Exception as error:  # a finished run must not fail because of its plot
            self._session.console.warn(
                f"The learning curve could not be drawn ({error or type(error).__name__})."
            )
            return
        if self._shows and not open_picture(path):
            self._session.console.message("There is no display here, so --show does not open the picture.")


class Videos(Callback):
    """Records a short video of unseen levels every --record-every updates."""

    def __init__(self, config: RLSettings, session: Session) -> None:
        self._config = config
        self._session = session
        self._warn = functools.cache(session.console.warn)  # each sentence once

    def on_update(self, run: RunOfCallback, metrics: dict[str, float]) -> None:
        """Records if it is time."""
        if run.updates % self._config.record_every == 0:
            self.record(run, run.env_steps)

    def record(self, policy: ActingPolicy, env_steps: int) -> None:
        """Writes a video in the run's `videos` folder."""
        self._session.phase("recording")  # on all workers, because they compare their phases
        if not self._session.runtime.is_chief:
            return
        options = Recording(episodes=1, max_steps=_VIDEO_STEPS)
        path = (
            self._config.run_dir / "videos" / f"{registry.file_name(self._config.env)}-test-{env_steps}.mp4"
        )
        try:
            save(policy, self._config, path, options)
        except OSError as error:
            self._session.unwritten.add("videos")
            self._warn(
                f"Videos cannot be written in {path.parent} ({files.reason(error)}). Training continues."
            )
        except UserError as error:
            self._warn(f"{error} Training continues.")


class Waits(Callback):
    """Averages the times for which learner and actors waited for each other in this process."""

    def __init__(self) -> None:
        self._shares: dict[str, list[float]] = {}

    def on_update(self, run: RunOfCallback, metrics: dict[str, float]) -> None:
        """Adds the shares of an update."""
        for name in WAITS:
            if name in metrics:
                self._shares.setdefault(name.removeprefix("time/"), []).append(metrics[name])

    def means(self) -> dict[str, float]:
        """The mean shares by their names in results.json; empty before the first update."""
        return {name: float(np.mean(shares)) for name, shares in self._shares.items()}


# Weights and graphs for TensorBoard: histograms, pictures of kernels that see images, and the network

_SCALE = 6  # pixels of a kernel's number


class WeightSummaries(Callback):
    """Writes the network's graph at the start of a run, and its weights at intervals, on the chief.

    Args:
      session: this process's part of the run.
      every: updates between two summaries of the weights, the first ones before the first update; 0: none.
      channels: the channels of the images that the network sees; () if it sees none.
      graph: makes the graph, a TensorFlow GraphDef; None: no graph.
    """

    def __init__(
        self, session: Session, *, every: int, channels: Sequence[int], graph: Callable[[], Any] | None
    ) -> None:
        self._session, self._every, self._channels, self._graph = session, every, channels, graph
        self._written = -1  # the intervals at the last summaries

    def on_start(self, run: RunOfCallback) -> None:
        """Writes the graph and the first weights where the curves begin."""
        if not self._session.begins_curves:
            self._written = run.updates // max(1, self._every)
        elif run.is_chief and self._graph is not None:
            self._session.writer.graph(self._graph())
        self.on_update(run, {})

    def on_update(self, run: RunOfCallback, metrics: dict[str, float]) -> None:
        """Writes the weights if it is time."""
        if not self._every or run.updates // self._every <= self._written:
            return
        self._written = run.updates // self._every
        if run.is_chief:
            weights = run.weights()
            summaries = [*histograms(weights), *kernel_pictures(weights, self._channels)]
            self._session.writer.summaries(run.env_steps, summaries)


def histograms(weights: Mapping[str, np.ndarray]) -> list[Any]:
    """A histogram summary of each array, by the name weights/NAME."""
    from tensorboard.plugins.histogram.summary_v2 import histogram_pb

    return [histogram_pb(f"weights/{name}", array) for name, array in weights.items()]


def kernel_pictures(weights: Mapping[str, np.ndarray], channels: Sequence[int]) -> list[Any]:
    """An image summary of each kernel [H, W, C, F] that sees images of one of these numbers of channels."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.image import metadata
    from tensorboard.util.tensor_util import make_tensor_proto

    found = []
    for name, kernel in weights.items():
        if kernel.ndim != 4 or kernel.shape[2] not in channels:
            continue
        picture = kernel_picture(kernel)
        sizes = [str(size).encode() for size in picture.shape[1::-1]]
        tensor = make_tensor_proto(np.array([*sizes, _png(picture)], object))
        value = Summary.Value(
            tag=f"kernels/{name}", metadata=metadata.create_summary_metadata(None, None), tensor=tensor
        )
        found.append(Summary(value=[value]))
    return found


def kernel_picture(kernel: np.ndarray) -> np.ndarray:
    """The filters of a kernel [H, W, C, F] side by side, uint8 [height, width, 3].

    Three channels are red, green and blue. Other channels are grey, one below the other. The darkest number
    of the kernel is black and the brightest is white.
    """
    height, width, channels, filters = kernel.shape
    least, most = float(kernel.min()), float(kernel.max())
    grey = np.round((kernel - least) / (most - least or 1.0) * 255).astype(np.uint8)
    tiles = grey.transpose(3, 0, 1, 2)  # [F, H, W, C]
    if channels != 3:
        tiles = grey.transpose(3, 2, 0, 1).reshape(filters, channels * height, width, 1).repeat(3, axis=-1)
    columns = math.ceil(math.sqrt(filters))
    tall = tiles.shape[1]
    picture = np.full(((tall + 1) * -(-filters // columns), (width + 1) * columns, 3), 255, np.uint8)
    for number, tile in enumerate(tiles):
        row, column = divmod(number, columns)
        top, left = row * (tall + 1), column * (width + 1)
        picture[top : top + tall, left : left + width] = tile
    return picture.repeat(_SCALE, axis=0).repeat(_SCALE, axis=1)


def _png(picture: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return file.getvalue()


# The evaluator of a cluster
#
# The task type `evaluator` of TF_CONFIG makes a process an evaluator (docs/distributed.md). It evaluates the
# checkpoints of a run while its workers train, and takes no part in the strategy. Its metrics go to its own
# event file in the run's folder.

POLL_EVERY = 2.0  # seconds between two searches for a checkpoint


def follow(
    config: RLSettings, sleep: Callable[[float], None] = time.sleep, *, has_callbacks: bool = False
) -> int:
    """Evaluates each new checkpoint until the run is complete.

    With --eval-every and --eval-every-steps it waits for a checkpoint at or after the next multiple of these.
    The workers evaluate the last update for results.json.

    Args:
      config: the settings; the settings of the network come from the run's config.yaml.
      sleep: a function that waits for a number of seconds.
      has_callbacks: True if callbacks of the user may stop the run.

    Returns:
      The exit code, 0. A signal ends the evaluator without saving, because it has no state.

    Raises UserError if there is no GPU of --device.
    """
    with quiet_start():
        machine.choose_device(config.device)
    console = Console(enabled=True)
    store = CheckpointStore(config.run_dir / "checkpoints", keep=1)
    events = EventFile(config.run_dir)
    console.message(f"Following the checkpoints in {config.run_dir}.")
    policy: SavedPolicy | None = None
    warn = functools.cache(console.warn)  # once: the same fault may return for days
    any_checkpoint = not (config.eval_every or config.eval_every_steps)
    evaluated, updates = (0, 0), store.updates()  # updates and env steps
    while not _is_complete(config, updates, has_callbacks):
        now = (updates[-1], store.env_steps()) if updates else evaluated
        is_due = now[0] > evaluated[0] and (any_checkpoint or config.evaluates_at(*now, since=evaluated))
        # It was saved within an update.
        is_between = not config.updates_vary and now[1] > now[0] * config.steps_per_update
        if is_due and not is_between:
            source = _find(config, updates[-1], warn)
            if source is not None:
                evaluated = now
                if policy is None:  # built once, because tracing takes seconds
                    with quiet_start():
                        policy = SavedPolicy(source, greedy=config.eval_greedy)
                else:
                    policy.set_weights(source.weights)
                found: dict[str, float] = {}
                for level_set in config.level_sets:  # the same envs and random numbers as of the workers
                    played = play_level_set(policy, source.config, level_set, config.eval_episodes)
                    found |= evaluation_metrics(source.config, level_set, played)
                found = with_gap(source.config, found)
                try:
                    score = found["eval_test/return"]
                    at = source.env_steps
                    keep_best(config.run_dir, source.weights, score=score, env_steps=at, follows=True)
                    events.scalars(source.env_steps, found)
                except OSError as error:  # as in training, a full disk only loses a point of the curves
                    warn(f"The evaluation in {config.run_dir} cannot be written ({files.reason(error)}).")
                returns = (f"{s} {found[f'eval_{s}/return']:.2f}" for s in config.level_sets)
                console.message(f"{source.env_steps:,} env steps: return {', '.join(returns)}")
        sleep(POLL_EVERY)
        updates = store.updates()
    console.message("The run is complete.")
    return 0


def _is_complete(config: RLSettings, updates: Sequence[int], has_callbacks: bool) -> bool:
    """True if the run has its last checkpoint, or results: it may have ended early or lack the checkpoint."""
    if updates and updates[-1] >= config.num_updates and not config.updates_vary:
        return True
    if not (config.run_dir / RESULTS_FILE).is_file():
        return False
    run = runs.load(config.run_dir)
    return run.is_done_for(config) or (has_callbacks and run.was_stopped)


def _find(config: RLSettings, update: int, warn: Callable[[str], None]) -> PolicySource | None:
    """The policy of the checkpoint; None if the checkpoint is unreadable or already removed."""
    try:
        return find_policy(config.run_dir, str(update), warn)
    except UserError as error:
        warn(str(error))
        return None
