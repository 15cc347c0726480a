"""The floor within a run: samples of it between updates and between parts of an auxiliary phase.

Run and floor so see the same machine, also where its speed changes from minute to minute.
"""

from __future__ import annotations

import importlib
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks import floors
from benchmarks.floors import Passes
from tfrl.algorithms.registry import reader

_FORWARD_ROWS = 64
_FORWARDS = 8  # of a sample: a forward pass takes a hundredth of a gradient


class Sample(NamedTuple):
    """One call of a learner's `update`, and the floor right after it.

    Attributes:
      seconds: of the call.
      forward, gradient: seconds a frame, of the network alone.
      ends: whether an update was done with it, an auxiliary phase included.
    """

    seconds: float
    forward: float
    gradient: float
    ends: bool


def measure(
    algorithm: str, flags: Sequence[str], precision: str, each: Sequence[int], updates_at_once: int
) -> str:
    """Trains in this process; env steps a second and those of the floor, as JSON.

    Args:
      algorithm: of the trainer.
      flags: its flags, but for precision and folders.
      precision: of both.
      each: `Passes` of an env step.
      updates_at_once: updates after which the same work begins anew; the first so many do not count.
    """
    from tfrl.run import loop  # TensorFlow

    samples: list[Sample] = []
    passes = Passes(*each)

    def open_run(config: Any, cluster: Any, make_learner: Callable[..., Any], callbacks: Any = ()) -> Any:
        def make(session: Any) -> Any:
            return _sampled(make_learner(session), precision, passes, samples)

        return original(config, cluster, make, callbacks)

    original, loop.open_run = loop.open_run, open_run
    with tempfile.TemporaryDirectory() as logdir:
        main = importlib.import_module(f"tfrl.{algorithm}").main
        main([*flags, "--precision", precision, "--logdir", logdir, "--run-name", "within"])
    env_steps = reader(algorithm).parse(flags).steps_per_update
    found = rates(samples, passes, env_steps, updates_at_once)
    return json.dumps(found, separators=(",", ":"))  # one word


def rates(samples: Sequence[Sample], each: Passes, env_steps: int, skipped: int) -> dict[str, float]:
    """Env steps a second, of the run and of the floor, without the first `skipped` updates.

    The floor's is the mean over the run's time: each sample counts for as long as the call before it took.
    """
    ended, seconds, floor_steps = 0, 0.0, 0.0
    for sample in samples:
        if ended >= skipped:
            seconds += sample.seconds
            cost = each.forwards * sample.forward + each.gradients * sample.gradient
            floor_steps += sample.seconds / cost
        ended += sample.ends
    rate, floor = (ended - skipped) * env_steps / seconds, floor_steps / seconds
    return {"env_steps_per_second": rate, "floor": floor, "ratio_to_floor": rate / floor}


def _sampled(learner: Any, precision: str, each: Passes, samples: list[Sample]) -> Any:
    """The learner, whose updates take a sample after them."""
    update, floor = learner.update, _floor(precision, each)

    def sampled() -> Any:
        began = time.perf_counter()
        done = update()
        seconds = time.perf_counter() - began
        samples.append(Sample(seconds, *floor(), done is not None))
        return done

    learner.update = sampled
    return learner


def _floor(precision: str, each: Passes) -> Callable[[], tuple[float, float]]:
    """A function that measures seconds a frame, of a forward pass and of a gradient."""
    tf, network = floors.build(precision, each.memory)
    forward, gradient = map(tf.function, floors.in_parts(tf, network, each.steps))
    few, many = (tf.constant(floors.frames(n)) for n in (_FORWARD_ROWS, max(floors.rows_at_once(each.steps))))

    def measure() -> tuple[float, float]:
        began = time.perf_counter()
        for _ in range(_FORWARDS):
            forward(few)[1].numpy()
        between = time.perf_counter()
        gradient(many)[0].numpy()
        ended = time.perf_counter()
        return (between - began) / (_FORWARDS * len(few)), (ended - between) / len(many)

    measure()  # traces the graphs
    return measure
