"""Data-regularised actor-critic (Raileanu et al. 2021, arXiv:2006.12862): PPO on two views of a frame.

    L = L_PPO + alpha_r (G_pi + G_V)                                            eq. 6
    G_pi = KL(pi(.|o), pi(.|f(o))),   G_V = 1/2 (V(o) - V(f(o)))^2              eq. 4, 5

G_pi and G_V pull the policy and the value for an augmented observation f(o) to those for the true
observation o, which are constants here. The authors' code estimates G_pi by one sampled action; here it is
exact. Each pass augments each sample anew, with a seed of (run's seed, update, env, time step, pass), so the
augmentation does not depend on the topology or the order. With `--augment ucb` a bandit chooses one
augmentation before every update (UCB-DrAC). Its reward is the mean value target of the first rollout that was
collected after the choice; with `--lag`, this rollout comes some updates later.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np

from tfrl.algorithms import ppo
from tfrl.algorithms.ppo import PPO, PPOAgent, Samples
from tfrl.cli.errors import UserError
from tfrl.cli.flags import NOT_NEGATIVE
from tfrl.config.distributed import DISTRIBUTED_SECTIONS
from tfrl.config.run import NetworkSettings, Task
from tfrl.envs import registry
from tfrl.envs.spec import ActionSpec, Discrete
from tfrl.experience.levels import LevelReplay
from tfrl.experience.rollout import Rollout
from tfrl.ops import losses
from tfrl.ops.augment import AUGMENTATIONS, SlidingWindowUCB
from tfrl.ops.graph import graph, tf
from tfrl.run import rng
from tfrl.workers.data_parallel import Losses, Weights
from tfrl.workers.strategy import Runtime

UCB = "ucb"
_OF_COLORS, _OF_SQUARES = ("grayscale", "cutout-color", "color-jitter"), ("rotate",)


@dataclass(frozen=True)
class DrAC:
    """The hyperparameters that DrAC adds to PPO's."""

    augment: Literal[(*AUGMENTATIONS, UCB)] = "crop"  # type: ignore[valid-type]  # of the table's names
    """Augmentation of the observations. ucb: a bandit chooses an augmentation before every update
    (UCB-DrAC)."""
    augment_coef: Annotated[float, NOT_NEGATIVE] = 0.1
    """Weight of DrAC's losses, which make policy and value equal for augmented and true observations."""


@dataclass(frozen=True)
class Config(DrAC, ppo.Config):
    """All settings of a run of data-regularised PPO. One field a flag."""

    algorithm: str = "drac"
    sections: ClassVar[tuple[type, ...]] = (
        Task,
        PPO,
        DrAC,
        LevelReplay,
        NetworkSettings,
        *DISTRIBUTED_SECTIONS,
    )
    action_spaces: ClassVar[tuple[type[ActionSpec], ...]] = (Discrete,)

    @property
    def augmentations(self) -> tuple[str, ...]:
        """The names of the augmentations that are used: one, or all that fit the env's images."""
        return fitting(registry.specs(self)[0].image_shapes) if self.augment == UCB else (self.augment,)

    def check(self) -> None:
        """Raises UserError for the first setting that cannot work on any machine."""
        super().check()
        observation = registry.specs(self)[0]
        if not observation.image_shapes:
            raise UserError(f"drac augments images, and {self.env} has vector observations; use ppo.")
        if self.augment == UCB and self.free_running:
            raise UserError(
                "--augment ucb must know which weights collected a rollout, and --free-running does not "
                "fix them; leave one of the two out."
            )
        suited = fitting(observation.image_shapes)
        if self.augment not in (*suited, UCB):
            height, width, channels = observation.image_shapes[0]
            raise UserError(
                f"--augment {self.augment} does not suit the images of {self.env}, {height} x {width} with "
                f"{channels} channel(s); choose one of {', '.join(suited)}."
            )


def fitting(shapes: Sequence[tuple[int, ...]]) -> tuple[str, ...]:
    """The augmentations that work for images of all these shapes [H, W, C]."""
    of_colors = all(channels == 3 for _, _, channels in shapes)
    unfit = (() if of_colors else _OF_COLORS) + (() if all(h == w for h, w, _ in shapes) else _OF_SQUARES)
    return tuple(name for name in AUGMENTATIONS if name not in unfit)


_BANDIT = "bandit/"  # of the bandit's arrays in a state
_LAST = "last_choice"  # of the last --lag + 1 updates, the newest last


class DrACAgent(PPOAgent):
    """Train data-regularised PPO (DrAC), on envs with images and discrete actions."""

    settings = Config
    env = "coinrun"
    _config: Config
    means = (*PPOAgent.means, "policy_regularizer", "value_regularizer")

    def __init__(self, config: Config, runtime: Runtime) -> None:
        super().__init__(config, runtime)
        self.metric_names += ("train/augmentation",)
        self._augmentations = [graph(AUGMENTATIONS[name], jit_compile=True) for name in config.augmentations]
        self._bandit = SlidingWindowUCB(len(self._augmentations)) if config.augment == UCB else None
        # The choices since the weights that act now, and the choice before these; the newest last.
        self._choices = collections.deque[int](maxlen=1 + (config.lag or 0))
        with runtime.strategy.scope():
            self._choice = tf.Variable(0, trainable=False, dtype=tf.int64)  # GPUs hold these arrays, too

    @property
    def summary(self) -> dict[str, str]:
        """Descriptions of an update, by title."""
        config = self._config
        how = "a bandit's choice of " + ", ".join(config.augmentations) if self._bandit else config.augment
        return super().summary | {"augmentation": f"{how}, x {config.augment_coef}"}

    @property
    def results(self) -> dict[str, object]:
        """The number of updates for which the bandit chose each augmentation, by name."""
        if self._bandit is None:
            return {}
        # The bandit counts a choice when it gets the reward of the choice.
        unknown = np.bincount(np.array(self._choices, int), minlength=len(self._augmentations))
        counts = self._bandit.counts() + unknown
        return {"augmentations": dict(zip(self._config.augmentations, counts.tolist(), strict=True))}

    def update(
        self, rollout: Rollout, number: int, on_step: Callable[[int], None] = lambda done: None
    ) -> dict[str, float]:
        """Does PPO's update; the metric `train/augmentation` is the index in `AUGMENTATIONS` of the present
        choice.
        """
        metrics = super().update(rollout, number, on_step)
        name = self._config.augmentations[self._choices[-1] if self._choices else 0]
        return metrics | {"train/augmentation": float(list(AUGMENTATIONS).index(name))}

    def _begin_update(self, mean_target: float) -> None:
        if self._bandit is None:
            return
        # Before that, no augmentation was used for the weights of the rollout.
        if len(self._choices) == self._choices.maxlen:
            self._bandit.record(self._choices.popleft(), mean_target)
        self._choices.append(self._bandit.choose(pending=self._choices))
        self._choice.assign(self._choices[-1])

    def _extra_inputs(self, rollout: Rollout, number: int) -> tuple[np.ndarray, ...]:
        config = self._config
        envs = self._runtime.local_envs(config.num_envs)
        return (rollout.by_replica(rng.augmentation_seeds(config.seed, number, envs, config.num_steps)),)

    def _losses(
        self, weights: Weights, samples: Samples, index: tf.Tensor, outputs: Sequence[tf.Tensor] | None = None
    ) -> Losses:
        """PPO's losses with G_pi and G_V."""
        augmented = self._augmented(samples.observations, samples.extra[0], index)
        outputs = outputs or self.network.outputs(weights, samples.observations, samples.memory)
        of_ppo, (logits, values) = super()._losses(weights, samples, index, outputs), outputs[:2]
        augmented_logits, augmented_values, *_ = self.network.outputs(weights, augmented, samples.memory)
        of_policy = losses.categorical_kl(tf.stop_gradient(logits), augmented_logits)
        of_value = losses.value_error(augmented_values, tf.stop_gradient(values))
        metrics = {**of_ppo.metrics, "policy_regularizer": of_policy, "value_regularizer": of_value}
        loss = of_ppo.losses + self._config.augment_coef * (of_policy + of_value)
        return of_ppo._replace(losses=loss, metrics=metrics)

    def _augmented(self, observations: tf.Tensor, seeds: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        """Observations [b, *shape] with augmented images; the images of one observation change equally."""
        entrance = self.network.entrance
        images = entrance.inputs(observations)[: len(entrance.spec.image_shapes)]
        return entrance.replace_images(observations, [self._augment(x, seeds, index) for x in images])

    def _augment(self, images: tf.Tensor, seeds: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        """Augments images [b, H, W, C] with seeds int32 [b, 2], differently in each pass."""
        epoch = index // self._config.steps_per_epoch
        seeds = tf.stack([seeds[:, 0], seeds[:, 1] + epoch], axis=-1)
        branches = [lambda augment=augment: augment(images, seeds) for augment in self._augmentations]
        return (
            branches[0]() if len(branches) == 1 else tf.switch_case(tf.cast(self._choice, tf.int32), branches)
        )

    # State

    def begin_with(self, state: Mapping[str, np.ndarray]) -> None:
        """Loads the state of another run like PPO, but without its bandit, which knows another task.

        Raises ValueError or KeyError like `Agent.begin_with`.
        """
        super().begin_with({name: array for name, array in state.items() if not name.startswith(_BANDIT)})

    def get_state(self) -> dict[str, np.ndarray]:
        """PPO's state and the bandit's."""
        state = super().get_state()
        if self._bandit is not None:
            state |= {f"{_BANDIT}{name}": array for name, array in self._bandit.get_state().items()}
            state[_BANDIT + _LAST] = np.array(self._choices, np.int64)
        return state

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Restores the arrays of `get_state`. Raises ValueError or KeyError like PPO."""
        super().set_state(state)
        if self._bandit is not None:
            names = self._bandit.get_state()
            self._bandit.set_state({name: state[_BANDIT + name] for name in names})
            self._choices.clear()
            self._choices.extend(state[_BANDIT + _LAST].tolist())
