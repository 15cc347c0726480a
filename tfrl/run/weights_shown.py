"""Callbacks that show the weights and the graphs of the networks in TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tfrl.cli.settings import Settings
from tfrl.ops.graph import graph, tf
from tfrl.run.callbacks import Callback, RunOfCallback
from tfrl.run.session import Session

if TYPE_CHECKING:
    import keras


def of_run(
    config: Settings, session: Session, models: Callable[[], Mapping[str, keras.Model]]
) -> list[Callback]:
    """The callbacks of --histograms-every and --tensorboard-graph. `models` gives the networks by name."""
    found: list[Callback] = []
    if config.histograms_every:
        found.append(Histograms(config.histograms_every, session))
    if config.tensorboard_graph:
        found.append(Graph(models(), session))
    return found


class Histograms(Callback):
    """Writes histograms and images of the weights at the start of a run, and every some updates."""

    def __init__(self, every: int, session: Session) -> None:
        self._every, self._session, self._before = every, session, 0

    def on_start(self, run: RunOfCallback) -> None:
        """Writes the initial weights of a new run."""
        self._before = run.updates
        if not run.updates:
            self._session.writer.weights(run.env_steps, run.weights())

    def on_update(self, run: RunOfCallback, metrics: dict[str, float]) -> None:
        """Writes the weights if a multiple of the interval has been reached."""
        before, self._before = self._before, run.updates
        if run.updates // self._every > before // self._every:
            self._session.writer.weights(run.env_steps, run.weights())


class Graph(Callback):
    """Writes the graph of the networks at the start of a run."""

    def __init__(self, models: Mapping[str, keras.Model], session: Session) -> None:
        self._models, self._session = models, session

    def on_start(self, run: RunOfCallback) -> None:
        """Traces the networks, on the chief of a new run."""
        if run.is_chief and not run.updates:
            self._session.writer.graph(graph_of(self._models))


def graph_of(models: Mapping[str, keras.Model]) -> bytes:
    """A serialized GraphDef of the forward passes of all models, each in a scope of its name."""

    def forward(*inputs: tf.Tensor) -> list[tf.Tensor]:
        rest, outputs = list(inputs), []
        for name, model in models.items():
            count = len(model.inputs)
            mine, rest = rest[:count], rest[count:]
            with tf.name_scope(name):
                outputs += tf.nest.flatten(model(mine if count > 1 else mine[0]))
        return outputs

    inputs = [
        tf.TensorSpec(tensor.shape, tensor.dtype, f"{name}_{tensor.name.partition(':')[0]}")
        for name, model in models.items()
        for tensor in model.inputs
    ]
    traced = graph(forward).get_concrete_function(*inputs)
    return traced.graph.as_graph_def(add_shapes=True).SerializeToString()
