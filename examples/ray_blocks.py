"""SAC from blocks on Ray: rollout workers, sharded replay, a sharded parameter server and a learner.

    pip install -r requirements-ray.txt
    python examples/ray_blocks.py                    # --learner-gpus 1 where Ray has a GPU
    python examples/ray_blocks.py --ray-address auto # on an existing Ray

The loop is yours: here the workers collect with the newest weights while the learner learns from everything
that came before. So two runs are not the same bit for bit; `python -m tfrl.sac --actors 2` is.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util

import numpy as np

from tfrl import remote
from tfrl.algorithms.registry import reader
from tfrl.algorithms.sac import SACAgent
from tfrl.cli.errors import how_to_install


def main() -> None:
    """Trains, and prints the mean reward of an env step in each iteration."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--replay-shards", type=int, default=2)
    parser.add_argument("--parameter-shards", type=int, default=2)
    parser.add_argument("--learner-gpus", type=float, default=0)
    parser.add_argument("--ray-address")
    own, flags = parser.parse_known_args()  # all others are those of python -m tfrl.sac
    config = reader("sac").parse(["--num-envs", "4", "--total-steps", "12000", *flags])
    if own.workers < 1 or config.num_envs % own.workers:
        parser.exit(2, f"error: --num-envs {config.num_envs} must be divisible by --workers {own.workers}.\n")
    if own.replay_shards < 1 or own.workers % own.replay_shards:
        shards = f"--replay-shards {own.replay_shards}"
        parser.exit(2, f"error: --workers {own.workers} must be divisible by {shards}.\n")
    if importlib.util.find_spec("ray") is None:
        parser.exit(2, f"error: this example needs Ray, which is not installed: {how_to_install('ray')}\n")
    if own.ray_address:
        remote.reach_other_machines()
    from tfrl.remote.blocks import Learner, ParameterServer, ReplayShard, RolloutWorker  # before ray
    from tfrl.remote.cluster import Cluster, check_gpus, ray

    needs = {"--workers": own.workers, "the learner:": 1}
    with contextlib.closing(Cluster(own.ray_address, needs, store_bytes=64 * 2**20)):
        check_gpus("--learner-gpus", own.learner_gpus)
        learner = Learner.options(num_gpus=own.learner_gpus).remote(SACAgent, config)
        parameters = ParameterServer(own.parameter_shards)
        parameters.put(0, ray.get(learner.weights.remote()))
        noise = ray.get(learner.update_noise.remote())

        # Each worker has a share of the envs, and each shard of the replay some of the workers.
        share, per_shard = config.num_envs // own.workers, own.workers // own.replay_shards
        envs = {w: list(range(w * share, (w + 1) * share)) for w in range(own.workers)}
        groups = [range(s * per_shard, (s + 1) * per_shard) for s in range(own.replay_shards)]
        replay = [ReplayShard.remote(config, {w: envs[w] for w in group}, noise) for group in groups]
        workers = [RolloutWorker.remote(w, config, envs[w], parameters, replay[w // per_shard]) for w in envs]

        gradient_steps, batches = 0, config.max_gradient_steps_per_call
        for iteration in range(config.num_updates):
            playing = [worker.collect.remote(iteration) for worker in workers]
            metrics: dict[str, float] = {}
            while gradient_steps + batches <= config.gradient_steps_due(iteration * config.iteration_steps):
                drawn = [shard.sample.remote(gradient_steps, batches) for shard in replay]
                metrics = ray.get(learner.learn.remote(iteration, *drawn))
                gradient_steps += batches
            parameters.put(iteration + 1, ray.get(learner.weights.remote()))
            reward = np.mean([played.rewards for played in ray.get(playing)])
            loss = f", critics' loss {metrics['train/q_loss']:.3g}" if metrics else ""
            print(f"{(iteration + 1) * config.iteration_steps:,} env steps: mean reward {reward:.2f}{loss}")
    print(f"{gradient_steps:,} gradient steps, version {iteration + 1} of the weights")


if __name__ == "__main__":
    main()
