# ruff: noqa: E501 - a fault is easier to read in one line
"""python -m benchmarks.mutants [WORDS]: small faults put into the core one by one, each to be found by tests.

For each fault it copies the project, changes one place, and runs the tests that should see it. It prints the
faults that no test has found, and ends with 1 if there are any. WORDS choose the faults whose names have one
of them. The whole list takes about a quarter of an hour on two cores.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
_PATIENCE = 900  # seconds of the tests of one fault


class Mutant(NamedTuple):
    """A fault.

    Attributes:
      name: what is wrong, in words.
      path: the file.
      old, new: the text that is changed, which the file has once, and what takes its place.
      tests: files of tests, one of which should fail; with `::NAME`, one test.
    """

    name: str
    path: str
    old: str
    new: str
    tests: str


_RETURNS, _LOSSES, _Q = "tfrl/ops/returns.py", "tfrl/ops/losses.py", "tfrl/ops/q_learning.py"
_PARALLEL, _REPLAY, _NORMALIZE = (
    *("tfrl/workers/data_parallel.py", "tfrl/experience/replay.py", "tfrl/experience/normalize.py"),
)
_PPO, _SAC, _OPTIMIZERS = "tfrl/algorithms/ppo.py", "tfrl/algorithms/sac.py", "tfrl/ops/optimizers.py"
_DISTRIBUTIONS, _CHECKPOINT = "tfrl/networks/distributions.py", "tfrl/run/checkpoint.py"
_TEST_PARALLEL, _TEST_PPO = "tests/workers/test_data_parallel.py", "tests/agents/test_ppo.py"
_TEST_REPLAY, _TEST_AGENT = "tests/experience/test_replay.py", "tests/agents/test_replay_agent.py"
_TEST_NORMALIZE, _TEST_RETURNS = "tests/experience/test_normalize.py", "tests/ops/test_returns.py"
_TEST_LOSSES, _TEST_Q = "tests/ops/test_losses.py", "tests/ops/test_q_learning.py"
_TEST_DISTRIBUTIONS, _TEST_CHECKPOINT = "tests/networks/test_distributions.py", "tests/run/test_checkpoint.py"

MUTANTS = (
    Mutant("GAE: sign of the value", _RETURNS, "(values, last_value) - values\n", "(values, last_value) + values\n", _TEST_RETURNS),
    Mutant("GAE: lambda twice", _RETURNS, "now[0] + lam * now[1] * later", "now[0] + lam * lam * now[1] * later", _TEST_RETURNS),
    Mutant("GAE: an episode's end is not seen", _RETURNS, "gamma * (1.0 - tf.cast(first, rewards.dtype))", "gamma * (1.0 - 0.0 * tf.cast(first, rewards.dtype))", _TEST_RETURNS),
    Mutant("GAE: no bootstrap of a truncated episode", _RETURNS, "rewards + gamma * final_values", "rewards + 0.0 * final_values", _TEST_RETURNS),
    Mutant("V-trace: rho is not clipped", _RETURNS, "tf.minimum(ratios, rho_bar), lam", "ratios, lam", _TEST_RETURNS),
    Mutant("V-trace: a gradient flows", _RETURNS, "tf.stop_gradient(x) for x", "x for x", _TEST_RETURNS),
    Mutant("PPO: the larger of both surrogates", _LOSSES, "-tf.minimum(ratio * advantage", "-tf.maximum(ratio * advantage", _TEST_LOSSES),
    Mutant("PPO: the value's clip takes the smaller error", _LOSSES, "tf.maximum(value_error(value, target)", "tf.minimum(value_error(value, target)", _TEST_LOSSES),
    Mutant("policy gradient: the advantage has a gradient", _LOSSES, "log_prob * tf.stop_gradient(advantage)", "log_prob * advantage", _TEST_LOSSES),
    Mutant("PPG: the KL the wrong way round", "tfrl/algorithms/ppg.py", "losses.categorical_kl(old_logits, logits)", "losses.categorical_kl(logits, old_logits)", "tests/agents/test_ppg.py"),
    Mutant("DrAC: the true side moves, too", "tfrl/algorithms/drac.py", "value_error(augmented_values, tf.stop_gradient(values))", "value_error(augmented_values, values)", "tests/agents/test_drac.py"),
    Mutant("Q-learning: the target has a gradient", _Q, "tf.stop_gradient(reward + discount * next_value)", "reward + discount * next_value", _TEST_Q),
    Mutant("double DQN: the target network chooses", _Q, "taken_q(next_q, tf.argmax(next_q_online, axis=-1))", "taken_q(next_q, tf.argmax(next_q, axis=-1))", _TEST_Q),
    Mutant("n-step: one reward too many", _Q, "        going &= ~first[..., k]\n", "", _TEST_Q),
    Mutant("n-step: a truncation counts as an end", _Q, "first[..., k] & ~truncated[..., k]", "first[..., k]", _TEST_Q),
    Mutant("SAC: the mean of both critics", _Q, "tf.reduce_min(qs, axis=0)", "tf.reduce_mean(qs, axis=0)", _TEST_Q),
    Mutant("SAC: sign of the entropy", _Q, "axis=0) - alpha * log_prob", "axis=0) + alpha * log_prob", _TEST_Q),
    Mutant("SAC: the target by the present critics", _SAC, 'self.network.qs(weights, TARGET, rows["next_observation"], actions)', 'self.network.qs(weights, "", rows["next_observation"], actions)', _TEST_AGENT),
    Mutant("TD3: the noise of target actions is not clipped", _Q, "tf.clip_by_value(scale * noise, -clip, clip)", "scale * noise", _TEST_Q),
    Mutant("dueling: the mean advantage stays", _Q, " - tf.reduce_mean(advantages, axis=-1, keepdims=True)", "", _TEST_Q),
    Mutant("target networks: tau the other way", _Q, "(1.0 - tau) * target + tau * source", "tau * target + (1.0 - tau) * source", _TEST_Q),
    Mutant("DQN: the double estimate takes the present values", "tfrl/algorithms/dqn.py", 'q_of(weights[TARGET + "q"], following)', 'q_of(weights["q"], following)', _TEST_AGENT),
    Mutant("Adam: the mean is not corrected", _OPTIMIZERS, "(mean / corrections[0])", "mean", "tests/ops/test_optimizers.py"),
    Mutant("Adam: epsilon where Keras has none", _OPTIMIZERS, "corrections[0] * mean / (tf.sqrt(square) + self.epsilon)", "corrections[0] * mean / tf.sqrt(square + self.epsilon)", "tests/ops/test_optimizers.py"),
    Mutant("gradient step: divided by the local batch", _PARALLEL, "tf.reduce_sum(losses) / step.batch_size", "tf.reduce_mean(losses)", _TEST_PARALLEL),
    Mutant("gradient step: each vector by its own norm", _PARALLEL, "if step.max_norm is not None and step.clips_each", "if step.max_norm is not None", _TEST_PARALLEL),
    Mutant("gradient step: not clipped", _PARALLEL, "tf.clip_by_global_norm(gradients, step.max_norm, use_norm=norm)", "gradients, norm", _TEST_PARALLEL),
    Mutant("gradient step: parts in a chain", _PARALLEL, "    while parts.shape[0] > 1:\n", "    while parts.shape[0] > 2:\n", _TEST_PARALLEL),
    Mutant("gradient step: rates are swapped", _PARALLEL, "zip(values, gradients, step.rates, strict=True)", "zip(values, gradients, step.rates[::-1], strict=True)", _TEST_PARALLEL + " " + _TEST_PPO),
    Mutant("checkpoint: an optimizer's slot is missing", _PARALLEL, "return {name: variable.numpy() for name, variable in self.variables.items()}", 'return {name: variable.numpy() * (not name.endswith("mean")) for name, variable in self.variables.items()}', _TEST_PARALLEL + " " + _TEST_PPO),
    Mutant("PPO: advantages are not centred", _PPO, "(samples.advantages - self._weighted(baseline, samples)) / (deviation + 1e-8)", "samples.advantages / (deviation + 1e-8)", _TEST_PPO),
    Mutant("PPO: moments of one replica's samples", _PPO, "of_targets, of_errors, of_advantages, weight = sum_replicas(sums)", "of_targets, of_errors, of_advantages, weight = sums", _TEST_PPO),
    Mutant("PPO: the KL stop is one replica's", _PPO, 'metrics["approx_kl"] > target_kl', 'metrics["clip_fraction"] > target_kl', _TEST_PPO),
    Mutant("rewards: the returns go on after an episode", _NORMALIZE, "                running = np.where(first[t], 0.0, running)\n", "                pass\n", _TEST_NORMALIZE),
    Mutant("rewards: not clipped", _NORMALIZE, "np.clip(rewards / deviations[:, None], -_CLIP, _CLIP)", "rewards / deviations[:, None]", _TEST_NORMALIZE),
    Mutant("rewards: a restored run forgets its moments", _NORMALIZE, '        self._count, self._mean, self._variance = map(float, state["moments"])\n', "        pass\n", _TEST_NORMALIZE),
    Mutant("replay: the next episode's first observation", _REPLAY, "            after[k, i, j] = self._finals[int(last[k, i, j]), int(i)]\n", "            pass\n", _TEST_REPLAY),
    Mutant("replay: the newest row is never drawn", _REPLAY, "count = len(self) - self._n_step + 1\n", "count = len(self) - self._n_step\n", _TEST_REPLAY),
    Mutant("replay: half a window is drawn", _REPLAY, "            tree.set(gone, 0.0)\n", "", _TEST_REPLAY),
    Mutant("replay: weights the other way", _REPLAY, "/ least) ** -beta)", "/ least) ** beta)", _TEST_REPLAY),
    Mutant("replay: a shard is left out", _REPLAY, "        for shard in self._shards:  #", "        for shard in self._shards[1:]:  #", _TEST_REPLAY),
    Mutant("discrete actions: the last is never drawn", "tfrl/networks/numpy_policy.py", "return parameters.argmax(axis=1)", "return parameters[:, :-1].argmax(axis=1)", _TEST_AGENT + " " + _TEST_DISTRIBUTIONS),
    Mutant("continuous actions: no correction of tanh", _DISTRIBUTIONS, "self._log_normal(standard) - (above + below)", "self._log_normal(standard)", _TEST_DISTRIBUTIONS),
    Mutant("continuous actions: entropy of the normal", _DISTRIBUTIONS, "(LOG_SQRT_2_PI + 0.5) + correction", "(LOG_SQRT_2_PI + 0.5)", _TEST_DISTRIBUTIONS),
    Mutant("IMPACT: the ratio is not bounded", "tfrl/algorithms/impact.py", "np.maximum(log_probs, acted - np.float32(math.log(self._config.target_bound)))", "log_probs", "tests/agents/test_impact.py"),
    Mutant("IMPACT: V-trace without its ratios", "tfrl/algorithms/impact.py", "_LOG_RATIO: log_probs - acted", "_LOG_RATIO: 0 * acted", "tests/agents/test_impact.py"),
    Mutant("IMPACT: the KL with the bound", "tfrl/algorithms/impact.py", "- samples.log_probs + raised", "- samples.log_probs", "tests/agents/test_impact.py"),
    Mutant("IMPACT: the values of the policy that acted", "tfrl/algorithms/impact.py", '"log_prob": old, "value": values}', '"log_prob": old}', "tests/agents/test_impact.py"),
    Mutant("IMPALA: neighbours in place of every n-th env", "tfrl/algorithms/impala.py", "index + config.num_minibatches * tf.range(rows)", "index * rows + tf.range(rows)", "tests/agents/test_impala.py"),
    Mutant("checkpoint: the damaged one is taken", _CHECKPOINT, 'if _sha256(data) != entry["sha256"]', 'if not _sha256(data)', _TEST_CHECKPOINT),
)  # fmt: skip


def survives(mutant: Mutant) -> bool:
    """True if the tests pass in spite of the fault."""
    with tempfile.TemporaryDirectory(prefix="mutant") as name:
        copy = Path(name)
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
        for file in listed.stdout.splitlines():
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / file, copy / file)
        (copy / mutant.path).write_text(mutated(mutant))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            *mutant.tests.split(),
        ]
        environ = {**os.environ, "PYTHONPATH": name, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=copy, env=environ, capture_output=True, timeout=_PATIENCE)
        if done.returncode not in (0, 1):
            raise RuntimeError(f"{mutant.name}: the tests did not run:\n{done.stdout.decode()[-3000:]}")
        return done.returncode == 0


def mutated(mutant: Mutant) -> str:
    """The file with the fault. Raises ValueError where it does not have the text exactly once."""
    text = (ROOT / mutant.path).read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.path} has {text.count(mutant.old)} times: {mutant.old!r}")
    return text.replace(mutant.old, mutant.new)


def main(words: list[str]) -> int:
    """Runs the faults whose names have one of the words; returns the exit code."""
    chosen = [one for one in MUTANTS if not words or any(word in one.name for word in words)]
    survivors = []
    for number, mutant in enumerate(chosen, 1):
        survived = survives(mutant)
        survivors += [mutant.name] if survived else []
        print(f"{number:2}/{len(chosen)} {'SURVIVES' if survived else 'found   '} {mutant.name}", flush=True)
    print(f"{len(survivors)} of {len(chosen)} survive{': ' if survivors else '.'}{'; '.join(survivors)}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
