"""TensorFlow as a module that is imported when it is first used.

Importing TensorFlow takes seconds. An algorithm's file has its settings beside its losses, and `--help` or a
bad setting must be answered at once.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any


class _Lazy(ModuleType):
    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self.__name__), name)
        self.__dict__[name] = value
        return value


if TYPE_CHECKING:
    import tensorflow as tf
else:
    tf = _Lazy("tensorflow")

__all__ = ["tf"]
