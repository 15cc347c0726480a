"""TensorFlow imported late, and `tf.function` without AutoGraph.

Importing TensorFlow takes seconds. An algorithm's file has its settings beside its losses, and `--help` and
errors in settings must not wait for it. So `tf` here is a module that is imported at its first use.

AutoGraph rewrites the source of all functions that a function calls, including Keras's layers, so that
Python's `if` and `while` may depend on tensors. This takes seconds at the start of every process. Only the
two loops over gradient steps need it, and they exclude the functions that they call.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
from collections.abc import Callable, Iterator
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


_for_xla = contextvars.ContextVar("for_xla", default=False)


def graph(function: Callable[..., Any], **options: Any) -> Any:
    """Compiles a function of tensors; `options` are those of `tf.function`."""
    if options.get("jit_compile"):
        function = _traced_for_xla(function)
    return tf_function(function, **{"autograph": False, **options})


def tf_function(function: Callable[..., Any], **options: Any) -> Any:
    """`tf.function` without TensorFlow's warning that calls triggered tf.function retracing.

    TensorFlow counts the traces of a method of all agents together, and each run of a program has its own
    agent. A filter of the log (`tfrl.cli.streams`) would also remove the warnings of the user's functions.
    """
    made = tf.function(function, **options)
    made._omit_frequent_tracing_warning = True  # as TensorFlow's loaded functions have it; no public switch
    return made


def is_for_xla() -> bool:
    """True while a function is traced that `graph` compiles by XLA."""
    return _for_xla.get()


def _traced_for_xla(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def traced(*arguments: Any, **named: Any) -> Any:
        token = _for_xla.set(True)
        try:
            return function(*arguments, **named)
        finally:
            _for_xla.reset(token)

    return traced


def not_inlined(function: Callable[..., Any]) -> Any:
    """Compiles a function that stays a graph of its own within the loops that call it.

    For gradients that XLA does not compile, on CPUs. In a loop over gradient steps, TensorFlow 2.21 uses
    oneDNN's gradient of max pooling only if it visits the pooling first, and the memory addresses of graph
    nodes decide that. About one process in a hundred uses Eigen's gradient, which rounds differently.
    """
    return graph(function, experimental_attributes={"_noinline": True})


@contextlib.contextmanager
def asynchronous() -> Iterator[None]:
    """A context in which this thread's calls of TensorFlow return at once. Reading a result waits for it."""
    before = tf.config.experimental.get_synchronous_execution()
    tf.config.experimental.set_synchronous_execution(False)
    try:
        yield
    finally:
        tf.config.experimental.set_synchronous_execution(before)


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorates a method: `graph` compiles it with these `options` at its first use."""
    return lambda function: functools.cached_property(lambda self: graph(function.__get__(self), **options))
