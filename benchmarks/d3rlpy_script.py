"""python d3rlpy_script.py ALGORITHM SET.npz SEED GRADIENT_STEPS: d3rlpy beside `benchmarks.learning_offline`.

It needs d3rlpy 2.8 and Gymnasium, and nothing of this project. The settings are d3rlpy's own defaults, which
are ours too; behaviour cloning has our batch size, and a stochastic policy as ours. CQL has the learning
rates of `learning_offline`, and twice its weight, because its squared errors are not halved. The last line
that it prints is JSON: the returns of 100 episodes of the most likely actions, and the gradient steps a
second.
"""

import json
import sys
import time

import d3rlpy
import gymnasium
import numpy as np

scaler = d3rlpy.preprocessing.MinMaxActionScaler(minimum=np.array([-2.0]), maximum=np.array([2.0]))
ALGORITHMS = {
    "bc": d3rlpy.algos.BCConfig(batch_size=256, policy_type="stochastic", action_scaler=scaler),
    "iql": d3rlpy.algos.IQLConfig(action_scaler=scaler),
    "td3_bc": d3rlpy.algos.TD3PlusBCConfig(action_scaler=scaler),
    "cql": d3rlpy.algos.CQLConfig(
        action_scaler=scaler,
        actor_learning_rate=1e-3,
        critic_learning_rate=1e-3,
        temp_learning_rate=1e-3,
        conservative_weight=2.0,
    ),
}

name, path, seed, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
d3rlpy.seed(seed)
with np.load(path) as arrays:
    dataset = d3rlpy.dataset.MDPDataset(**arrays)
algorithm = ALGORITHMS[name].create(device="cpu:0")
algorithm.build_with_dataset(dataset)
begin = time.perf_counter()
algorithm.fit(
    dataset,
    n_steps=steps,
    n_steps_per_epoch=steps,
    show_progress=False,
    logger_adapter=d3rlpy.logging.NoopAdapterFactory(),
)
rate = steps / (time.perf_counter() - begin)
env = gymnasium.make("Pendulum-v1")
returns = []
for episode in range(100):
    observation, _ = env.reset(seed=10_000 + episode)
    total, ended = 0.0, False
    while not ended:
        action = algorithm.predict(observation[None].astype(np.float32))[0]
        observation, reward, terminated, truncated, _ = env.step(action)
        total, ended = total + float(reward), terminated or truncated
    returns.append(total)
print(json.dumps({"returns": returns, "steps_per_second": rate}))
