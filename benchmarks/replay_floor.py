"""The cost of learning from replay without its loop: SAC's update, and storing and sampling transitions.

In seconds of processor time of one process each, so that other work on the machine matters less; SAC's update
by the wall clock, too, where a quiet machine lets it have all cores.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks import command
from benchmarks.update_floor import adam, apply, layers
from tfrl.algorithms import registry as settings
from tfrl.cli.streams import quiet_start
from tfrl.envs import registry
from tfrl.envs.spec import Step
from tfrl.workers import machine

_LOOP = 32  # gradient steps of a call
_SAC = ("--preset", "cleanrl", "--env", "InvertedDoublePendulum-v5", "--precision", "float32")


def update_rates(seconds: float, *, by_wall: bool) -> dict[str, float]:
    """SAC's gradient steps a second: the trainer's, and plain TensorFlow's as a graph and by XLA."""
    code = "from benchmarks.replay_floor import measure as f; "
    ways = ("trainer", "graph", "XLA")
    return {way: float(command.answer(f"{code}print(f({way!r}, {seconds}, {by_wall}))")) for way in ways}


def measure(way: str, seconds: float, by_wall: bool) -> float:
    """Gradient steps in a second, the median of as many calls of 32 as fit into `seconds`, 3 at least.

    Args:
      way: trainer, graph or XLA.
      seconds: of measuring.
      by_wall: by the wall clock, with all cores for each way; otherwise by processor time, and plain
        TensorFlow has one thread.
    """
    clock = time.perf_counter if by_wall else time.process_time
    config = settings.reader("sac").parse([*_SAC, "--train-every", str(_LOOP)])
    threads = machine.cores() if by_wall else 1
    call = _agent(config) if way == "trainer" else _plain(config, compiled=way == "XLA", threads=threads)
    call()
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = clock()
        call()
        times.append(clock() - start)
    return _LOOP / float(np.median(times))


def replay_seconds(algorithm: str, flags: Sequence[str], steps: int = 5000) -> dict[str, float]:
    """CPU seconds of storing an env step, and of drawing what is learned after it, by a replay of its own."""
    with quiet_start():
        from tfrl.experience.replay import ReplayBuffer

    config = settings.reader(algorithm).parse(flags)
    observation, action = registry.specs(config)
    rows = min(100_000, config.replay_size)
    replay = ReplayBuffer([0], rows, observation=observation, action=action, gamma=config.gamma)
    shown = Step(
        *(np.ones(1, np.float32), np.ones((1, *observation.shape), observation.dtype)),
        *(np.zeros(1, bool), np.zeros(1, bool), None),
    )
    taken = np.zeros((1, *action.shape), action.dtype)
    stored = _cpu_seconds(steps, lambda: (replay.act(taken), replay.show(shown)))
    generator = np.random.default_rng(0)
    drawn = _cpu_seconds(steps // 10, lambda: replay.sample([generator], 1, config.batch_size))
    return {"storing": stored, "sampling": drawn * config.updates_per_step}


def _cpu_seconds(times: int, function: Callable[[], Any]) -> float:
    start = time.process_time()
    for _ in range(times):
        function()
    return (time.process_time() - start) / times


def _agent(config: Any) -> Callable[[], Any]:
    """The update of the trainer's own agent, its rows as the replay gives them."""
    from tfrl.algorithms.sac import SACAgent
    from tfrl.experience.replay import Batch
    from tfrl.workers import strategy

    agent = SACAgent(config, strategy.make(config, None))
    o, a, r, d, o2, noise = _rows(config)
    ones = np.ones(r.shape, np.float32)
    one_env = [x[:, None] for x in (o, a, r, d, o2, ones, ones.astype(np.int64), noise)]
    batch = Batch(*one_env[:-1])
    noise = one_env[-1]
    begin = functools.partial(agent.begin_gradient_steps, steps_done=0, count=_LOOP, iteration=0)
    return lambda: begin(batch, noise).wait()


def _rows(config: Any) -> list[np.ndarray]:
    """Observations, actions, rewards, discounts, next observations and noise, [32, rows, ...] each."""
    observation, action = registry.specs(config)
    generator, shape = np.random.default_rng(0), (_LOOP, config.batch_size)
    sizes = (*observation.shape, *action.shape, None, None, *observation.shape, 2 * action.shape[0])
    found = [generator.normal(size=shape if n is None else (*shape, n)).astype(np.float32) for n in sizes]
    found[1], found[3] = np.tanh(found[1]), np.full(shape, config.gamma, np.float32)
    return found


def _plain(config: Any, *, compiled: bool, threads: int) -> Callable[[], Any]:
    """The same in plain TensorFlow: no replicas, no parts, no metrics."""
    import tfrl  # noqa: F401 - sets what TensorFlow reads at import

    import tensorflow as tf  # isort: skip

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    rows = [tf.constant(x) for x in _rows(config)]
    dimensions = rows[1].shape[-1]
    hidden = [int(units) for units in config.hidden.split(",")]
    generator, inputs = np.random.default_rng(1), rows[0].shape[-1]
    actor = layers(tf, generator, [inputs, *hidden, 2 * dimensions])
    critics, slow = ([layers(tf, generator, [inputs + dimensions, *hidden, 1]) for _ in "12"] for _ in "ab")
    log_alpha = tf.Variable(0.0)
    of_critics, of_actor = _all(critics), [*actor, log_alpha]
    learn_critics, learn_actor = adam(tf, config, of_critics), adam(tf, config, of_actor)

    def sample(observations: Any, noise: Any) -> tuple[Any, Any]:
        mean, x = tf.split(apply(tf, actor, observations, tf.nn.relu), 2, axis=1)
        deviation = tf.nn.softplus(x) + 0.01
        actions = tf.tanh(mean + deviation * noise)
        log_prob = -0.5 * noise**2 - tf.math.log(deviation * 2.5066) - tf.math.log(1 - actions**2 + 1e-6)
        return actions, tf.reduce_sum(log_prob, axis=1)

    def qs(nets: Sequence[Any], observations: Any, actions: Any) -> list[Any]:
        both = tf.concat([observations, actions], axis=1)
        return [apply(tf, net, both, tf.nn.relu)[:, 0] for net in nets]

    def step(o: Any, a: Any, r: Any, d: Any, o2: Any, noise: Any, number: Any) -> None:
        actions, log_prob = sample(o2, noise[:, :dimensions])
        alpha = tf.exp(log_alpha)
        target = r + d * (tf.minimum(*qs(slow, o2, actions)) - alpha * log_prob)
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_mean(tf.square(q - target)) for q in qs(critics, o, a)])
        learn_critics(tape.gradient(loss, of_critics), number)
        with tf.GradientTape() as tape:
            actions, log_prob = sample(o, noise[:, dimensions:])
            loss = tf.reduce_mean(alpha * log_prob - tf.minimum(*qs(critics, o, actions)))
            loss -= tf.exp(log_alpha) * tf.stop_gradient(tf.reduce_mean(log_prob) - dimensions)
        learn_actor(tape.gradient(loss, of_actor), number)
        for before, now in zip(_all(slow), _all(critics), strict=True):
            before.assign_add(config.tau * (now - before))

    @tf.function(jit_compile=compiled)
    def update() -> Any:
        for k in tf.range(_LOOP):
            step(*(x[k] for x in rows), tf.cast(k + 1, tf.float32))
        return log_alpha + 0.0

    return lambda: update().numpy()


def _all(*nested: Any) -> list[Any]:
    """The variables of lists and of lists of lists."""
    return [v for one in nested for part in one for v in (part if isinstance(part, list) else [part])]
