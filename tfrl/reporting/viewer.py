"""Shows a picture with the viewer of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import webbrowser
from pathlib import Path


def show(path: Path) -> bool:
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
