"""`graph`: TensorFlow's `tf.function` without AutoGraph.

AutoGraph rewrites the source of all that a function calls, also of Keras's layers, so that Python's `if` and
`while` may depend on tensors. That takes seconds at the start of every process, and almost nothing here needs
it: the two loops over gradient steps do, which are plain `tf.function`s and leave out what they call.
"""

from __future__ import annotations

import functools

import tensorflow as tf

graph = functools.partial(tf.function, autograph=False)
"""Compiles a function of tensors, as `tf.function` does, with its arguments; also a decorator."""

not_inlined = functools.partial(graph, experimental_attributes={"_noinline": True})
"""Compiles a function, as `graph` does, that stays a graph of its own within the loops that call it.

For gradients of image networks on CPUs. Within a loop whose turns hang on each other, as gradient steps do,
TensorFlow 2.21 takes oneDNN's gradient of max pooling only where it comes upon the pooling first, which the
addresses of nodes decide: in about one start of a hundred it takes Eigen's, and the two do not round alike.
"""
