"""Learners without the outer loop: a session of one process, no folder, no display. Imports TensorFlow."""

import importlib
import types

import numpy as np
import tensorflow as tf

from tfrl.cli.endings import StopRequest
from tfrl.networks.actor_critic import ActorCritic
from tfrl.run import loop
from tfrl.run.console import Console
from tfrl.run.session import Session
from tfrl.training.on_policy import OnPolicyLearner
from tfrl.workers import strategy
from tfrl.workers.watchdog import Watchdog

_AGENTS = {
    "ppo": "PPOAgent",
    "reinforce": "ReinforceAgent",
    "drac": "DrACAgent",
    "daac": "DAACAgent",
    "ppg": "PPGAgent",
    "impala": "ImpalaAgent",
    "impact": "IMPACTAgent",
}
_AGENTS |= {name: f"{name.upper()}Agent" for name in ("dqn", "ddpg", "td3", "sac", "bc", "iql", "cql")}
_AGENTS["td3_bc"] = "TD3BCAgent"


class Stepwise(OnPolicyLearner):
    """Counts its updates itself, also those that a test takes in two parts, and keeps the last rollout."""

    def collect(self):
        self.rollout = super().collect()
        return self.rollout

    def learn(self, rollout):
        metrics = super().learn(rollout)
        self.session.step += 1
        return metrics

    def update(self):
        done = super().update()
        self.session.step -= 1  # counted there, too
        return done


def make(config, kind=OnPolicyLearner):
    """The learner of these settings, with its session as `session`."""
    runtime = strategy.make(config, None)
    stop = StopRequest(config.run_dir / "stop")
    watchdog = Watchdog(config.run_dir / "heartbeats", ("here",), 0, stall_timeout=0.0)
    session = Session(config, runtime, Console(enabled=False), stop, watchdog)
    learner = kind(config, session, _agent_class(config.algorithm))
    learner.session = session
    return learner


def updated(learner, updates):
    """The metrics of some updates, without times, and the weights after them."""
    history = []
    for _ in range(updates):
        metrics = learner.update()
        history.append({k: v for k, v in metrics.items() if not k.startswith("time/")})
    return history, {name: weight.copy() for name, weight in learner.weights().items()}


def train(config, kind=OnPolicyLearner, callbacks=()):
    """Trains as the algorithm's command does, in this process; the exit code."""
    agent = _agent_class(config.algorithm)
    return run_to_end(config, lambda session: kind(config, session, agent), callbacks)


def run_to_end(config, make_learner, callbacks=()):
    """Trains with the learner of `make_learner`, in this process; the exit code."""
    with loop.open_run(config, None, make_learner, callbacks) as opened:
        return opened.run()


def _agent_class(algorithm):
    return getattr(importlib.import_module(f"tfrl.algorithms.{algorithm}"), _AGENTS[algorithm])


class Present:
    """An agent's network by the agent's present weights, as an oracle sees it from outside."""

    def __init__(self, agent):
        self.agent, self.network, self._watched = agent, agent.network, None

    @property
    def weights(self):
        return self.agent.learning.weights() if self._watched is None else self._watched

    def __call__(self, observations):
        return self.network.outputs(self.weights, tf.convert_to_tensor(observations))

    def watch(self, tape):
        """Has the tape watch the weights of now, which later calls then use."""
        self._watched = self.agent.learning.weights()
        tape.watch(list(self._watched.values()))

    def gradients(self, tape, loss):
        """Those of a loss in the watched weights, float64 by name."""
        zero = tf.UnconnectedGradients.ZERO
        found = tape.gradient(loss, self._watched, unconnected_gradients=zero)
        return {name: np.float64(g) for name, g in self.network.split(found).items()}


def change(agent, changes):
    """Gives an agent other weights: changes are functions of the present ones, by name."""
    state = agent.get_state()
    state |= {f"weights/{name}": f(state[f"weights/{name}"]) for name, f in changes.items()}
    agent.set_state(state)


def prefer(agent):
    """Gives the policy preferences: where it is uniform, the entropy has no gradient."""
    change(agent, {"actor/head/kernel": lambda kernel: 100 * kernel})


def build_actor_critic(*, observation_spec, action_spec, precision="float32", **changes):
    """PPO's network for these specs, with `changes` of its settings."""
    settings = {
        "torso": "cookbook",
        "torso_options": {},
        "small_network": False,
        "critic_torso": None,
        "hidden_options": {},
        "share_torso": True,
        "free_deviation": False,
        "normalize_observations": False,
        "freeze_torso": False,
        "memory": "none",
        "seed": 1,
    }
    config = types.SimpleNamespace(**settings | changes)
    return ActorCritic(config, observation_spec, action_spec, precision)


def initial_arrays(network):
    """The initial weights of a network by NETWORK/LAYER/NAME."""
    return network.split(network.initial())
