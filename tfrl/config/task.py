"""The settings of the task: the env, its levels and the length of the run."""

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
    """A procgen game (coinrun and procgen-coinrun-v0 are the same), the toy catch or a Gymnasium id.
    my_package.my_module:MyEnv-v0 imports the module that registers the id. my_package.my_module:make_env is a
    function that returns a gymnasium.Env."""
    env_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword arguments of a Gymnasium env, as JSON: '{"size": 8}'. A YAML file may have a mapping."""
    frame_skip: Annotated[int | None, Range(1, 1000)] = None
    """Times that a Gymnasium env repeats each action. Rewards are summed; the observation is the last one.
    None: 4 for Atari's games, otherwise 1."""
    max_episode_steps: Annotated[int | None, COUNT] = None
    """Truncate an episode after this many steps of the agent, in training and evaluation. None: the env's own
    limit."""
    action_masks: Literal["auto", "never", "must"] = "auto"
    """Use info["action_mask"] of envs with Discrete or MultiDiscrete actions: forbidden actions get
    probability 0. auto: if the env's reset gives a mask; never: ignore masks; must: refuse an env without a
    mask."""
    preset: str = "openai-easy"
    """A whole set of defaults; --help lists the presets. Flags and files win over it. Without this flag, the
    env's own preset is used."""
    distribution_mode: Literal["easy", "hard", "extreme", "memory", "exploration"] = "easy"
    """Procgen's difficulty. Every game has easy and hard; exploration is a single level."""
    num_levels: Annotated[int, NATURAL] = 200
    """Number of procgen's training levels; 0: all levels."""
    start_level: Annotated[int, NATURAL] = 0
    """The first training level; needs --num-levels."""
    total_steps: Annotated[int, Range(1, 1e15)] = 25_000_000
    """Length of the run in env steps, all workers together, rounded up to whole updates. 1e6 and 1_000_000
    are the same."""
    max_episodes: Annotated[int | None, COUNT] = None
    """End the run as complete when this many training episodes have ended; None: never."""
    solved_at: Annotated[float | None, ANY] = None
    """End the run as complete when the mean return of the last 100 episodes is this or more; None: never."""
    reward_scale: Annotated[float, POSITIVE] = 1.0
    """Multiply the rewards for the learner by this factor. Reported returns are still the env's."""
    reward_shift: Annotated[float, ANY] = 0.0
    """Add this number to the rewards for the learner. The order is: --reward-scale, --reward-shift,
    --normalize-rewards."""
    start_from: str | None = None
    """The folder of another run. This run begins with the weights, optimizer and running statistics of its
    newest checkpoint, or of its export. The networks must be the same; other settings may differ."""
    seed: Annotated[int, NATURAL] = 1
    """Seed of everything random."""

    @property
    def level_sets(self) -> tuple[str, ...]:
        """The level sets that evaluations play; an env without levels has only `test`."""
        return registry.family(self.env).level_sets

    @property
    def has_unseen_levels(self) -> bool:
        """True if some levels are not training levels."""
        return "train" in self.level_sets and self.num_levels > 0 and self.distribution_mode != "exploration"

    @property
    def observation_rank(self) -> int:
        """3 if the env's observations have an image, 1 if they have no image, 0 if there is no such env."""
        try:
            return 3 if registry.specs(self)[0].image_shapes else 1
        except (ValueError, EnvError):  # `check` reports it
            return 0

    @property
    def shows_images(self) -> bool:
        """True if the env shows images; False for an env that does not exist."""
        return self.observation_rank == 3


def check(task: Task) -> None:
    """Raise UserError if the env, its distribution mode or its levels do not exist, or the env fails."""
    try:
        registry.check(task)
    except (ValueError, EnvError) as error:
        raise UserError(f"{error}.") from None
    _check_levels(task)
    if task.start_level and not task.has_unseen_levels:
        why = "exploration is a single level" if task.num_levels else "--num-levels 0 is all levels"
        raise UserError(f"--start-level {task.start_level} has no effect: {why}; leave it out.")


def _check_levels(task: Task) -> None:
    modes = registry.distribution_modes(task.env)
    plain = {field.name: field.default for field in dataclasses.fields(Task)}
    if not modes:
        for name in ("distribution_mode", "num_levels", "start_level"):
            if getattr(task, name) != plain[name]:
                flag = name.replace("_", "-")
                raise UserError(f"--{flag} is only for procgen, and {task.env} has no levels: leave it out.")
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
