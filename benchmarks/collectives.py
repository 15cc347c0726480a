"""One worker of `benchmarks.scaling`: times all-reduces of many sizes over the real workers of TF_CONFIG."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

from tfrl.algorithms.ppo import Config
from tfrl.cli.streams import quiet_start
from tfrl.workers import strategy, tf_config

SIZES = (1, 1 << 10, 1 << 14, 1 << 16, 1 << 18, 626_256, 1 << 20, 1 << 21)  # float32 numbers
REPEATS = 15


def main(output: Path) -> None:
    """Writes {bytes: [seconds, ...]} as JSON, from the chief."""
    cluster = tf_config.read()
    with quiet_start():
        runtime = strategy.make(Config(), cluster)
    times = {4 * size: [time_all_reduce(runtime, size) for _ in range(REPEATS)] for size in SIZES}
    if runtime.is_chief:
        output.write_text(json.dumps(times))
        best = {size: statistics.median(seconds) for size, seconds in times.items()}
        print(best)
    runtime.all_agree(True)


def time_all_reduce(runtime: strategy.Runtime, num_floats: int) -> float:
    """The seconds of one all-reduce of float32 values over all replicas. A collective."""
    values = runtime.per_replica([np.zeros(num_floats, np.float32)] * runtime.local_replicas)
    runtime._sum(values)  # traced, and connected
    runtime.all_agree(True)  # so that none counts its waiting for another
    began = time.perf_counter()
    runtime.first(runtime._sum(values)).numpy()
    return time.perf_counter() - began


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="JSON file for the chief's times")
    main(parser.parse_args().output)
