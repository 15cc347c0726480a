"""The settings that all algorithms share, and those of networks with a memory or a shared torso."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np

import resnet
from tfrl.cli import settings
from tfrl.cli.errors import EnvError, UserError
from tfrl.cli.flags import ANY, COUNT, ENDLESS, FRACTION, MOST, NATURAL, POSITIVE, WIDTH, Range, flag, nearest
from tfrl.cli.settings import NoResult, Settings, expand_home, own_settings
from tfrl.envs import callables, published, registry
from tfrl.envs.spec import ActionSpec, Box, EnvSettings
from tfrl.ops import optimizers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self


# The network and its optimizer

DECIDE_WEIGHTS = (
    *("torso", "critic_torso", "torso_width", "share_torso", "free_deviation", "dueling", "freeze_torso"),
    *("normalize_observations", "optimizer", "memory", "memory_size", "memory_inputs", "order_hidden"),
)
"""Settings that decide which weights exist, what they mean, and which slots the optimizer has. Some
algorithms lack some of these settings."""
DECIDE_MLP = ("hidden", "activation")
"""Settings that decide this for the torso mlp, and for critics Q(o, a) of any torso."""
DECIDE_MEMORY = ("memory_size", "memory_inputs", "sequence_length")
"""Settings that have an effect only with --memory."""

_MAX_LAYERS, _MAX_UNITS = 16, 65_536
ACTIVATIONS = (
    *("tanh", "relu", "elu", "gelu", "silu", "celu", "exponential", "hard_shrink", "hard_sigmoid"),
    *("hard_silu", "hard_swish", "hard_tanh", "leaky_relu", "linear", "log_sigmoid", "log_softmax", "mish"),
    *("relu6", "selu", "sigmoid", "soft_shrink", "softmax", "softplus", "softsign", "sparse_plus"),
    *("sparse_sigmoid", "sparsemax", "squareplus", "swish", "tanh_shrink", "threshold"),
)
"""Keras's names of activation functions, except glu, which halves a layer."""


@dataclass(frozen=True)
class Torso:
    """The network."""

    torso: str = "impala"
    """The network from observation to features; `python -m resnet` lists the names. auto: impala for images,
    mlp for vectors. my_package.my_module:FUNCTION is your own function from Keras inputs to features. If it
    takes a second argument, the number of the policy's parameters, it returns these and the value itself."""
    critic_torso: str | None = None
    """The critics' torso, a name or FUNCTION. It implies --no-share-torso. None: the same as --torso."""
    torso_width: Annotated[int, WIDTH] = 1
    """Multiply the channels of impala and impala-pooled by this."""
    hidden: str = "64,64"
    """Units of each layer of mlp, and of critics of continuous actions behind any torso."""
    activation: str = "tanh"
    """Activation function of these layers, by its name in Keras: tanh, relu, elu, gelu, silu, sigmoid,
    leaky_relu, ... Give one name for all layers, or one for each layer of --hidden: relu,tanh for example."""

    @property
    def small_network(self) -> bool:
        """True if the network is an mlp, which XLA and NumPy compute fastest (docs/design.md)."""
        return self.torso == "mlp"

    @property
    def hidden_units(self) -> tuple[int, ...]:
        """The units of each layer of mlp. Raises UserError if --hidden is no such list."""
        words = self.hidden.replace(" ", "").split(",")
        if not all(word.isdecimal() and 1 <= int(word) <= _MAX_UNITS for word in words):
            raise UserError(
                "--hidden must list the units of each layer, such as 256,256, each from 1 to "
                f"{_MAX_UNITS}; got {self.hidden!r}."
            )
        if len(words) > _MAX_LAYERS:
            raise UserError(f"--hidden must be at most {_MAX_LAYERS} layers; got {len(words)}.")
        return tuple(map(int, words))

    @property
    def activations(self) -> tuple[str, ...]:
        """The activation of each layer of mlp. Raises UserError if --activation is no such list."""
        names, layers = self.activation.replace(" ", "").split(","), len(self.hidden_units)
        for name in names:
            if name == "glu":
                raise UserError(
                    "--activation glu would halve the width of each layer, which --hidden decides: use "
                    "another one, or a --torso of your own."
                )
            if name not in ACTIVATIONS:
                known = f"{', '.join(ACTIVATIONS[:5])} and the other names of Keras"
                raise UserError(
                    f"--activation {name} is unknown{nearest(name, ACTIVATIONS)}; known: {known}."
                )
        if len(names) not in (1, layers):
            raise UserError(
                f"--activation must be one name, or one for each of the {layers} layers of --hidden "
                f"{self.hidden}; got {self.activation!r}."
            )
        return tuple(names * layers if len(names) == 1 else names)

    @property
    def hidden_options(self) -> dict[str, Any]:
        """The options that the zoo builds an mlp with."""
        return {"hidden": self.hidden_units, "activation": self.activations}

    @property
    def has_own_heads(self) -> bool:
        """True if --torso is a function that returns the policy's parameters and the value itself."""
        if not callables.is_name(self.torso):
            return False
        try:
            return callables.required_arguments(callables.find(self.torso)) == 2
        except ValueError:  # `check` reports it
            return False

    @property
    def torso_options(self) -> dict[str, Any]:
        """The options that the zoo builds the torso with, if they differ from its defaults."""
        if self.small_network:
            return self.hidden_options
        if self.torso_width == 1 or callables.is_name(self.torso) or not resnet.entry(self.torso).has_width:
            return {}
        return {"width": self.torso_width}


@dataclass(frozen=True)
class NetworkSettings(Torso, EnvSettings):
    """The network.

    Attributes:
      takes_own_heads: True if a network may return the policy's parameters and the value itself.
    """

    takes_own_heads: ClassVar[bool] = True

    share_torso: bool = True
    """Policy and value share one torso. With --no-share-torso each has its own torso."""
    torso_weights: str | None = None
    """The folder of a complete run of `python -m resnet.train`. This run begins with its torso."""
    freeze_torso: bool = False
    """Do not train the weights of --torso-weights; train all other weights."""
    memory: Literal["none", "lstm", "gru"] = "none"
    """A recurrent layer between torso and heads, for envs whose observations do not show the whole state. Its
    state is zero at the start of an episode."""
    memory_size: Annotated[int, Range(16, 4096)] = 256
    """Units of the recurrent layer, a multiple of 16."""
    memory_inputs: bool = False
    """The recurrent layer also takes the last action and the last reward, clipped to [-1, 1]."""
    sequence_length: Annotated[int, NATURAL] = 0
    """Steps through which gradients flow back in the recurrent layer. It must divide --num-steps. 0: the
    whole rollout."""

    @property
    def state_size(self) -> int:
        """The size of the recurrent state of one env; actor and critic may have a state each."""
        vectors = {"none": 0, "lstm": 2, "gru": 1}[self.memory]
        return vectors * self.memory_size * (1 if self.share_torso else 2)

    @property
    def remembered_size(self) -> int:
        """The size of the memory of one env: recurrent state, last action and reward."""
        inputs = registry.specs(self)[1].encoded_size + 1 if self.memory_inputs else 0
        return self.state_size + inputs


GAMMA, GAMMA_OF_ROLLOUTS = 0.99, 0.999
"""The default of --gamma. The defaults of algorithms that learn from rollouts (`Rollouts`) are procgen's."""


@dataclass(frozen=True)
class Learning:
    """The hyperparameters of every algorithm."""

    optimizer: Literal["adam", "nadam", "rmsprop", "sgd"] = "adam"
    """Optimizer of the weights; rmsprop and sgd have no momentum."""
    rmsprop_decay: Annotated[float, FRACTION] = 0.99
    """Decay rate of the mean square of gradients in rmsprop."""
    adam_epsilon: Annotated[float, POSITIVE] = 1e-8
    """Epsilon of the optimizer. adam and nadam add it to the root of the mean square of gradients; rmsprop
    adds it to the mean square."""
    num_envs: Annotated[int, ENVS] = 1
    """Envs, all workers together; must be divisible by the number of replicas."""
    lr: Annotated[float, POSITIVE] = 3e-4
    """Learning rate (alias --learning-rate)."""
    gamma: Annotated[float, FRACTION] = GAMMA
    """Discount of one env step."""
    max_grad_norm: Annotated[float | None, POSITIVE] = None
    """Clip the gradient to this global norm; None: no clipping."""

    def make_optimizer(self, *, uncorrected_epsilon: bool = False) -> optimizers.Optimizer:
        """The optimizer that these settings name; `uncorrected_epsilon` is that of Adam."""
        epsilon = self.adam_epsilon
        made: dict[str, optimizers.Optimizer] = {
            "adam": optimizers.Adam(epsilon, uncorrected_epsilon),
            "nadam": optimizers.Nadam(epsilon),
            "rmsprop": optimizers.RMSprop(epsilon, self.rmsprop_decay),
            "sgd": optimizers.SGD(),
        }
        return made[self.optimizer]


# The sections of every algorithm

ENVS = Range(1, 1_000_000)
EPISODES = Range(1, 1_000_000)
"""Episodes of an evaluation."""


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
    """Times that a Gymnasium env repeats each action. Rewards are summed. The observation is the last one, or
    for Atari's images the maximum of the last two frames. None: 4 for Atari's images, otherwise 1."""
    max_episode_steps: Annotated[int | None, COUNT] = None
    """Truncate an episode after this many steps of the agent, in training and evaluation. None: the env's own
    limit."""
    action_masks: Literal["auto", "never", "must"] = "auto"
    """Action masks of envs with discrete actions (docs/envs.md): forbidden actions get probability 0. auto:
    if the env has masks; never: ignore masks; must: refuse an env without masks."""
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
    are the same. With --frame-skip, a step of the agent counts as one. inf: endless."""
    total_frames: Annotated[int | None, Range(1, 1e15)] = None
    """Length of the run in frames of the env, instead of --total-steps: with --frame-skip, a step of the
    agent counts as that many. config.yaml has --total-steps."""
    max_episodes: Annotated[int | None, Range(-1, MOST)] = None
    """End the run as complete at the env step at which this many training episodes have ended. Algorithms
    that learn from rollouts do not learn from the last rollout if it is cut. None: never. -1: never, and
    --total-steps is inf unless it is given."""
    solved_at: Annotated[float | None, ANY] = None
    """End the run as complete when the mean return of the last 100 episodes is this or more; None: never."""
    reward_scale: Annotated[float, POSITIVE] = 1.0
    """Multiply the rewards for the learner by this factor. Reported returns are still the env's."""
    reward_shift: Annotated[float, ANY] = 0.0
    """Add this number to the rewards for the learner. The order is: --reward-scale, --reward-shift,
    --normalize-rewards."""
    start_from: str | None = None
    """The folder of another run. This run begins with the weights, optimizer and running statistics of its
    newest checkpoint, or of its export. A folder RUN/checkpoints/update-N is that checkpoint. The networks
    must be the same; other settings may differ."""
    checkpoint: str = "last"
    """Checkpoint of --start-from: last, best (only weights), or the number of an update."""
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

    def normalized(self, mean_return: float, ranges: str = "paper") -> float | None:
        """The normalised score of a return, by one of `published.RANGES`; None for envs without ranges."""
        return published.normalized_return(self.env, self.distribution_mode, mean_return, ranges)

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


@dataclass(frozen=True)
class Hardware(settings.Hardware):
    """The devices and threads. They do not change the result, up to rounding."""

    env_threads: Annotated[int, Range(0, 1024)] = 0
    """Threads that step the envs of this process; 0: chosen by the number of cores."""
    env_processes: Annotated[int, Range(0, 1024)] = 0
    """Extra processes that step the Gymnasium envs of this process; 0: none. They help if a step takes about
    1 ms or more."""
    ray_address: str | None = None
    """The address of an existing Ray, or auto. None: the run starts its own Ray and ends it."""


@dataclass(frozen=True)
class RunSettings(settings.RunSettings):
    """The run's folder."""

    run_name: str | None = None
    """Name of the run's folder. None: ENV-seedSEED for PPO, otherwise ALGORITHM-ENV-seedSEED, so that the
    same command continues its run."""
    eval_every: Annotated[int, NATURAL] = 0
    """Updates (with replay: iterations) between evaluations; 0: only at the end."""
    eval_every_steps: Annotated[int, Range(0, 1e15)] = 0
    """Env steps between evaluations; each comes at the end of an update. 0: only --eval-every decides."""
    eval_at_start: bool = False
    """Evaluate before the first update as well, as a baseline."""
    keep_policies: Literal["best", "last", "all"] = "best"
    """Policies of evaluations to keep. best: the one with the highest return, in checkpoints/best.npz. last
    and all: also policies/STEPS_RETURN.npz of the last one, or of every one."""
    record_every: Annotated[int, NATURAL] = 0
    """Updates (with replay: iterations) between short videos; 0: none."""
    eval_episodes: Annotated[int, EPISODES] = 128
    """Episodes of an evaluation, for each level set (training, unseen). A number above 64 is rounded up to a
    multiple of 64."""
    eval_greedy: bool = False
    """Evaluations take the most likely action instead of drawing one."""
    tensorboard_graph: bool = False
    """Write the graph of the network that acts for TensorBoard's Graphs tab."""
    histograms_every: Annotated[int, NATURAL] = 0
    """Updates (with replay: iterations) between histograms of the weights in TensorBoard, and for image
    networks pictures of the first layer's kernels; 0: none."""
    log_info: str | None = None
    """Keys of the env's info, separated by commas, whose numbers become columns info/KEY: the mean over the
    steps of an update that have the key. Numbers in info["metrics"] become columns without this flag."""
    show: bool = False
    """Open the picture of the learning curve at the end of the run, where there is a display."""
    callbacks: str | None = None
    """Your own callbacks, such as my_package.my_module:MyCallback, separated by commas. Each is created
    without arguments."""


@dataclass(frozen=True)
class ScheduledLearning(Learning):
    """The hyperparameters of algorithms whose learning rate may fall."""

    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """constant, or falling to 0 over --total-steps. A resumed run cannot change --total-steps if the rate
    falls."""


@dataclass(frozen=True)
class RLSettings(RunSettings, Hardware, Torso, Learning, Task, Settings):
    """The settings of every algorithm.

    Attributes:
      algorithm: the name of `python -m tfrl.NAME`, which config.yaml begins with.
      action_spaces: the action spaces that the algorithm is for.
      for_any_actions: the name of a similar algorithm for all action spaces, for messages.
      updates_vary: True if an update has as many env steps as its episodes; `steps_per_update` is the limit.
      counts: the name of what --total-steps and the first column of progress.csv count.
      critics_see_actions: True if critics Q(o, a) have an mlp behind the torso where actions are continuous.
    """

    action_spaces: ClassVar[tuple[type[ActionSpec], ...]] = (ActionSpec,)
    for_any_actions: ClassVar[str] = "ppo"
    updates_vary: ClassVar[bool] = False
    counts: ClassVar[str] = "env steps"
    critics_see_actions: ClassVar[bool] = False

    @property
    def is_ahead(self) -> bool:
        """True if envs are stepped while the learner trains: in a thread or by actors."""
        return False

    @property
    def rollouts_held(self) -> int:
        """Rollouts that are in memory at once."""
        return 1

    @abstractmethod
    def make_network(self, precision: str) -> Any:
        """Makes the algorithm's network, a `tfrl.networks.network.Network`; imports TensorFlow.

        `precision` is that of the torso. Algorithms with the same method have the same weights for the same
        settings. Raises ValueError if the zoo cannot build it.
        """

    @property
    def network_maker(self) -> Any:
        """The method that makes the network; runs with the same one can start from each other."""
        return type(self).make_network

    def learned_rewards(self, rewards: np.ndarray) -> np.ndarray:
        """The learner's rewards, float32, before any normalisation, from the env's rewards, float32."""
        return rewards * np.float32(self.reward_scale) + np.float32(self.reward_shift)

    @classmethod
    def derive(cls, given: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
        """Settings that follow from the given ones and replace those of the preset. Raises UserError."""
        found: dict[str, Any] = {}
        if "total_steps" in given:
            if given.get("total_frames") is not None:
                raise UserError("--total-frames is another form of --total-steps; give one of the two.")
            found["total_frames"] = None
        elif given.get("max_episodes") == -1 and given.get("total_frames") is None:
            found["total_steps"] = ENDLESS
        torso = given.get("critic_torso")
        if torso is not None and given.get("share_torso"):
            raise UserError(f"--critic-torso {torso} is a torso of its own; leave --share-torso out.")
        return found

    @property
    def is_endless(self) -> bool:
        """True if the run has no length."""
        return self.total_steps == ENDLESS

    @property
    def depends_on_length(self) -> bool:
        """True if --total-steps changes the training, for example by a falling learning rate."""
        return False

    @property
    def default_run_name(self) -> str:
        """The name of a run without --run-name. The same command gets the same name, so that it resumes."""
        name = f"{registry.file_name(registry.own_name(self.env))}-seed{self.seed}"
        # The name of a user's algorithm is module:Class.
        return name if self.algorithm == "ppo" else f"{self.algorithm.rpartition(':')[2]}-{name}"

    @property
    def has_one_topology(self) -> bool:
        """True if the network is small, and no second topology can run these settings.

        Then whole gradient steps are one program, because no other run must have the same bits.
        """
        return self.num_envs == 1 and self.small_network

    @property
    def ineffective(self) -> dict[str, str]:
        """Settings without an effect by name, each with the reason."""
        observation, action = registry.specs(self)
        has_hidden = "mlp" in (self.torso, self.critic_torso) or observation.is_joined
        has_hidden |= self.critics_see_actions and isinstance(action, Box)
        found = {} if has_hidden else dict.fromkeys(DECIDE_MLP, f"with --torso {self.torso}")
        if self.start_from is None:
            found["checkpoint"] = "without --start-from"
        if callables.is_name(self.torso):
            found["torso_width"] = "with a torso of your own"
        if hasattr(self, "free_deviation") and not isinstance(action, Box):
            found["free_deviation"] = "where actions are discrete"
        elif self.has_own_heads:
            found["free_deviation"] = "with a network that returns the policy's parameters itself"
        if getattr(self, "memory", None) == "none":
            found |= dict.fromkeys(DECIDE_MEMORY, "without --memory")
        if self.optimizer != "rmsprop":
            found["rmsprop_decay"] = "without --optimizer rmsprop"
        if self.optimizer == "sgd":
            found["adam_epsilon"] = "with --optimizer sgd"
        if not registry.family(self.env).names:
            found["env_threads"] = "on Gymnasium's envs, which have --env-processes"
        if self.distribution_mode == "exploration":
            found["num_levels"] = "with --distribution-mode exploration, a single level"
        return found

    @property
    def local_callables(self) -> dict[str, str]:
        """The settings that name a function that only this program has, such as a lambda."""
        given = {"env": self.env, "torso": self.torso, "critic_torso": self.critic_torso or ""}
        return {
            setting: name
            for setting, name in given.items()
            if callables.is_name(name) and not callables.is_importable(name)
        }

    @property
    def logged_info(self) -> tuple[str, ...]:
        """The keys of --log-info."""
        return tuple(dict.fromkeys(key.strip() for key in (self.log_info or "").split(",") if key.strip()))

    @property
    def steps_per_env(self) -> int:
        """Steps of each env in one update."""
        return self.steps_per_update // self.num_envs

    @property
    def num_updates(self) -> int:
        """Updates until `total_steps` env steps are reached or passed."""
        return -(-self.total_steps // self.steps_per_update)

    @property
    def run_steps(self) -> int:
        """Env steps after which a run is complete."""
        return self.total_steps if self.updates_vary else self.num_updates * self.steps_per_update

    def evaluates_at(self, update: int, env_steps: int, *, since: tuple[int, int]) -> bool:
        """True if an evaluation is due after an update.

        Args:
          update, env_steps: updates and env steps so far.
          since: the same numbers at the update or evaluation before.
        """
        pairs = ((self.eval_every, since[0], update), (self.eval_every_steps, since[1], env_steps))
        return any(every and before // every < now // every for every, before, now in pairs)

    @property
    def may_change(self) -> frozenset[str]:
        """Names of the settings that a resumed run may change, including its length."""
        ends = {"total_steps", "max_episodes", "solved_at"}
        return super().may_change | ends | {"preset"} | self.ineffective.keys()

    def complete(self) -> Self:
        """These settings with the full names of env and torso and the run's folder filled in."""
        config = dataclasses.replace(self, env=registry.own_name(self.env))
        if config.torso == "auto":
            torso = {1: "mlp", 3: "impala"}.get(config.observation_rank, "auto")
            config = dataclasses.replace(config, torso=torso)
        paths = {name: getattr(config, name, None) for name in ("start_from", "torso_weights")}
        changes: dict[str, Any] = {
            name: expand_home(path) for name, path in paths.items() if path is not None
        }
        if isinstance(config, NetworkSettings) and config.critic_torso is not None:
            changes["share_torso"] = False
        if config.max_episodes == -1:
            changes["max_episodes"] = None
        if config.total_frames is not None:
            frames = config.total_frames
            steps = ENDLESS if frames == ENDLESS else -(-frames // registry.frames_per_step(config))
            changes |= {"total_steps": steps, "total_frames": None}
        return super(RLSettings, dataclasses.replace(config, **changes)).complete()

    def with_own_functions(self) -> Self:
        """These settings; a network that returns the policy's parameters and the value shares its torso."""
        if isinstance(self, NetworkSettings) and self.critic_torso is None and self.has_own_heads:
            return dataclasses.replace(self, share_torso=True)
        return self

    def check(self) -> None:
        """Raises UserError for the first setting of all algorithms that cannot work."""
        super().check()
        if self.max_episodes == 0:
            raise UserError("--max-episodes must be at least 1, or -1 for no limit; got 0.")
        if self.is_endless and self.depends_on_length:
            raise UserError(
                "--total-steps inf needs settings that do not follow the length of the run, such as "
                "--lr-schedule constant."
            )
        check_task(self)
        action = registry.specs(self)[1]
        if not isinstance(action, self.action_spaces):
            needed = " or ".join(space.kind for space in self.action_spaces)
            raise UserError(
                f"{self.algorithm} needs {needed} actions, and {self.env} has {action.kind} ones; use "
                f"{self.for_any_actions}, or see docs/algorithms.md."
            )
        if self.env_processes and registry.family(self.env).names:
            raise UserError(
                f"--env-processes is only for Gymnasium's envs, and {self.env} uses threads: leave it out."
            )
        if self.env_processes > self.num_envs:
            raise UserError(
                f"--env-processes must be at most --num-envs {self.num_envs}; got {self.env_processes}."
            )
        apart = [f"--{name} {n}" for name in ("actors", "observers") if (n := getattr(self, name, 0))]
        if self.env_processes and apart:
            raise UserError(
                f"{apart[0]} already starts processes that step the envs: leave --env-processes out."
            )
        _check_network(self)


def check_levels(task: Task) -> None:
    """Raise UserError if the env does not begin the level that level replay chooses."""
    try:
        registry.check_levels(task)
    except EnvError as error:
        raise UserError(f"{error}.") from error.__cause__


def check_task(task: Task) -> None:
    """Raise UserError if the env, its distribution mode or its levels do not exist, or the env fails."""
    try:
        registry.check(task)
    except (ValueError, EnvError) as error:
        raise UserError(f"{error}.") from error.__cause__
    modes = registry.distribution_modes(task.env)
    if modes and task.distribution_mode not in modes:
        raise UserError(
            f"{task.env} has no distribution mode {task.distribution_mode!r}; it has {', '.join(modes)}."
        )
    has_levels = getattr(task, "level_replay", False) and registry.family(task.env).chooses_levels
    if not modes and task.distribution_mode != Task.distribution_mode:
        raise UserError(
            f"--distribution-mode is only for procgen, and {task.env} has no levels: leave it out."
        )
    for name in () if modes or has_levels else ("num_levels", "start_level"):
        if getattr(task, name) != getattr(Task, name):
            others, instead = "", ""
            if hasattr(task, "level_replay"):
                others = ', and with --level-replay for an env whose reset takes options["level"]'
                instead = ", or give --level-replay"
            raise UserError(
                f"{flag(name)} is only for procgen{others}: leave it out for {task.env}{instead}."
            )
    if task.start_level + task.num_levels > MOST:
        raise UserError(
            f"--start-level + --num-levels must be at most {MOST}; got {task.start_level} + "
            f"{task.num_levels}."
        )
    if task.start_level and not task.has_unseen_levels and not has_levels:
        why = "exploration is a single level" if task.num_levels else "--num-levels 0 is all levels"
        raise UserError(f"--start-level {task.start_level} has no effect: {why}; leave it out.")


def _check_network(config: RLSettings) -> None:
    """Raise UserError if a torso does not exist or cannot take the observations, or if memory cannot work."""
    torsos = (("--torso", config.torso), ("--critic-torso", config.critic_torso))
    have_width = [_check_torso(config, name, torso) for name, torso in torsos if torso is not None]
    if config.torso_width != 1 and not any(have_width):
        raise UserError(
            f"--torso {config.torso} has no width to choose, so it cannot be {config.torso_width}; "
            "leave --torso-width out."
        )
    config.activations  # noqa: B018 - raises UserError for a wrong list
    if config.has_own_heads:
        _check_own_heads(config)
    if isinstance(config, NetworkSettings) and config.freeze_torso and config.torso_weights is None:
        raise UserError("--freeze-torso needs --torso-weights: random weights would stay random.")
    if isinstance(config, NetworkSettings) and config.memory_size % 16:
        raise UserError(f"--memory-size must be a multiple of 16; got {config.memory_size}.")


def _check_own_heads(config: RLSettings) -> None:
    """Raise UserError if the algorithm or another setting needs features of the user's network."""
    name = f"--torso {config.torso} returns the policy's parameters and the value itself"
    if not (isinstance(config, NetworkSettings) and config.takes_own_heads):
        raise UserError(
            f"{name}, which is not for {config.algorithm}: let it take one argument and return features."
        )
    wrong = {
        "critic_torso": config.critic_torso,
        "torso_weights": config.torso_weights,
        "memory": config.memory if config.memory != "none" else None,
        "dropout": getattr(config, "dropout", None),
        "critic_lr": getattr(config, "critic_lr", None),
    }
    for setting, value in wrong.items():
        if value:
            raise UserError(f"{name}: leave {flag(setting)} {value} out.")


def _check_torso(config: RLSettings, spelled: str, torso: str) -> bool:
    """False if the torso has no width to choose; a function of the user may have one.

    Raises UserError if it does not exist or cannot take the env's observations.
    """
    if callables.is_name(torso):
        try:
            callables.find(torso)
        except ValueError as error:
            raise UserError(f"{spelled}: {error}.") from None
        return True
    try:
        for shape in registry.specs(config)[0].image_shapes or [(1,)]:
            entry = resnet.entry(torso, shape)
    except ValueError as error:
        raise UserError(f"--env {config.env}: {spelled} {error}") from None
    return entry.has_width


def hyperparameters(config: RLSettings) -> dict[str, Any]:
    """The settings that decide the result of a run, by name."""
    sections: list[Any] = [section for section in config.sections if not issubclass(section, NoResult)]
    names = [field.name for section in sections for field in dataclasses.fields(section)]
    names += [*own_settings(type(config)), "precision"]
    return {"algorithm": config.algorithm, **{name: getattr(config, name) for name in names}}
