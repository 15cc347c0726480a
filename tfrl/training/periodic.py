"""The duties of a run besides learning: evaluations, its best policy, videos.

None of it touches the training envs or the run's random numbers, so a run takes the same steps without it.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfrl.cli.errors import UserError
from tfrl.cli.streams import once
from tfrl.envs import registry
from tfrl.envs.registry import TRAIN
from tfrl.evaluation import policy_files
from tfrl.evaluation.episodes import Episodes, Player, play, split_episodes
from tfrl.evaluation.levels import evaluation_metrics, level_spec, with_gap
from tfrl.reporting.video import Preview, Recording, save
from tfrl.run import files
from tfrl.run.metrics import VIDEO_STRIDE
from tfrl.run.session import Session
from tfrl.training.evaluation_table import EvaluationTable

_VIDEO_STEPS = 300  # of the first evaluation episode, for TensorBoard
# What drawing may cost a run that sees no images: so many seconds, and this share of the time it has trained.
_DRAWING_SECONDS, _DRAWING_SHARE = 1.0, 0.02


class Periodic:
    """Evaluations and videos of one run. All workers make the same calls; the chief writes.

    Args:
      config: the settings.
      session: this process's part of the run, its folder open by the time of the first call.
    """

    def __init__(self, config: Any, session: Session) -> None:
        self._config = config
        self._session = session
        self._runtime = session.runtime
        self._warn = once(session.console.warn)
        self._table = EvaluationTable(session.console, config.level_sets)
        self._sees_images = len(registry.specs(config)[0].shape) == 3
        self._draws = not self._sees_images and not registry.draws_with_opengl(config.env)
        self._drawing = 0.0  # seconds so far

    def evaluate(self, player: Player, env_steps: int) -> dict[str, float]:
        """Metrics of all level sets; every worker plays its share of the envs.

        Args:
          player: the policy.
          env_steps: how long the policy was trained.

        Raises:
          Stopped: a worker was told to stop. One that got a signal breaks off at once, the others when they
            have played the level set.
        """
        metrics: dict[str, float] = {}
        shown = self._has_room(env_steps)
        self._session.raise_if_stopped()
        for level_set in self._config.level_sets:
            self._session.phase(f"evaluating{self._on(level_set)}")
            played = self._play(player, level_set, env_steps, shown=shown)
            metrics |= evaluation_metrics(self._config, level_set, played)
        if shown and self._draws:
            self._draw_episode(player, env_steps)
        return with_gap(self._config, metrics)

    def tell(self, env_steps: int, metrics: Mapping[str, float]) -> None:
        """Prints a row of the table of evaluations, with the metrics of the update before it, if any."""
        self._table.row(env_steps, self._session.seconds, metrics)

    def draw_curve(self) -> None:
        """Draws the run's `plots/learning_curve.png`, when all metrics are written; for the chief alone."""
        try:
            from tfrl.reporting import plots, runs  # matplotlib takes a second

            plots.save_learning_curve(runs.load(self._config.run_dir))
        except Exception as error:  # nothing that a finished run should fail of
            self._warn(f"The learning curve could not be drawn ({error or type(error).__name__}).")

    def keep_best(self, weights: dict[str, np.ndarray], score: float, env_steps: int) -> None:
        """Keeps the weights apart from the rolling checkpoints, if no earlier evaluation scored as high."""
        if not self._runtime.is_chief:
            return
        try:
            policy_files.keep_best(self._config.run_dir, weights, score=score, env_steps=env_steps)
            self._session.unwritten.discard("the best policy")
        except OSError as error:
            self._session.unwritten.add("the best policy")
            self._warn(
                f"The best policy so far could not be saved ({files.reason(error)}). Training goes on."
            )

    def record(self, player: Player, env_steps: int) -> None:
        """A short video, of games on unseen levels, in the run's `videos` folder and in TensorBoard."""
        self._session.phase("recording")  # on all workers, which compare the phases they are in
        if not self._runtime.is_chief:
            return
        options = Recording(episodes=1, max_steps=_VIDEO_STEPS)
        path = (
            self._config.run_dir / "videos" / f"{registry.file_name(self._config.env)}-test-{env_steps}.mp4"
        )
        try:
            frames = save(player, self._config, path, options)
        except OSError as error:
            self._session.unwritten.add("videos")
            self._warn(
                f"Videos cannot be written in {path.parent} ({files.reason(error)}). Training goes on."
            )
            return
        except UserError as error:
            self._warn(f"{error} Training goes on.")
            return
        if self._has_room(env_steps):
            self._session.writer.video("video/test", frames, env_steps)

    def _draw_episode(self, player: Player, env_steps: int) -> None:
        """Shows the first evaluation episode's beginning in TensorBoard: played once more, and drawn.

        It ends when the time is up that drawing may take. Envs that OpenGL draws are never drawn here.
        """
        began = time.monotonic()
        left = _DRAWING_SECONDS + _DRAWING_SHARE * self._session.seconds - self._drawing
        if left < _DRAWING_SECONDS / 10:
            return
        num_envs, _ = split_episodes(self._config.eval_episodes)
        spec = dataclasses.replace(level_spec(self._config, "test", num_envs), render=True)
        preview = Preview()
        try:
            play(
                player,
                spec,
                [0],
                episodes_each=1,
                watcher=preview,
                max_steps=_VIDEO_STEPS,
                broken_off=lambda: time.monotonic() > began + left or self._session.stop.signalled,
            )
        except UserError:  # pygame is missing, say: --record-every and record tell
            self._draws = False
        else:
            if preview.frames:
                self._session.writer.video("eval_test/episode", np.stack(preview.frames), env_steps)
        self._drawing += time.monotonic() - began

    def _on(self, level_set: str) -> str:
        """Which levels, in words; nothing where there are none."""
        return f" on {level_set} levels" if TRAIN in self._config.level_sets else ""

    def _has_room(self, env_steps: int) -> bool:
        """Whether TensorBoard gets a video now: the budget is spent evenly, up to the run's end."""
        share = env_steps / self._config.run_steps
        budget = 1e6 * self._config.event_megabytes * min(1.0, share)
        return self._runtime.is_chief and self._session.writer.event_bytes() < budget

    def _play(self, player: Player, level_set: str, env_steps: int, *, shown: bool) -> Episodes:
        num_envs, each = split_episodes(self._config.eval_episodes)
        mine = list(range(self._runtime.worker, num_envs, self._runtime.num_workers))
        frames: list[np.ndarray] = []
        steps = itertools.count()

        def keep(frame: np.ndarray) -> None:
            step = next(steps)
            wanted = shown and self._sees_images
            if wanted and step < _VIDEO_STEPS and step % VIDEO_STRIDE == 0:
                frames.append(frame.copy())  # the view would keep what all envs showed

        # Returns, lengths and solved, of which every worker fills in those of its envs.
        found = np.zeros((3, num_envs, each))
        if mine:
            spec = level_spec(self._config, level_set, num_envs)
            played = play(
                player,
                spec,
                mine,
                episodes_each=each,
                on_frame=keep,
                broken_off=lambda: self._session.stop.signalled,
            )
            found[:, mine] = played.returns, played.lengths, played.solved
        self._session.phase(f"gathering episodes{self._on(level_set)}")  # the other workers may still play
        self._session.raise_if_stopped()  # before anything is used of episodes that may have been broken off
        if frames:
            video = np.stack(frames)
            if video.shape[3] != 3:  # catch is grey; of Atari's stack, the last one is the newest
                video = np.broadcast_to(video[..., -1:], (*video.shape[:3], 3))
            self._session.writer.video(f"eval_{level_set}/episode", video, env_steps)
        returns, lengths, solved = self._runtime.sum_over_workers(found)
        return Episodes(returns, lengths, solved > 0)
