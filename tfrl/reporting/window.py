"""A window that shows a policy at play while it plays."""

from __future__ import annotations

import os
import sys
from types import TracebackType

import numpy as np

from tfrl.cli.errors import UserError

_NO_DISPLAY = "--window needs a display, and there is none here; without it, a video is written."


class Window:
    """Shows frames uint8 [H, W, 3] of one size, each for 1 / fps seconds; use it in a `with`.

    It is pygame's for all envs alike, so it looks as videos do.

    Attributes:
      closed: whether it was closed, by its button, Escape or q.

    Raises:
      UserError: pygame or a display is missing.
    """

    def __init__(self, title: str, *, fps: float) -> None:
        if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            raise UserError(_NO_DISPLAY)
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
        # OpenGL, which SDL would draw with, crashes beside TensorFlow (`tfrl.envs.apart`).
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
        # SDL's own choice where it finds no display: nobody would see anything.
        if pygame.display.get_driver() == "offscreen" and "SDL_VIDEODRIVER" not in os.environ:
            pygame.display.quit()
            raise UserError(_NO_DISPLAY)

    def append(self, frame: np.ndarray) -> None:
        """Shows a frame, once the one before it has been shown long enough."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pygame.display.quit()
