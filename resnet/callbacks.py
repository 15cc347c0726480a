"""Keras's callbacks in a supervised run."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tfrl.cli.errors import UserError
from tfrl.envs import callables
from tfrl.run.callbacks import Callback, RunOfCallback

if TYPE_CHECKING:
    import keras

    from resnet.config import Config
    from resnet.learner import ImageLearner

_NOT_STATE = ("_model", "params", "validation_data")  # of a Keras callback
_SCORES = ("loss", "accuracy")


def is_keras_callback(kind: Any) -> bool:
    """True for a class that extends keras.callbacks.Callback. It does not import Keras."""
    bases = kind.__mro__ if isinstance(kind, type) else ()
    return any(base.__name__ == "Callback" and base.__module__.startswith("keras.") for base in bases)


class KerasCallback(Callback):
    """Calls a Keras callback on the chief, as `model.fit` does.

    A row of progress.csv is a batch: --log-every 1 makes each gradient step one. `logs` has loss, accuracy
    and, after an epoch, val_loss, val_accuracy and learning_rate; those of an epoch are means over it. The
    callback's `model` has the present weights when training or an epoch begins or ends. The run obeys
    `model.stop_training` and a changed `model.optimizer.learning_rate`, which replaces --schedule.
    A checkpoint contains the callback's attributes that are JSON values, arrays or functions of modules.

    Raises UserError for a callback that changes the weights.
    """

    def __init__(self, callback: Any) -> None:
        if getattr(callback, "restore_best_weights", False):
            raise UserError(
                "a run takes no weights from a callback: leave restore_best_weights out; "
                "python -m resnet.evaluate RUN --checkpoint best has the best ones."
            )
        self._callback = callback
        self._model: keras.Model | None = None  # of the chief
        self._steps = 0  # the run's at the last row
        self._sums = np.zeros(1 + len(_SCORES))  # steps of the epoch so far, and sums of their scores
        self._logs: dict[str, float] = {}
        self._restored: Mapping[str, Any] | None = None  # attributes from a checkpoint

    def on_start(self, run: RunOfCallback[Config]) -> None:
        """Begins the training, and the first epoch of a new run."""
        learner = _learner(run)
        if run.is_chief:
            self._model = learner.classifier.plain_model(run.weights())
            self._model.compile(run.config.optimizer, "sparse_categorical_crossentropy", ["accuracy"])
            self._callback.set_params(
                {"epochs": learner.epochs, "steps": learner.steps_per_epoch, "verbose": 0}
            )
            self._callback.set_model(self._model)
        begins = not run.updates
        self._call(run, "on_train_begin", {})
        if self._restored is None:  # the run may be older than the callback
            self._steps = run.updates
        else:
            vars(self._callback).update(self._restored)
        if begins:
            self._call(run, "on_epoch_begin", 0, {})

    def on_update(self, run: RunOfCallback[Config], metrics: dict[str, float]) -> None:
        """Ends a batch, and an epoch if there was a test."""
        learner, steps = _learner(run), run.updates - self._steps
        logs = {name: metrics[f"train/{name}"] for name in _SCORES}
        self._steps += steps
        self._sums += [steps, *(steps * value for value in logs.values())]
        epoch, batch = divmod(run.updates - 1, learner.steps_per_epoch)
        self._call(run, "on_train_batch_begin", batch, {}, weights=False)
        self._call(run, "on_train_batch_end", batch, logs, weights=False)
        if "test/accuracy" not in metrics:
            return
        means = (self._sums[1:] / self._sums[0]).tolist()
        self._sums[:] = 0.0
        self._logs = {
            **dict(zip(_SCORES, means, strict=True)),
            **{f"val_{name}": metrics[f"test/{name}"] for name in _SCORES},
            "learning_rate": metrics["train/learning_rate"],
        }
        self._call(run, "on_test_begin", {})
        self._call(run, "on_test_end", {name: metrics[f"test/{name}"] for name in _SCORES})
        self._call(run, "on_epoch_end", epoch, dict(self._logs))
        if not learner.is_over:
            self._call(run, "on_epoch_begin", epoch + 1, {})

    def on_end(self, run: RunOfCallback[Config], results: Mapping[str, Any]) -> None:
        """Ends the training."""
        self._call(run, "on_train_end", dict(self._logs))

    def _call(self, run: RunOfCallback[Config], method: str, *arguments: Any, weights: bool = True) -> None:
        """Calls a method on the chief, and does on all workers what the callback asks for. A collective."""
        from resnet.learner import assign

        learner, model, rate = _learner(run), self._model, math.nan
        if model is not None:
            if weights:
                assign(model, run.weights())
            model.optimizer.learning_rate = shown = np.float32(learner.learning_rate)
            getattr(self._callback, method)(*arguments)
            found = np.float32(model.optimizer.learning_rate)
            rate = math.nan if found == shown else float(found)
            if getattr(model, "stop_training", False):
                run.stop(f"{type(self._callback).__name__} asked for it")
        learner.set_learning_rate(rate)

    def get_state(self) -> dict[str, Any]:
        """The sums of the epoch, and the callback's attributes that can be saved."""
        own = {name: value for name, value in vars(self._callback).items() if name not in _NOT_STATE}
        arrays = {f"own/{name}": value for name, value in own.items() if isinstance(value, np.ndarray)}
        plain = {name: value for name, value in own.items() if _is_json(value)}
        # Keras sets monitor_op together with the sign of min_delta.
        functions = {n: callables.give(f) for n, f in own.items() if isinstance(f, types.FunctionType)}
        functions = {n: f for n, f in functions.items() if callables.is_importable(f)}
        sums = {"steps": self._steps, "sums": self._sums.copy(), "logs": self._logs}
        return {**sums, "own": plain, "functions": functions, **arrays}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from what `get_state` gave; on_train_begin, which follows, would reset the callback."""
        self._steps, self._logs = state["steps"], dict(state["logs"])
        self._sums[:] = state["sums"]
        arrays = {name.removeprefix("own/"): v for name, v in state.items() if name.startswith("own/")}
        functions = {name: callables.find(function) for name, function in state["functions"].items()}
        self._restored = {**state["own"], **functions, **arrays}


def _learner(run: RunOfCallback[Config]) -> ImageLearner:
    """The learner of a supervised run."""
    learner: Any = run.learner
    return learner


def _is_json(value: Any) -> bool:
    """True if JSON gives the same value back, NumPy's numbers aside, which become Python's."""
    try:
        return json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        return False
