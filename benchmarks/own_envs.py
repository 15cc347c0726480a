"""The cost of own envs: a callable beside the same env by its id, and slow envs in processes, by turns."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Annotated

import gymnasium
import numpy as np

import tfrl
from benchmarks import command
from tfrl.cli.flags import COUNT
from tfrl.envs import registry
from tfrl.envs.spec import EnvSpec


@dataclass(frozen=True)
class Options:
    """The measurement."""

    rounds: Annotated[int, COUNT] = 5
    """Rounds, each with both variants by turns; the medians over the rounds are shown."""
    total_steps: Annotated[int, COUNT] = 50_000
    """Env steps of each training run."""
    vector_steps: Annotated[int, COUNT] = 200
    """Steps of the vector of slow envs."""


def make_cartpole() -> gymnasium.Env:
    """CartPole with the wrappers of `gymnasium.make`."""
    return gymnasium.make("CartPole-v1")


class FiveMilliseconds(gymnasium.Env):
    """Sleeps 5 ms at each step."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        """Begins an episode, which never ends."""
        return np.zeros(4, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Sleeps."""
        time.sleep(0.005)
        return np.zeros(4, np.float32), 1.0, False, False, {}


def training_seconds(env: str, steps: int) -> float:
    """CPU seconds of training PPO: others may have the machine, too."""
    with tempfile.TemporaryDirectory() as logdir:
        began = time.process_time()
        tfrl.train("ppo", env=env, total_steps=steps, eval_episodes=1, logdir=logdir)
        return time.process_time() - began


def stepping_rate(num_envs: int, processes: int, steps: int) -> float:
    """Env steps a second of the slow env."""
    spec = EnvSpec("benchmarks.own_envs:FiveMilliseconds", num_envs=num_envs, seed=1, num_processes=processes)
    env = registry.make(spec)
    actions = np.zeros(num_envs, np.int32)
    env.act(actions)
    env.observe()
    began = time.perf_counter()
    for _ in range(steps):
        env.act(actions)
        env.observe()
    rate = num_envs * steps / (time.perf_counter() - began)
    env.close()
    return rate


def main(options: Options) -> None:
    """Prints the ratios."""
    rates = [
        (stepping_rate(1, 0, options.vector_steps), stepping_rate(8, 8, options.vector_steps))
        for _ in range(options.rounds)
    ]
    one, eight = (statistics.median(column) for column in zip(*rates, strict=True))
    training_seconds("CartPole-v1", 2048)  # TensorFlow's import, and traces
    names = ("CartPole-v1", "benchmarks.own_envs:make_cartpole")
    pairs = []
    for k in range(options.rounds):
        pair = {name: training_seconds(name, options.total_steps) for name in names[:: 1 if k % 2 else -1]}
        pairs.append(pair[names[1]] / pair[names[0]])
    print(f"5 ms a step: one env {one:.0f} steps/s, 8 in 8 processes {eight:.0f}: {eight / one / 8:.3f} x 8")
    print(f"a callable against its id: {statistics.median(pairs):.3f} of the CPU time ({sorted(pairs)})")


if __name__ == "__main__":
    command.run(Options, main)
