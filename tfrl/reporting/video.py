"""Videos and windows that show a policy: a grid of episodes."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import importlib.util
import math
import os
import shutil
import subprocess
import sys
import webbrowser
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from tfrl.cli.errors import UserError
from tfrl.cli.flags import COUNT, Range
from tfrl.envs.registry import family, frames_per_second
from tfrl.envs.spec import ActionSpec, Discrete, MultiDiscrete, Step, VecEnv
from tfrl.experience.episodes import ActingPolicy, Watcher, level_spec, play
from tfrl.run import files, rng

Probabilities = Callable[[np.ndarray], np.ndarray] | None
"""A function from observations to the probabilities of the actions, float32 [B, A]; None if there is none."""
_TILE, _CAPTION = 512, 64  # pixels: the size of a caption
_BARS_LEFT = 172  # right of the caption's text
_WIDEST_BAR = 48
_SMOOTH = Image.Resampling.BILINEAR  # twice as fast as LANCZOS
_LOOK = {"back": (24, 24, 24), "text": (245, 245, 245), "bar": (120, 120, 120), "chosen": (255, 190, 60)}
# The actions of catch, and procgen's 15: nine moves and six keys.
_ACTIONS = {15: "\u2199\u2190\u2196\u2193\u00b7\u2191\u2198\u2192\u2197DAWSQE", 3: "\u2190\u00b7\u2192"}
_NO_DISPLAY = "--window needs a display, and there is none here; without it, a video is written."
_ENCODERS = {
    ".mp4": "-c:v libx264 -preset veryfast -crf 15 -pix_fmt yuv420p -movflags +faststart",
    # A palette for each frame; one for all frames would need all frames in memory.
    ".gif": "-filter_complex split[a][b];[a]palettegen=stats_mode=single:reserve_transparent=0[p];"
    "[b][p]paletteuse=new=1",
}


@dataclass(frozen=True)
class Recording:
    """The video."""

    episodes: Annotated[int, Range(1, 100)] = 4
    """Episodes, side by side in a grid, each on its own level."""
    levels: Literal["train", "test"] = "test"
    """train: the run's training levels; test: unseen levels. An env without levels has only test."""
    overlay: bool = True
    """Write step, return and action below each env, with the probabilities of discrete actions."""
    max_steps: Annotated[int, COUNT] = 1000
    """Env steps after which the video ends."""


def save(
    policy: ActingPolicy, task: Any, path: Path, options: Recording, probabilities: Probabilities = None
) -> None:
    """Plays one episode in each of `options.episodes` envs and writes the video.

    Args:
      policy: gives the actions.
      task: the run's settings.
      path: the file, .mp4 or .gif; its folder is made.
      options: the length, levels and overlay.
      probabilities: shown in the overlay; None: the overlay shows the actions instead.

    Raises OSError if the file cannot be written, and UserError if the env cannot be rendered.
    """
    tile = 512 if path.suffix == ".mp4" and options.episodes == 1 else 256
    files.make_folder(path.parent)
    with files.replacing(path) as staged:
        staged.touch()  # raises a better error than the encoder
        with writing(staged, fps=frames_per_second(task)) as append:
            grid = Grid(options, append, probabilities, tile, named=bool(family(task.env).names))
            _play(policy, task, options, grid, broken_off=lambda: False)


def show(
    policy: ActingPolicy, task: Any, window: Window, options: Recording, probabilities: Probabilities = None
) -> None:
    """Plays one episode in each of `options.episodes` envs in a window, until all end or it is closed.

    Raises UserError if the env cannot be rendered.
    """
    tile = 512 if options.episodes == 1 else 256
    grid = Grid(options, window.append, probabilities, tile, named=bool(family(task.env).names))
    _play(policy, task, options, grid, broken_off=lambda: window.closed)


def _play(
    policy: ActingPolicy, task: Any, options: Recording, grid: Grid, broken_off: Callable[[], bool]
) -> None:
    spec = level_spec(task, options.levels, options.episodes, rng.Use.RECORDING)
    play(
        policy,
        dataclasses.replace(spec, render=True),
        range(options.episodes),
        episodes_each=1,
        watcher=grid,
        max_steps=options.max_steps,
        broken_off=broken_off,
    )


# Targets of frames


def ffmpeg() -> str:
    """The program that writes videos: $IMAGEIO_FFMPEG_EXE, that of imageio-ffmpeg, or the system's.

    The package is not imported, because the release that gym3 requires needs pkg_resources, which setuptools
    no longer has.
    """
    package = importlib.util.find_spec("imageio_ffmpeg")
    folders = package.submodule_search_locations if package else None
    bundled = [str(file) for folder in folders or () for file in Path(folder).glob("binaries/ffmpeg-*")]
    return os.environ.get("IMAGEIO_FFMPEG_EXE") or next(iter(bundled), "ffmpeg")


@contextlib.contextmanager
def writing(path: Path, *, fps: float) -> Iterator[Callable[[np.ndarray], None]]:
    """Gives a function that adds a frame uint8 [H, W, 3] to an mp4 (H.264) or gif file.

    All frames have one size; H and W are even for an mp4. Raises OSError with ffmpeg's last line if the file
    cannot be written.
    """
    # Each frame comes with its size, so that ffmpeg can start before the first one.
    command = [ffmpeg(), *["-loglevel", "error", "-y", "-f", "image2pipe", "-c:v", "ppm"]]
    command += ["-r", str(fps), "-i", "-", *_ENCODERS[path.suffix].split(), str(path)]
    pipe = subprocess.PIPE
    try:
        # In its own session, so that a Ctrl-C reaches only the trainer, which ends the video.
        process = subprocess.Popen(command, stdin=pipe, stderr=pipe, start_new_session=True)
    except FileNotFoundError:
        raise OSError(errno.ENOENT, "there is no ffmpeg to write videos with") from None

    def append(frame: np.ndarray) -> None:
        assert process.stdin is not None
        process.stdin.write(b"P6 %d %d 255\n" % (frame.shape[1], frame.shape[0]))
        process.stdin.write(np.ascontiguousarray(frame).data)

    try:
        with contextlib.suppress(BrokenPipeError):  # ffmpeg has ended, and says why
            yield append
    finally:
        said = process.communicate()[1].decode(errors="replace").strip()
    if process.returncode:
        last = said.splitlines()[-1] if said else f"ffmpeg ended with {process.returncode}"
        raise files.told_in(said) or OSError(errno.EIO, last)


class Window:
    """Shows frames uint8 [H, W, 3] of one size, each for 1 / fps seconds; use it in a `with`.

    Raises UserError if pygame or a display is missing.

    Attributes:
      closed: True after its button, Escape or q was pressed.
    """

    def __init__(self, title: str, *, fps: float) -> None:
        if not has_display():
            raise UserError(_NO_DISPLAY)
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
        # SDL's OpenGL crashes beside TensorFlow (`tfrl.envs.subprocesses`).
        os.environ.setdefault("SDL_FRAMEBUFFER_ACCELERATION", "0")
        try:
            import pygame
        except ImportError:
            raise UserError("--window needs a package that is missing: pip install pygame.") from None
        self.closed = False
        self._pygame = pygame
        self._title, self._fps = title, fps
        self._clock = pygame.time.Clock()
        try:
            pygame.display.init()
        except pygame.error:
            raise UserError(_NO_DISPLAY) from None

    def append(self, frame: np.ndarray) -> None:
        """Shows a frame after the one before has been shown long enough."""
        pygame, size = self._pygame, (frame.shape[1], frame.shape[0])
        screen = pygame.display.get_surface()
        if screen is None:
            screen = pygame.display.set_mode(size)
            pygame.display.set_caption(self._title)
        for event in pygame.event.get():
            keys = event.type == pygame.KEYDOWN and event.key in (pygame.K_ESCAPE, pygame.K_q)
            self.closed |= event.type == pygame.QUIT or keys
        screen.blit(pygame.image.frombuffer(np.ascontiguousarray(frame).tobytes(), size, "RGB"), (0, 0))
        pygame.display.flip()
        self._clock.tick(self._fps)

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *_: object) -> None:
        self._pygame.display.quit()


# Drawing


class Grid(Watcher):
    """Draws one episode of each env in tiles side by side. An ended episode keeps its last frame, darker.

    Args:
      options: the number of envs, and whether tiles have captions.
      sink: gets the frames uint8 [H, W, 3]; their height and width are even.
      probabilities: for the captions; None: they show the actions themselves.
      tile: the width of a tile, and the height of its frame, in pixels.
      named: True if the captions name the actions, as for procgen and catch, instead of numbering them.
    """

    def __init__(
        self,
        options: Recording,
        sink: Callable[[np.ndarray], None],
        probabilities: Probabilities,
        tile: int,
        *,
        named: bool = False,
    ) -> None:
        self._sink = sink
        self._overlay, self._named = options.overlay, named
        self._probabilities = probabilities if options.overlay else None
        self._size = tile, tile + (tile * _CAPTION // _TILE if options.overlay else 0)
        self._returns = np.zeros(options.episodes)
        self._over = np.zeros(options.episodes, bool)
        self._step = 0
        self._tiles: list[Image.Image] = [Image.new("RGB", self._size)] * options.episodes

    def before(self, env: VecEnv, observations: np.ndarray, actions: np.ndarray) -> None:
        """Draws the envs and the actions. Raises UserError if the env cannot be rendered."""
        try:
            frames = env.render()
        except ValueError as error:  # a package or a display is missing
            raise UserError(f"{str(error).rstrip('.')}.") from None
        chances = self._probabilities(observations) if self._probabilities else [None] * len(actions)
        for i in np.flatnonzero(~self._over):
            tile = Image.new("RGB", self._size, _LOOK["back"])
            _paste_fitted(tile, frames[i])
            if self._overlay:
                caption = Image.new("RGB", (_TILE, _CAPTION), _LOOK["back"])
                draw = ImageDraw.Draw(caption)
                draw.text((12, 6), f"step {self._step}", font=_font(20), fill=_LOOK["text"])
                draw.text((12, 32), f"return {self._returns[i]:.1f}", font=_font(20), fill=_LOOK["text"])
                _draw_action(draw, env.action_spec, actions[i], chances[i], named=self._named)
                width, height = self._size
                tile.paste(caption.resize((width, height - width), _SMOOTH), (0, width))
            self._tiles[i] = tile
        self._show()

    def after(self, step: Step) -> None:
        """Adds the rewards; the last frame of an episode shows its return."""
        running = ~self._over
        self._returns[running] += step.reward[running]
        self._step += 1
        for i in np.flatnonzero(running & step.first):
            self._over[i] = True
            tile = Image.blend(self._tiles[i], Image.new("RGB", self._size), 0.55)
            text = f"return {self._returns[i]:.1f} after {self._step} steps"
            middle, font = self._size[0] // 2, _font(self._size[0] * 30 // _TILE)
            ImageDraw.Draw(tile).text((middle, middle), text, anchor="mm", font=font, fill=_LOOK["text"])
            self._tiles[i] = tile
        if self._over.all():
            self._show()

    def _show(self) -> None:
        columns = math.ceil(math.sqrt(len(self._tiles)))
        rows = -(-len(self._tiles) // columns)
        width, height = self._size
        whole = Image.new("RGB", (columns * width, rows * height), _LOOK["back"])
        for i, tile in enumerate(self._tiles):
            whole.paste(tile, (i % columns * width, i // columns * height))
        self._sink(np.asarray(whole))


def _paste_fitted(tile: Image.Image, frame: np.ndarray) -> None:
    """Draws a frame uint8 [H, W, 3] as large as possible in the tile's upper square."""
    picture = Image.fromarray(np.ascontiguousarray(frame))  # pygame's frames are transposed views
    factor = tile.width / max(picture.size)
    if factor != 1:
        size = [max(1, round(length * factor)) for length in picture.size]
        # The pixels of small pictures stay sharp.
        picture = picture.resize(size, Image.Resampling.NEAREST if factor > 2 else _SMOOTH)
    tile.paste(picture, ((tile.width - picture.width) // 2, (tile.width - picture.height) // 2))


def _draw_action(
    draw: ImageDraw.ImageDraw,
    spec: ActionSpec,
    action: np.ndarray,
    chances: np.ndarray | None,
    *,
    named: bool,
) -> None:
    """Draws a bar for each discrete action, or for each number of an action, from -1 to 1."""
    count = spec.n if isinstance(spec, Discrete) else len(action)
    width = min(_WIDEST_BAR, (_TILE - 8 - _BARS_LEFT) / count)
    lefts = [_BARS_LEFT + k * width for k in range(count)]
    bars = [
        (round(x + min(2, width / 8)), max(round(x), round(x + width - min(3, width / 4)))) for x in lefts
    ]
    if isinstance(spec, Discrete):
        chances = np.eye(count)[action] if chances is None else chances
        names = _ACTIONS[count] if named else [str(a) for a in range(count)]
        for a, (left, right) in enumerate(bars):
            color, base = _LOOK["chosen" if a == action else "bar"], 42
            top = base - max(1, round(36 * float(chances[a])))
            draw.rectangle((left, top, right, base), fill=color)
            if right - left > 12:
                at = (left + right) // 2, base + 11
                draw.text(at, names[a], anchor="mm", font=_font(16), fill=color)
        return
    if isinstance(spec, MultiDiscrete):
        action = 2 * action / np.maximum(1, np.array(spec.counts) - 1) - 1
    middle = _CAPTION // 2  # bars go up or down from here
    for (left, right), number in zip(bars, np.clip(action, -1, 1), strict=True):
        end = middle - round(26 * float(number))
        draw.rectangle((left, middle - 27, right, middle + 27), outline=_LOOK["bar"])
        draw.rectangle((left, min(middle, end), right, max(middle, end)), fill=_LOOK["chosen"])
    draw.line((_BARS_LEFT - 6, middle, bars[-1][1] + 6, middle), fill=_LOOK["text"])


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    """Matplotlib's DejaVu, which has arrows."""
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf"), size)


# The display and the picture viewer of this machine


def open_picture(path: Path) -> bool:
    """Opens a picture in the viewer of the desktop or in a browser, and returns. False without a display.

    A viewer's own messages are dropped, because they would disturb the output of the run.
    """
    if not has_display():
        return False
    viewer = "open" if sys.platform == "darwin" else "xdg-open"
    if shutil.which(viewer) is None:
        return webbrowser.open(path.resolve().as_uri())
    quiet = subprocess.DEVNULL
    subprocess.Popen([viewer, str(path)], start_new_session=True, stdin=quiet, stdout=quiet, stderr=quiet)
    return True


def has_display() -> bool:
    """True if windows can be opened here."""
    on_linux = sys.platform.startswith("linux")
    return not on_linux or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
