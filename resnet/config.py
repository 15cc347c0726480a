"""The settings of a supervised run: a frozen dataclass, its presets, and its checks.

This module does not import TensorFlow, so that `--help` and the error for a bad setting come at once.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import resnet
from tfrl.cli import settings
from tfrl.cli.errors import UserError
from tfrl.cli.flags import COUNT, NATURAL, NOT_NEGATIVE, POSITIVE, WIDTH, Range, flag, nearest, shown
from tfrl.cli.settings import Reader
from tfrl.envs import callables
from tfrl.networks import weights

if TYPE_CHECKING:
    from typing_extensions import Self

OWN = "procgen_frames"
OWN_CONFIGS = ("games", "games-mini")
"""Configurations of the project's own data set; the first is the default."""

MAX_IMAGES = 1_000_000
"""The most images of a gradient step."""


@dataclass(frozen=True)
class Task:
    """The task to learn."""

    model: str = "resnet-mini"
    """A network of the zoo; `python -m resnet` lists the names. resnetD has the depth D = 6n + 2."""
    dataset: str = "procgen_frames"
    """procgen_frames[/games or /games-mini], made here, or a classification set of
    tensorflow-datasets by name: cifar10, cifar100, dmlab, ..."""
    preset: str = "default"
    """A whole set of defaults, which --help lists; flags and files win over it."""
    normalization: Literal["batch", "group", "none"] = "batch"
    """Normalisation of residual networks; other networks have none. PPO takes torsos with group."""
    width: Annotated[int, WIDTH] = 1
    """Multiply the channels of impala and impala-pooled by this."""
    image_size: Annotated[int, Range(0, 4096)] = 0
    """Resize images to this many pixels, square; 0: as they are."""
    augment: Literal["none", "crop", "crop-flip"] = "none"
    """crop: pad by 4 pixels and cut out a random part; crop-flip: also mirror a random half of the images."""
    per_image_standardization: bool = False
    """Shift and scale each image to mean 0 and variance 1. The network does it: exports take plain images."""
    preprocess: str | None = None
    """my_package.my_module:FUNCTION is your own preprocessing of images uint8 [B, H, W, C], after --augment.
    The network scales uint8 images that it returns to [0, 1], and takes floats as they are. The function is
    part of the network: exports take plain images."""
    start_from: str | None = None
    """The folder of another supervised run. This run begins with the weights and the optimizer of its newest
    checkpoint, or with the weights of its export. A folder RUN/checkpoints/update-N is that checkpoint."""
    checkpoint: str = "last"
    """Checkpoint of --start-from: last, best (by the test accuracy; only weights), or the number of a
    step."""
    seed: Annotated[int, NATURAL] = 1
    """Seed of everything random."""


@dataclass(frozen=True)
class Learning:
    """The hyperparameters."""

    epochs: Annotated[int, COUNT] = 3
    """Passes over the training images."""
    max_steps: Annotated[int, NATURAL] = 0
    """End after this many gradient steps; 0: --epochs decides."""
    batch_size: Annotated[int, Range(1, MAX_IMAGES)] = 32
    """Images of a gradient step, all workers together; must be divisible by the number of replicas."""
    optimizer: Literal["sgd", "adam", "nadam", "rmsprop"] = "sgd"
    """sgd: with momentum 0.9; rmsprop: with decay 0.9. The others of their settings are Keras's."""
    lr: Annotated[float, POSITIVE] = 0.05
    """The highest learning rate."""
    schedule: Literal["constant", "step", "cosine"] = "cosine"
    """Change of the learning rate. step: to a tenth after half of the steps, and to a hundredth after three
    quarters; cosine: to 0."""
    warmup: Annotated[int, NATURAL] = 100
    """Steps in which the learning rate grows from 0 to --lr."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 2e-4
    """Weight decay of the kernels of residual networks: half of it, times the sum of their squares, is added
    to the loss. Other networks have none."""


@dataclass(frozen=True)
class RunSettings(settings.RunSettings):
    """The run's folder."""

    checkpoint_every: Annotated[int, COUNT] = 200
    """Steps between checkpoints; one more is saved after each epoch."""
    log_every: Annotated[int, COUNT] = 20
    """Steps of a row of progress.csv, at most. A row also ends with a checkpoint."""
    tensorboard_graph: bool = False
    """Write the graph of the network for TensorBoard's Graphs tab."""
    histograms_every: Annotated[int, NATURAL] = 0
    """Steps between histograms of the weights in TensorBoard, with pictures of the first layer's kernels, at
    the end of a row of progress.csv; 0: none."""
    callbacks: str | None = None
    """Your own callbacks, such as my_package.my_module:MyCallback, separated by commas. Each is created
    without arguments. They extend tfrl.Callback or keras.callbacks.Callback."""


# A dataclass collects its fields from the last base to the first.
@dataclass(frozen=True)
class Config(RunSettings, Learning, Task, settings.Settings):
    """All settings of a run. One field a flag. `parse` gives checked ones with `run_name` filled in."""

    algorithm: str = "resnet"
    sections: ClassVar[tuple[type, ...]] = (Task, Learning, settings.Hardware, RunSettings)
    step_name: ClassVar[str] = "step"

    @property
    def whole_batches(self) -> bool:
        """True: batch normalization needs whole batches."""
        return True

    @property
    def default_run_name(self) -> str:
        """The name of a run without --run-name: the same for the same command, so that it resumes."""
        return f"{self.model}-{full_name(self.dataset).replace('/', '-')}-seed{self.seed}"

    @property
    def model_options(self) -> dict[str, Any]:
        """The options that the network has."""
        entry = resnet.entry(self.model)
        # Keras's L2 is without the papers' factor 1/2.
        residual = {"normalization": self.normalization, "l2": self.weight_decay / 2}
        options = residual if entry.normalization else {}
        options |= {"width": self.width} if entry.has_width else {}
        own = None if self.preprocess is None else callables.find(self.preprocess)
        return options | {"standardize": self.per_image_standardization, "preprocess": own}

    @property
    def ineffective(self) -> dict[str, str]:
        """Settings without an effect by name, each with the reason."""
        return {"checkpoint": "without --start-from"} if self.start_from is None else {}

    @property
    def rows_per_step(self) -> int:
        """Images of one gradient step, all workers together; the x-axis counts them."""
        return self.batch_size

    @property
    def steps_per_update(self) -> int:
        """Images of one update, which is one gradient step."""
        return self.batch_size

    def complete(self) -> Self:
        """These settings with the data set's full name, and the run's folder."""
        start = None if self.start_from is None else settings.expand_home(self.start_from)
        config = dataclasses.replace(self, dataset=full_name(self.dataset), start_from=start)
        return super(Config, config).complete()

    def check(self) -> None:
        """Raises UserError for the first setting that cannot work on any machine."""
        super().check()
        size = self.image_size or 4096  # the size of the images themselves is known later
        try:
            entry = resnet.entry(self.model, (size, size, 3))
        except ValueError as error:
            raise UserError(f"--model {error}") from None
        plain = READER.of_preset(self.preset)
        lacking = ["normalization", "weight_decay"] if not entry.normalization else []
        for name in lacking if entry.has_width else [*lacking, "width"]:
            if (value := getattr(self, name)) != getattr(plain, name):
                raise UserError(
                    f"--model {self.model} has no {name.replace('_', ' ')} to choose, so it cannot be "
                    f"{shown(value)}; leave {flag(name)} out."
                )
        check_dataset(self.dataset)
        if self.preprocess is not None:
            try:
                callables.find(self.preprocess)
            except ValueError as error:
                raise UserError(f"--preprocess: {error}.") from None
        if self.micro_batch and entry.normalization and self.normalization == "batch":
            raise UserError(
                f"--micro-batch {self.micro_batch} would change batch normalization, which needs a replica's "
                "whole batch at once; use --normalization group or none."
            )

    def check_topology(self, workers: int, replicas_per_worker: int) -> None:
        """Raises UserError if a batch does not divide by the replicas of all workers, or by --micro-batch."""
        replicas = workers * replicas_per_worker
        if self.batch_size % replicas:
            raise UserError(
                f"--batch-size must be divisible by the number of replicas, {replicas}; got "
                f"{self.batch_size}."
            )
        share = self.batch_size // replicas
        if self.micro_batch and share % self.micro_batch:
            raise UserError(
                f"--micro-batch must divide a replica's batch of {share} images; got {self.micro_batch}."
            )


_SAME_NETWORK = ("model", "width", "normalization", "preprocess", "per_image_standardization")


def check_start(config: Config) -> None:
    """Raises UserError if a run cannot start from that of --start-from; needs no TensorFlow."""
    run, name = weights.start_folder(config), f"--start-from {config.start_from}"
    there = of_run(run)
    weights.check_has_start(config)
    pairs = [(n, getattr(there, n), getattr(config, n)) for n in (*_SAME_NETWORK, "optimizer")]
    if differing := [f"{flag(n)} {old} there, {new} here" for n, old, new in pairs if old != new]:
        raise UserError(f"{name} has another network or optimizer: {'; '.join(differing)}.")


def of_run(run: Path) -> Config:
    """The settings of the supervised run in a folder. Raises UserError if it holds none."""
    path = run / settings.SETTINGS_FILE
    if settings.algorithm_of(path) != "resnet":
        raise UserError(f"{run} is not the folder of a run of resnet.train.")
    config = from_yaml(path)
    try:
        # The folder's name is not checked.
        READER.check(dataclasses.replace(config, run_name=None, logdir="logs"))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return config


def full_name(dataset: str) -> str:
    """The data set's name; the project's own set gets its default configuration."""
    return f"{OWN}/{OWN_CONFIGS[0]}" if dataset == OWN else dataset


def check_dataset(name: str) -> None:
    """Raise UserError for a data set that neither this project nor tensorflow-datasets knows.

    Configurations of their sets are known once TensorFlow is there.
    """
    if not re.fullmatch(r"\w+(/[\w.+-]+)?(:\d+\.\d+\.\d+)?", name):
        raise UserError(f"--dataset must be a name such as {OWN}/games or cifar10; got {name!r}.")
    base, _, config = name.partition("/")
    if base == OWN:
        if config not in OWN_CONFIGS:
            known = ", ".join(f"{OWN}/{c}" for c in OWN_CONFIGS)
            raise UserError(f"there is no data set {name}; known: {known}.")
        return
    import tensorflow_datasets as tfds  # imports TensorFlow only when a set is opened

    base, known = base.partition(":")[0], tfds.list_builders(with_community_datasets=False)
    if base not in known:
        hint = nearest(base, [OWN, *known])
        raise UserError(
            f"there is no data set {base!r} in tensorflow-datasets{hint}; {OWN} needs no download."
        )


READER = Reader(Config, "Train a network of the zoo on labelled images.", "python -m resnet.train", "resnet")
parse, from_yaml = READER.parse, READER.from_yaml
