"""Videos of episodes: a grid of games with captions, written frame by frame, so that memory stays bounded."""

from __future__ import annotations

import errno
import functools
import importlib.util
import io
import math
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from tfrl.cli.errors import UserError
from tfrl.envs.spec import ActionSpec, Discrete
from tfrl.envs.vec_env import Step, VecEnv
from tfrl.evaluation.episodes import Watcher
from tfrl.run import files
from tfrl.run.metrics import VIDEO_STRIDE

_TILE = 512  # pixels that a caption is drawn for
_CAPTION = 64
_BARS_LEFT = 172  # of a caption, right of its text
_WIDEST_BAR = 48
_SMOOTH = Image.Resampling.BILINEAR  # each pixel of a frame counts; twice as fast as LANCZOS
_PREVIEW_STEPS = 300
_PREVIEW_WIDTH = 128
_LOOK = {"back": (24, 24, 24), "text": (245, 245, 245), "bar": (120, 120, 120), "chosen": (255, 190, 60)}
# Procgen's 15 actions: nine ways to move, and keys that some games give a meaning.
_PROCGEN_ACTIONS = "\u2199\u2190\u2196\u2193\u00b7\u2191\u2198\u2192\u2197DAWSQE"
_ACTIONS = {15: _PROCGEN_ACTIONS, 3: "\u2190\u00b7\u2192"}


def ffmpeg() -> str:
    """The program that writes mp4: $IMAGEIO_FFMPEG_EXE, that of gym3's imageio-ffmpeg, or the system's.

    The package is looked up and not imported: its release that gym3 asks for needs pkg_resources, which
    setuptools no longer has.
    """
    package = importlib.util.find_spec("imageio_ffmpeg")
    folders = package.submodule_search_locations if package else None
    bundled = [str(file) for folder in folders or () for file in Path(folder).glob("binaries/ffmpeg-*")]
    return os.environ.get("IMAGEIO_FFMPEG_EXE") or next(iter(bundled), "ffmpeg")


class Frames(Protocol):
    """The target of frames uint8 [H, W, 3] of one size: a file or a window."""

    def append(self, frame: np.ndarray) -> None:
        """Adds a frame."""


class Writer:
    """Writes frames uint8 [H, W, 3] of one size to an mp4 (H.264) or gif file; use it in a `with`.

    H and W are even for an mp4.

    Raises:
      OSError: the file cannot be written.
    """

    def __init__(self, path: Path, *, fps: float) -> None:
        self._path = path
        self._fps = fps
        self._encoder: _Mp4 | _Gif | None = None

    def append(self, frame: np.ndarray) -> None:
        """Adds a frame."""
        if self._encoder is None:
            self._encoder = self._open(frame)
        self._encoder.append_data(frame)

    def _open(self, frame: np.ndarray) -> _Mp4 | _Gif:
        if self._path.suffix == ".gif":
            return _Gif(self._path, self._fps)
        return _Mp4(self._path, self._fps, height=frame.shape[0], width=frame.shape[1])

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._encoder is not None:
            self._encoder.close()


class _Mp4:
    """Sends frames to ffmpeg; raises OSError with its last words where it fails."""

    def __init__(self, path: Path, fps: float, *, height: int, width: int) -> None:
        command = [ffmpeg(), "-loglevel", "error", "-y", "-f", "rawvideo", "-pix_fmt", "rgb24"]
        command += ["-s", f"{width}x{height}", "-r", str(fps), "-i", "-", "-an"]
        command += [
            "-c:v",
            "libx264",
            "-preset",
            "veryfast",
            "-crf",
            "15",
            "-pix_fmt",
            "yuv420p",
            "-movflags",
            "+faststart",
        ]
        try:
            # A Ctrl-C is for the trainer, which ends the video as well: not for the encoder alone.
            self._process = subprocess.Popen(
                [*command, str(path)], stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except FileNotFoundError:
            raise OSError(errno.ENOENT, "there is no ffmpeg to write mp4 with") from None

    def append_data(self, frame: np.ndarray) -> None:
        try:
            self._process.stdin.write(np.ascontiguousarray(frame).data)
        except BrokenPipeError:
            self.close()

    def close(self) -> None:
        if self._process.returncode is not None:
            return
        said = self._process.communicate()[1].decode(errors="replace").strip()
        if self._process.returncode:
            last = said.splitlines()[-1] if said else f"ffmpeg ended with {self._process.returncode}"
            raise files.told_in(said) or OSError(errno.EIO, last)


class _Gif:
    """Encodes in memory: imageio complains once more of a file that a full disk has cut off."""

    def __init__(self, path: Path, fps: float) -> None:
        import imageio.v2 as imageio

        self._path = path
        self._encoded = io.BytesIO()
        self._encoder = imageio.get_writer(
            self._encoded, format=".gif", mode="I", duration=1000 / fps, loop=0
        )

    def append_data(self, frame: np.ndarray) -> None:
        self._encoder.append_data(frame)

    def close(self) -> None:
        self._encoder.close()
        self._path.write_bytes(self._encoded.getvalue())


class Preview(Watcher):
    """Keeps the first env's frames in small, one in VIDEO_STRIDE.

    Attributes:
      frames: uint8 [H, W, 3] each.
    """

    def __init__(self) -> None:
        self.frames: list[np.ndarray] = []
        self._step = 0

    def before(self, env: VecEnv, observations: np.ndarray, actions: np.ndarray) -> None:
        """Draws what the policy sees. Raises UserError if the env cannot be rendered."""
        if self._step % VIDEO_STRIDE == 0:
            picture = Image.fromarray(np.asarray(_rendered(env)[0]))
            picture.thumbnail((_PREVIEW_WIDTH, _PREVIEW_WIDTH))
            self.frames.append(np.asarray(picture))
        self._step += 1


def _rendered(env: VecEnv) -> Sequence[np.ndarray]:
    """Returns the envs' frames. Raises UserError, with one sentence, if something for it is missing."""
    try:
        return env.render()
    except ValueError as error:
        raise UserError(f"{str(error).rstrip('.')}.") from None


class Grid(Watcher):
    """Watches one episode in each env, draws them side by side, and keeps a small preview.

    Frames of any size are fitted into tiles of one. An episode that is over keeps its last frame, darker.

    Args:
      count: how many envs.
      sink: where frames go; their height and width are even.
      overlay: a caption below each env.
      probabilities: of each action, float32 [B, A], of observations [B, *shape]; None where a policy has
        none: the caption then shows the actions themselves.
      tile: pixels of a tile's width, and of the height of its frame.
    """

    def __init__(
        self,
        count: int,
        sink: Frames,
        *,
        overlay: bool,
        probabilities: Callable[[np.ndarray], np.ndarray] | None,
        tile: int,
    ) -> None:
        self._sink = sink
        self._overlay = overlay
        self._probabilities = probabilities
        self._tile = tile
        self._returns = np.zeros(count)
        self._over = np.zeros(count, bool)
        self._step = 0
        self._tiles: list[Image.Image] = [Image.new("RGB", self._tile_size)] * count
        self._preview: list[np.ndarray] = []
        self._shown = 0

    @property
    def _tile_size(self) -> tuple[int, int]:
        return self._tile, self._tile + (self._tile * _CAPTION // _TILE if self._overlay else 0)

    @property
    def preview(self) -> np.ndarray:
        """The beginning in small, one frame in VIDEO_STRIDE: uint8 [T, H, W, 3]."""
        return np.stack(self._preview)

    def before(self, env: VecEnv, observations: np.ndarray, actions: np.ndarray) -> None:
        """Draws what the policy sees and does. Raises UserError if the env cannot be rendered."""
        frames = _rendered(env)
        chances = self._probabilities(observations) if self._probabilities and self._overlay else None
        for i in np.flatnonzero(~self._over):
            tile = Image.new("RGB", self._tile_size, _LOOK["back"])
            _paste_fitted(tile, frames[i])
            if self._overlay:
                caption = self._caption(i)
                _draw_action(caption, env.action_spec, actions[i], None if chances is None else chances[i])
                width, height = self._tile_size
                tile.paste(caption.resize((width, height - width), _SMOOTH), (0, width))
            self._tiles[i] = tile
        self._show()

    def after(self, step: Step) -> None:
        """Takes in the rewards; an episode's last frame then shows its return."""
        running = ~self._over
        self._returns[running] += step.reward[running]
        self._step += 1
        for i in np.flatnonzero(running & step.first):
            self._over[i] = True
            tile = Image.blend(self._tiles[i], Image.new("RGB", self._tile_size), 0.55)
            text = f"return {self._returns[i]:.1f} after {self._step} steps"
            middle, size = self._tile // 2, self._tile * 30 // _TILE
            draw = ImageDraw.Draw(tile)
            draw.text((middle, middle), text, anchor="mm", font=_font(size), fill=_LOOK["text"])
            self._tiles[i] = tile
        if self._over.all():
            self._show()

    def _caption(self, i: int) -> Image.Image:
        """Draws an env's step and return, for a tile of full size."""
        caption = Image.new("RGB", (_TILE, _CAPTION), _LOOK["back"])
        draw = ImageDraw.Draw(caption)
        draw.text((12, 6), f"step {self._step}", font=_font(20), fill=_LOOK["text"])
        draw.text((12, 32), f"return {self._returns[i]:.1f}", font=_font(20), fill=_LOOK["text"])
        return caption

    def _show(self) -> None:
        columns = math.ceil(math.sqrt(len(self._tiles)))
        rows = -(-len(self._tiles) // columns)
        width, height = self._tile_size
        whole = Image.new("RGB", (columns * width, rows * height), _LOOK["back"])
        for i, tile in enumerate(self._tiles):
            whole.paste(tile, (i % columns * width, i // columns * height))
        if self._shown < _PREVIEW_STEPS and self._shown % VIDEO_STRIDE == 0:
            small = _PREVIEW_WIDTH, _PREVIEW_WIDTH * whole.height // whole.width
            self._preview.append(np.asarray(whole.resize(small, reducing_gap=2.0)))
        self._shown += 1
        self._sink.append(np.asarray(whole))


def _paste_fitted(tile: Image.Image, frame: np.ndarray) -> None:
    """Draws a frame uint8 [H, W, 3] as large as it fits into the tile's upper square, in its middle."""
    picture = Image.fromarray(np.ascontiguousarray(frame))  # pygame's frames are transposed views
    factor = tile.width / max(picture.size)
    if factor != 1:
        size = [max(1, round(length * factor)) for length in picture.size]
        # Small pictures are of pixels that one is to see.
        picture = picture.resize(size, Image.Resampling.NEAREST if factor > 2 else _SMOOTH)
    tile.paste(picture, ((tile.width - picture.width) // 2, (tile.width - picture.height) // 2))


def _draw_action(
    caption: Image.Image, spec: ActionSpec, action: np.ndarray, chances: np.ndarray | None
) -> None:
    """Draws a bar for each of a few actions, or for each number of one of another kind, from -1 to 1."""
    if not isinstance(spec, Discrete):
        _draw_numbers(caption, spec.scaled(action))
        return
    if chances is None:
        chances = np.eye(spec.n)[action]
    names = _ACTIONS.get(spec.n) or [str(a) for a in range(spec.n)]
    for a, (name, chance) in enumerate(zip(names, chances, strict=True)):
        left, right = _bar(a, spec.n)
        color, base = _LOOK["chosen" if a == action else "bar"], 42
        draw = ImageDraw.Draw(caption)
        draw.rectangle((left, base - max(1, round(36 * float(chance))), right, base), fill=color)
        if right - left > 12:
            draw.text(((left + right) // 2, base + 11), name, anchor="mm", font=_font(16), fill=color)


def _draw_numbers(caption: Image.Image, action: np.ndarray) -> None:
    """Draws bars up or down from a line that stands for 0, float32 [D]."""
    draw, middle = ImageDraw.Draw(caption), _CAPTION // 2
    for d, number in enumerate(np.clip(action, -1, 1)):
        left, right = _bar(d, len(action))
        end = middle - round(26 * float(number))
        draw.rectangle((left, middle - 27, right, middle + 27), outline=_LOOK["bar"])
        draw.rectangle((left, min(middle, end), right, max(middle, end)), fill=_LOOK["chosen"])
    draw.line((_BARS_LEFT - 6, middle, right + 6, middle), fill=_LOOK["text"])


def _bar(index: int, count: int) -> tuple[int, int]:
    """Returns the left and right end of one of `count` bars in a caption."""
    width = min(_WIDEST_BAR, (_TILE - 8 - _BARS_LEFT) / count)
    left = _BARS_LEFT + index * width
    return round(left + min(2, width / 8)), max(round(left), round(left + width - min(3, width / 4)))


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    """DejaVu, which matplotlib brings along: it has arrows."""
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf"), size)
