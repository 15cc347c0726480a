"""The task: which env is learned, on which levels, for how long."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tfrl.cli.errors import EnvError, UserError
from tfrl.cli.settings import ANY, COUNT, MOST, NATURAL, POSITIVE, Range
from tfrl.envs import registry
from tfrl.envs.spec import EnvSettings


@dataclass(frozen=True)
class Task(EnvSettings):
    """The task to learn."""

    env: str = "coinrun"
    """A procgen game, a toy or a Gymnasium id; my_package.my_module:MyEnv-v0 imports the module that
    registers the id; my_package.my_module:make_env is a function that returns a gymnasium.Env. coinrun,
    procgen-coinrun-v0 and procgen:procgen-coinrun-v0 are the same."""
    env_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword arguments of a Gymnasium env, as JSON: '{"size": 8}'; in a YAML file also as a mapping."""
    frame_skip: Annotated[int | None, Range(1, 1000)] = None
    """Times that a Gymnasium env takes each action; rewards are summed, and the last frame is shown. None: 4
    of Atari's games, else 1."""
    max_episode_steps: Annotated[int | None, COUNT] = None
    """Steps of the agent after which an episode is truncated, in training and evaluation. It replaces the
    limit that a Gymnasium env is registered with. None: the env's own limit."""
    action_masks: Literal["auto", "never", "must"] = "auto"
    """Use info["action_mask"] of envs with Discrete or MultiDiscrete actions: forbidden actions get
    probability 0. auto: where the env gives it at reset; must: an env that does not is refused."""
    preset: str = "openai-easy"
    """A whole set of defaults, which --help lists; flags and files win over it. Without it, the env's own."""
    distribution_mode: Literal["easy", "hard", "extreme", "memory", "exploration"] = "easy"
    """Procgen's difficulty; every game has easy and hard. exploration is a single level."""
    num_levels: Annotated[int, NATURAL] = 200
    """Training levels of procgen; 0: unlimited."""
    start_level: Annotated[int, NATURAL] = 0
    """The first training level; needs --num-levels."""
    total_steps: Annotated[int, Range(1, 1e15)] = 25_000_000
    """Length of the run in env steps, all workers together, rounded up to whole updates; 1e6 is fine."""
    max_episodes: Annotated[int | None, COUNT] = None
    """End early, as done, after the update in which so many training episodes have ended; None: never."""
    solved_at: Annotated[float | None, ANY] = None
    """End early, as done, once the mean return of the last 100 episodes is this or more; None: never."""
    reward_scale: Annotated[float, POSITIVE] = 1.0
    """Factor of the rewards that are learned from; episode returns are reported as the env gives them."""
    reward_shift: Annotated[float, ANY] = 0.0
    """Number that is added to these rewards. The order is: --reward-scale, --reward-shift, then
    --normalize-rewards where an algorithm has it."""
    start_from: str | None = None
    """The folder of another run, from whose newest checkpoint, or export, this one begins: with its weights,
    optimizer and running statistics, by settings of its own. The networks must be the same."""
    seed: Annotated[int, NATURAL] = 1
    """Seed of everything random."""

    @property
    def level_sets(self) -> tuple[str, ...]:
        """The level sets that evaluations play; those of an env without levels are `test` alone."""
        return registry.family(self.env).level_sets

    @property
    def has_unseen_levels(self) -> bool:
        """True if training leaves levels out: not where it plays all, or the only one, or there are none."""
        return "train" in self.level_sets and self.num_levels > 0 and self.distribution_mode != "exploration"

    @property
    def observation_rank(self) -> int:
        """3 if the env's observations have an image, 1 if they have none; 0 without such an env."""
        try:
            return 3 if registry.specs(self)[0].image_shapes else 1
        except (ValueError, EnvError):  # told by `check`
            return 0

    @property
    def shows_images(self) -> bool:
        """True if the env shows images; False for an env that does not exist."""
        return self.observation_rank == 3

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about what the env gives or needs, and training does not use or have."""
        found = []
        if self.distribution_mode == "memory" and getattr(self, "memory", "none") == "none":
            found.append(
                "--distribution-mode memory is made for policies with memory; this policy sees one frame "
                "alone."
            )
        return tuple(found)


def check(task: Task) -> None:
    """Raise UserError if the env, its distribution mode or its levels do not exist, or the env fails."""
    try:
        registry.check(task)
    except (ValueError, EnvError) as error:
        raise UserError(f"{error}.") from None
    _check_levels(task)
    if task.start_level and not task.has_unseen_levels:
        why = "exploration is a single level" if task.num_levels else "--num-levels 0 is all levels"
        raise UserError(f"--start-level {task.start_level} would do nothing: {why}; leave it out.")


def _check_levels(task: Task) -> None:
    modes = registry.distribution_modes(task.env)
    plain = {field.name: field.default for field in dataclasses.fields(Task)}
    if not modes:
        for name in ("distribution_mode", "num_levels", "start_level"):
            if getattr(task, name) != plain[name]:
                flag = name.replace("_", "-")
                raise UserError(f"--{flag} is procgen's; {task.env} has no levels: leave it out.")
        return
    if task.distribution_mode not in modes:
        raise UserError(
            f"{task.env} has no distribution mode {task.distribution_mode!r}; it has {', '.join(modes)}."
        )
    if task.start_level + task.num_levels > MOST:
        raise UserError(
            f"--start-level + --num-levels must be at most {MOST}; got {task.start_level} + "
            f"{task.num_levels}."
        )
