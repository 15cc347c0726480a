"""Keeps TensorFlow's start-up noise off the user's screen, and nothing else."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

# Information and warnings of TensorFlow's C++ log, and what it says where there is no NVIDIA driver.
_NOISE = re.compile(
    rb"^(WARNING: All log messages before absl::InitializeLog|[IW]\d{4} \d\d:|\d{4}-\d\d-\d\d .*: [IW] )"
    rb"|failed call to cuInit|cudart_stub"
)


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Holds back what is written to stderr inside, and lets through all of it that is not known noise.

    Some lines come before TF_CPP_MIN_LOG_LEVEL is read, so they have to be caught at the file descriptor.
    """
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            held.seek(0)
            for line in held.read().splitlines(keepends=True):
                if not _NOISE.search(line):
                    os.write(2, line)
