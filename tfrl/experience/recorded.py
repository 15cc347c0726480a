"""Recorded episodes: RLDS sets and Minari sets, and the spaces of an env in them.

An RLDS set (Ramos et al. 2021, arXiv:2111.02767) is a set of tensorflow-datasets with an example for each
episode. A step has `observation`, `action`, `reward`, `discount`, `is_first`, `is_last` and `is_terminal`.
The last step of an episode has only an observation: its action and reward mean nothing.

`write_shard` and `Manifest` write the sets of `tfrl.collect`: shard after shard, and then the file that
counts them, so a set is complete at any time. `open_set` reads the sets of tfrl and of others.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from tfrl import __version__
from tfrl.cli.errors import UserError, how_to_install
from tfrl.cli.flags import flag
from tfrl.envs import facts as env_facts
from tfrl.envs import registry
from tfrl.envs.facts import FACTS_FILE, Facts
from tfrl.envs.observations import CHOICES, IMAGE, NUMBERS, ArraySpec, Part
from tfrl.envs.spec import ActionSpec, Box, Discrete, MultiDiscrete
from tfrl.ops.graph import tf
from tfrl.run import files
from tfrl.run.folder import read_json

NO_ENV = env_facts.NO_ENV
INFO_FILE, METADATA_FILE = "dataset_info.json", "metadata.json"
MINARI_FILE = Path("data", "main_data.hdf5")
MINARI = "minari:"
"""Prefix of the name of an installed Minari set."""
_MINARI_EPISODES = 64  # of a shard of a Minari set, which is one file
_PNG_CHANNELS = (1, 3, 4)
_FIELDS = ("observation", "action", "reward", "is_last", "is_terminal")

Arrays = Any
"""An array, or a nest of dicts of arrays, as of a Dict or Tuple space; the keys of a Tuple are "0", "1"."""


class Episode(NamedTuple):
    """An episode of T steps as an agent sees it.

    Attributes:
      observations: [T + 1, *shape], the last one after the last action.
      actions: [T, *shape]; those of a Box are in [-1, 1].
      rewards: float32 [T], of the env.
      terminated: False if the episode was truncated, so that its last observation has a value.
    """

    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    terminated: bool


# The spaces of an env


@dataclass(frozen=True)
class Spaces:
    """Converts observations and actions between a set, which has those of the env, and an agent."""

    observation: ArraySpec
    action: ActionSpec

    # From the agent to the set

    def shown(self, observations: np.ndarray) -> Arrays:
        """The arrays of the env's space, [T, ...] each, of an agent's observations [T, *shape]."""
        spec = self.observation
        if not spec.parts:
            return observations
        found: dict[str, Any] = {}
        for part in spec.parts:
            rows = np.ascontiguousarray(observations[:, spec.places[part]])
            array = rows.view(spec.stored_type(part.kind)).reshape(len(rows), *part.shape)
            if part.kind == CHOICES:
                array = array.astype(np.int32) + _starts(part)
            place = found
            *outer, last = part.keys or ("observation",)
            for key in outer:
                place = place.setdefault(key, {})
            place[last] = array
        return found["observation"] if list(found) == ["observation"] else found

    def taken(self, actions: np.ndarray) -> np.ndarray:
        """The env's actions [T, ...] of an agent's actions [T, *shape]."""
        return np.asarray(self.action.as_env_takes(actions))

    def features(self, tfds: Any) -> Any:
        """The features of an RLDS set, as tensorflow-datasets describes them."""
        of = tfds.features

        def array(x: Arrays) -> Any:
            if isinstance(x, dict):
                return of.FeaturesDict({name: array(inner) for name, inner in x.items()})
            if x.ndim == 4 and x.dtype == np.uint8 and x.shape[-1] in _PNG_CHANNELS:
                return of.Image(shape=x.shape[1:], encoding_format="png")
            return of.Tensor(shape=x.shape[1:], dtype=x.dtype)

        shown = self.shown(np.zeros((1, *self.observation.shape), self.observation.dtype))
        step = {
            "observation": array(shown),
            "action": array(self.taken(np.zeros((1, *self.action.shape), self.action.dtype))),
            "reward": of.Scalar(np.float32, doc="of the action, as the env gave it"),
            "discount": of.Scalar(
                np.float32, doc="0 after an action that ended the episode for good, else 1"
            ),
            **{name: of.Scalar(np.bool_) for name in ("is_first", "is_last", "is_terminal")},
        }
        return of.FeaturesDict({"steps": of.Dataset(step), "episode_id": of.Scalar(np.int64)})

    # From the set to the agent

    def observations(self, given: Arrays, where: str) -> np.ndarray:
        """An agent's observations [T, *shape] of the arrays [T, ...] of a set. Raises UserError."""
        spec = self.observation
        if not spec.parts:
            return self._array(spec.arrays[0], given, where).astype(spec.dtype, copy=False)
        parts = {part: self._array(part, given, where) for part in spec.parts}
        rows = np.zeros((len(next(iter(parts.values()))), *spec.shape), spec.dtype)
        for part, array in parts.items():
            wanted = np.ascontiguousarray(array.reshape(len(rows), -1), spec.stored_type(part.kind))
            rows[:, spec.places[part]] = wanted.view(spec.dtype)
        return rows

    def _array(self, part: Part, given: Arrays, where: str) -> np.ndarray:
        """The array [T, *part.shape] of a part."""
        keys = part.keys
        if isinstance(given, dict) and not keys:
            keys = ("observation",) if "observation" in given else tuple(given)[: len(given) == 1]
        for key in keys:
            if not isinstance(given, dict) or key not in given:
                raise UserError(f"{where} has no observation {part.name}, which {self._wanted()}.")
            given = given[key]
        if isinstance(given, dict):
            raise UserError(f"{where} has several observations ({', '.join(given)}), and {self._wanted()}.")
        layout, form = part.layout, (given.shape[1:], given.dtype)
        # uint8 [H, W, C] are an agent's images, which tfrl has stored.
        if layout is not None and (layout.shape, layout.dtype) == form != (part.shape, np.uint8):
            try:
                given = layout.stored(given)
            except ValueError as error:
                raise UserError(f"{where} has observations with {error}.") from None
        number = given.dtype == np.uint8 if part.kind == IMAGE else given.dtype.kind in "biuf"
        if given.shape[1:] != part.shape and given.shape[1:] == () and part.size == 1:
            given = given.reshape(len(given), *part.shape)
        if given.shape[1:] != part.shape or not number:
            got = f"{given.dtype} {list(given.shape[1:])}"
            named = f" {part.name}" if part.keys else ""
            raise UserError(f"{where} has observations{named} of {got}, and {self._wanted()}.")
        if part.kind == NUMBERS:
            with np.errstate(over="ignore"):
                given = given.astype(np.float32, copy=False)
        if given.dtype.kind == "f" and not np.isfinite(given).all():
            raise UserError(f"{where} has observations that are NaN or infinite.")
        if part.kind == CHOICES:
            given = given - _starts(part)
            if (given < 0).any() or (given >= np.array(part.counts).reshape(part.shape)).any():
                raise UserError(f"{where} has observations that the space of its env does not have.")
        return given

    def _wanted(self) -> str:
        return f"the env observes {self.observation}"

    def actions(self, given: np.ndarray, where: str) -> np.ndarray:
        """An agent's actions [T, *shape] of the env's actions [T, ...]. Raises UserError."""
        spec, given = self.action, np.asarray(given)
        of_env = spec.env_shape or spec.shape if isinstance(spec, Box | MultiDiscrete) else spec.shape
        if given.shape[1:] == of_env or given.shape[1:] in ((1,), ()) and spec.shape in ((1,), ()):
            given = given.reshape(len(given), *spec.shape)
        kinds = "fiu" if isinstance(spec, Box) else "iu" if isinstance(spec, Discrete) else "biu"
        if given.shape[1:] != spec.shape or given.dtype.kind not in kinds:
            got = f"{given.dtype} {list(given.shape[1:])}"
            raise UserError(f"{where} has actions of {got}, and the env takes {spec}.")
        if isinstance(spec, Box):
            if not np.isfinite(given).all():
                raise UserError(f"{where} has actions that are NaN or infinite.")
            low, high = np.array(spec.low), np.array(spec.high)
            varies = high > low  # a number whose bounds are equal is 0, their middle
            scaled = 2 * (given - low) / np.where(varies, high - low, 1) - 1
            return np.where(varies, np.clip(scaled, -1, 1), 0).astype(np.float32)
        if isinstance(spec, Discrete):
            counted, most = given - spec.start, np.array(spec.n)
        else:
            assert isinstance(spec, MultiDiscrete)
            counted, most = given - np.array(spec.starts), np.array(spec.counts)
        if (counted < 0).any() or (counted >= most).any():
            raise UserError(f"{where} has the action {given.max()}, and the env takes {spec}.")
        return counted.astype(spec.dtype)

    def episode(self, raw: RawEpisode, where: str) -> Episode:
        """An episode as an agent sees it. Raises UserError, which names the file, if it does not fit."""
        with np.errstate(over="ignore"):
            rewards = np.asarray(raw.rewards, np.float32).reshape(-1)
        if not np.isfinite(rewards).all():
            raise UserError(f"{where} has rewards that are NaN or infinite.")
        observations, actions = self.observations(raw.observations, where), self.actions(raw.actions, where)
        return Episode(observations, actions, rewards, raw.terminated)


def _starts(part: Part) -> np.ndarray:
    return np.array(part.starts, np.int32).reshape(part.shape)


class RawEpisode(NamedTuple):
    """An episode of T steps as a set has it: observations [T + 1, ...], actions [T, ...], rewards [T]."""

    observations: Arrays
    actions: np.ndarray
    rewards: np.ndarray
    terminated: bool


# Writing RLDS


class Recorded(NamedTuple):
    """The facts about a shard that was written; lists have a number for each episode."""

    returns: list[float]
    lengths: list[int]
    num_bytes: int


def write_shard(path: Path, spaces: Spaces, episodes: Sequence[Episode], first: int) -> Recorded:
    """Writes a shard of an RLDS set whole or not at all; `first` is the number of its first episode.

    Raises OSError.
    """
    tfds = import_tfds()
    features = spaces.features(tfds)
    serializer = tfds.core.example_serializer.ExampleSerializer(features.get_serialized_info())
    size = 0
    with (
        files.replacing(path) as staged,
        files.tensorflow_writes(),
        tf.io.TFRecordWriter(str(staged)) as file,
    ):
        for number, episode in enumerate(episodes, start=first):
            steps = _encoded(_steps(spaces, episode), features["steps"].feature)
            record = serializer.serialize_example({"steps": steps, "episode_id": np.int64(number)})
            # The order of the fields is then always the same.
            record = tf.train.Example.FromString(record).SerializeToString(deterministic=True)
            file.write(record)
            size += len(record)
    returns = [float(episode.rewards.sum(dtype=np.float64)) for episode in episodes]
    return Recorded(returns, [len(episode.rewards) for episode in episodes], size)


def _steps(spaces: Spaces, episode: Episode) -> dict[str, Any]:
    """The steps of an episode as RLDS has them, arrays [T + 1, ...]."""
    length = len(episode.rewards)
    actions = np.concatenate([episode.actions, np.zeros_like(episode.actions[:1])])
    at = np.arange(length + 1)
    ended = (at >= length - 1) & episode.terminated
    return {
        "observation": spaces.shown(episode.observations),
        "action": spaces.taken(actions),
        "reward": np.append(episode.rewards, np.float32(0)),
        "discount": np.where(ended, np.float32(0), np.float32(1)),
        "is_first": at == 0,
        "is_last": at == length,
        "is_terminal": (at == length) & episode.terminated,
    }


def _encoded(arrays: Arrays, features: Any) -> Arrays:
    """The arrays, with each image as a PNG."""
    if isinstance(arrays, dict):
        return {name: _encoded(array, features[name]) for name, array in arrays.items()}
    if type(features).__name__ == "Image":
        return [tf.io.encode_png(image).numpy() for image in arrays]
    return arrays


def actions_in_words(greedy: bool, epsilon: float | None) -> str:
    """The actions of a policy in words: drawn, or the most likely ones, perhaps with a uniform share."""
    if epsilon is not None:
        return f"greedy with epsilon {epsilon:g}"
    return "greedy" if greedy else "sampled"


@dataclass
class Manifest:
    """The files that describe a set of `tfrl.collect`; `save` writes them after a shard.

    Attributes:
      folder: of the set.
      name: of the set, for tensorflow-datasets.
      about: what decides its episodes, as JSON values by name.
      shards: the facts about its shards.
    """

    folder: Path
    name: str
    about: Mapping[str, Any]
    shards: list[Recorded] = field(default_factory=list)

    @classmethod
    def of(cls, folder: Path, env: str, about: Mapping[str, Any]) -> Manifest:
        """The manifest of a new set, or of the one in the folder, which goes on.

        Raises UserError if the folder has another set, or other files.
        """
        name = re.sub(r"\W", "_", registry.file_name(env)).lower()
        manifest = cls(folder, f"{name}_episodes", json.loads(json.dumps(about)))
        found = read_json(folder / METADATA_FILE)
        if found is None or "about" not in found:
            ours = ("features.json", FACTS_FILE)  # and a first shard, if a process was killed after it
            there = [file.name for file in folder.iterdir()] if folder.is_dir() else []
            if not (folder.exists() and not folder.is_dir()) and all(
                name in ours or name.startswith((".", f"{manifest.name}-train")) for name in there
            ):
                return manifest
            raise UserError(f"{folder} exists already, and has no set of tfrl.collect; give another --out.")
        earlier = found["about"]
        if earlier.get("epsilon") is not None:  # older versions called these actions sampled
            earlier["actions"] = actions_in_words(True, earlier["epsilon"])
        for key, value in manifest.about.items():
            if (there := earlier.get(key)) != value:
                raise UserError(
                    f"{folder} has a set with another {key.replace('_', ' ')}: {there} there, {value} here; "
                    "give the same settings to continue it, or another --out."
                )
        # The counts of tensorflow-datasets are written last.
        info = read_json(folder / INFO_FILE) or {"splits": []}
        counted = len(info["splits"][0]["shardLengths"]) if info["splits"] else 0
        manifest.shards = [Recorded(**shard) for shard in found["shards"][:counted]]
        return manifest

    def shard(self, number: int) -> Path:
        """The file of a shard."""
        return self.folder / f"{self.name}-train.tfrecord-{number:05d}"

    @property
    def episodes(self) -> int:
        """The number of episodes."""
        return sum(len(shard.lengths) for shard in self.shards)

    @property
    def steps(self) -> int:
        """The number of env steps."""
        return sum(sum(shard.lengths) for shard in self.shards)

    def save(self, spaces: Spaces, facts: str | None) -> None:
        """Writes all of them; `facts` are those of `registry.facts_text`. Raises OSError."""
        features = self.folder / "features.json"
        if not features.exists():
            files.write(
                features,
                json.dumps(spaces.features(import_tfds()).to_json(), indent=2, sort_keys=True) + "\n",
            )
        if facts is not None and not (self.folder / FACTS_FILE).exists():
            files.write(self.folder / FACTS_FILE, facts)
        returns = [value for shard in self.shards for value in shard.returns]
        content = {
            "tfrl": __version__,
            **self.about,
            "episodes": self.episodes,
            "steps": self.steps,
            "return_mean": float(np.mean(returns)),
            "about": self.about,
            "shards": [shard._asdict() for shard in self.shards],
        }
        files.write(self.folder / METADATA_FILE, json.dumps(content) + "\n")
        split = {
            "name": "train",
            "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_INDEX}",
            "shardLengths": [str(len(shard.lengths)) for shard in self.shards],
            "numBytes": str(sum(shard.num_bytes for shard in self.shards)),
        }
        info = {
            "name": self.name,
            "version": "1.0.0",
            "fileFormat": "tfrecord",
            "description": f"Episodes of {self.about['env']} in the format of RLDS, collected by tfrl. "
            "Actions are those of the env. The observation after a terminal action is not known: it is the "
            "last one again.",
            "splits": [split],
        }
        files.write(self.folder / INFO_FILE, json.dumps(info, indent=2) + "\n")


# Reading


@dataclass(frozen=True)
class Shard:
    """A part of a set.

    Attributes:
      name: the file, and the place in it, for messages.
      num_bytes: its share of the file, about.
      raw: reads its episodes. Raises UserError if the file is damaged.
    """

    name: str
    num_bytes: int
    raw: Callable[[], Iterator[RawEpisode]]

    def episodes(self, spaces: Spaces) -> Iterator[Episode]:
        """Its episodes as an agent sees them; episodes without a step are left out. Raises UserError."""
        for raw in self.raw():
            if len(raw.rewards):
                yield spaces.episode(raw, self.name)


@dataclass(frozen=True)
class RecordedSet:
    """A set of episodes.

    Attributes:
      name: as the user gave it.
      env: the id of its env; None if the set does not name it.
      shards: its parts.
    """

    name: str
    env: str | None
    shards: Sequence[Shard]


_VERSION = re.compile(r"\d+\.\d+\.\d+").fullmatch


def names_in(dataset: str) -> list[str]:
    """The names of the sets of a setting; commas separate them."""
    return [dataset] if Path(dataset).exists() else [name.strip() for name in dataset.split(",")]


def check_set(dataset: str, called: str = "--dataset") -> None:
    """Raises UserError if a name is no set that can be here. Needs no TensorFlow, and reads no episode."""
    for name in names_in(dataset):
        if not name:
            raise UserError(f"{called} {dataset!r} has an empty name.")
        _check_one(name, called)


def _check_one(dataset: str, called: str) -> None:
    path = Path(dataset)
    if dataset.startswith(MINARI) or (path / MINARI_FILE).is_file():
        if importlib.util.find_spec("minari") is None:
            raise UserError(
                f"{called} {dataset} needs Minari, which is not installed: {how_to_install('minari')}."
            )
    elif path.exists() and not path.is_dir():
        raise UserError(f"{called} {dataset} is a file; give the folder of a set.")
    elif path.is_dir() and _rlds_folder(path) is None:
        raise UserError(
            f"{called} {dataset} has no set: neither {INFO_FILE} of an RLDS set nor {MINARI_FILE} of a "
            "Minari set."
        )
    elif not path.exists() and (path.is_absolute() or dataset.startswith(".")):
        raise UserError(f"{called} {dataset} does not exist.")


def _rlds_folder(path: Path) -> Path | None:
    """The folder with the files of an RLDS set: `path`, or the newest version of the only set inside.

    Raises UserError if there are several sets.
    """
    if (path / INFO_FILE).is_file():
        return path
    found = [file.parent for depth in ("*", "*/*") for file in sorted(path.glob(f"{depth}/{INFO_FILE}"))]
    versions = {folder: [int(n) for n in folder.name.split(".")] for folder in found if _VERSION(folder.name)}
    sets = {folder.parent if folder in versions else folder for folder in found}
    if len(sets) > 1:
        first, second, *more = sorted(map(str, sets))
        others = f" and {len(more)} more" if more else ""
        raise UserError(f"{path} has several sets: {first}, {second}{others}; name those that you want.")
    return max(found, key=lambda folder: versions.get(folder, []), default=None)


def open_set(dataset: str, split: str = "train", called: str = "--dataset") -> RecordedSet:
    """Opens the set with this name: a folder, a set of tensorflow-datasets, `minari:ID`, or several as one.

    Args:
      dataset: the name.
      split: the split of an RLDS set.
      called: the flag that gave the name, for errors.

    Raises UserError if there is none, if it has no episodes, or if several are of different envs.
    """
    check_set(dataset, called)
    found = [_open_one(name, split, called) for name in names_in(dataset)]
    _check_one_env({one.name: one.env for one in found})
    return RecordedSet(dataset, found[0].env, [shard for one in found for shard in one.shards])


def _check_one_env(envs: Mapping[str, str | None]) -> None:
    """Raises UserError if sets are of different envs, which `envs` has by the names of the sets."""
    names = {env: name for name, env in envs.items()}
    if len(names) > 1:
        (first, name), (second, other), *_ = names.items()
        raise UserError(
            f"{name} was recorded in {first or 'an env that it does not name'}, and {other} in {second}."
        )


def _open_one(dataset: str, split: str, called: str) -> RecordedSet:
    is_minari = dataset.startswith(MINARI) or (Path(dataset) / MINARI_FILE).is_file()
    found = _open_minari(dataset, called) if is_minari else _open_rlds(dataset, split, called)
    if not found.shards:
        raise UserError(f"{dataset} has no episodes.")
    return found


def _open_rlds(dataset: str, split: str, called: str) -> RecordedSet:
    tfds, folder = import_tfds(), _rlds_folder(Path(dataset))
    try:
        if folder is not None:
            builder = tfds.builder_from_directory(str(folder))
        else:
            builder = tfds.builder(dataset, try_gcs=False)
    except Exception as error:  # of many classes, by what is wrong
        reason = (
            str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
        )
        raise UserError(f"{called} {dataset} cannot be opened by tensorflow-datasets: {reason}.") from None
    if folder is None and not Path(str(builder.data_path)).exists():
        raise UserError(
            f"{called} {dataset} is not on this machine: tfds.builder({dataset!r}).download_and_prepare() "
            f"makes it in {builder.data_path}."
        )
    info = builder.info
    if split not in info.splits:
        known = ", ".join(info.splits) or "none"
        raise UserError(
            f"{dataset} has no split {split!r}; it has {known}."
            if info.splits
            else f"{dataset} has no episodes."
        )
    features = info.features
    steps = getattr(features["steps"], "feature", {}) if "steps" in features else {}
    for name in _FIELDS:
        if name not in steps:
            raise UserError(f"{dataset} is no RLDS set: its examples have no steps/{name}.")
    # A set of SequentialWriter names no file format, which then is TFRecord.
    adapter = tfds.core.file_adapters.ADAPTER_FOR_FORMAT[
        info.file_format or tfds.core.file_adapters.FileFormat.TFRECORD
    ]
    total, episodes = info.splits[split].num_bytes, max(1, info.splits[split].num_examples)
    shards = [
        Shard(
            str(one.filename),
            int(total * one.examples_in_shard / episodes),
            functools.partial(
                _read_rlds, tfds, adapter, info.features, str(one.filename), one.examples_in_shard
            ),
        )
        for one in info.splits[split].file_instructions
    ]
    about = read_json(folder / METADATA_FILE) if folder is not None else None
    return RecordedSet(dataset, (about or {}).get("env"), shards)


def _read_rlds(tfds: Any, adapter: Any, features: Any, file: str, expected: int) -> Iterator[RawEpisode]:
    """The episodes of a file."""
    decoders = {"steps": tfds.decode.SkipDecoding()}
    steps = features["steps"].feature

    def parsed(record: Any) -> Any:
        example = features.deserialize_example(record, decoders=decoders)["steps"]
        return {name: _decoded(example[name], steps[name]) for name in _FIELDS}

    count = 0
    try:
        with tf.device("/cpu:0"):
            records = adapter.make_tf_data(file).map(parsed, num_parallel_calls=2, deterministic=True)
            for episode in records.prefetch(4).as_numpy_iterator():
                count += 1
                yield _raw(episode)
    except tf.errors.NotFoundError:
        raise UserError(f"{file} is missing.") from None
    except (tf.errors.OpError, ValueError) as error:
        message = getattr(error, "message", str(error)).splitlines()[0]
        raise UserError(f"{file} is damaged at episode {count}: {message[:120]}.") from None
    if count != expected:
        raise UserError(f"{file} is damaged: it has {count} episodes, and {INFO_FILE} says {expected}.")


def _decoded(array: Any, feature: Any) -> Any:
    """Images [T, H, W, C] of encoded ones, in a nest of features."""
    if isinstance(array, dict):
        return {name: _decoded(inner, feature[name]) for name, inner in array.items()}
    if array.dtype == tf.string and type(feature).__name__ == "Image":
        dtype = feature.np_dtype if hasattr(feature, "np_dtype") else np.uint8
        signature = tf.TensorSpec(feature.shape, dtype)
        return tf.map_fn(
            lambda image: tf.io.decode_image(image, channels=feature.shape[-1] or 0, expand_animations=False),
            array,
            fn_output_signature=signature,
        )
    return array


def _raw(steps: Mapping[str, Any]) -> RawEpisode:
    """An episode of the steps of RLDS. If none is the last one, the episode is cut off at its last step."""
    last = np.flatnonzero(steps["is_last"])
    end = int(last[0]) if last.size else len(steps["is_last"]) - 1
    if end < 1:
        return RawEpisode(steps["observation"], steps["action"][:0], steps["reward"][:0], False)
    observations = _map(lambda array: array[: end + 1], steps["observation"])
    return RawEpisode(
        observations, steps["action"][:end], steps["reward"][:end], bool(steps["is_terminal"][end])
    )


def _map(function: Callable[[Any], Any], arrays: Arrays) -> Arrays:
    if isinstance(arrays, Mapping):
        return {str(name): _map(function, array) for name, array in arrays.items()}
    if isinstance(arrays, tuple):
        return {str(i): _map(function, array) for i, array in enumerate(arrays)}
    return function(arrays)


def _minari_set(dataset: str, called: str) -> tuple[Any, int, Any]:
    """A Minari set, the number of its episodes, and the EnvSpec of the env of evaluations or None."""
    try:
        import minari
    except ImportError:
        raise UserError(
            f"{called} {dataset} needs Minari, which is not installed: {how_to_install('minari')}."
        ) from None
    name = dataset.removeprefix(MINARI)
    try:
        found = (
            minari.MinariDataset(Path(name) / "data") if Path(name).is_dir() else minari.load_dataset(name)
        )
        # Minari has no public name for the first.
        spec = getattr(found, "_eval_env_spec", None) or found.spec.env_spec
        return found, found.total_episodes, spec
    except Exception as error:  # of many classes, by what is wrong
        reason = (
            str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
        )
        raise UserError(f"{called} {dataset} cannot be opened by Minari: {reason}.") from None


def _open_minari(dataset: str, called: str = "--dataset") -> RecordedSet:
    found, total, env = _minari_set(dataset, called)
    file = str(Path(str(found.storage.data_path)) / MINARI_FILE.name)
    size = Path(file).stat().st_size if Path(file).is_file() else 0

    def read(begin: int, end: int) -> Iterator[RawEpisode]:
        number = begin
        try:
            for one in found.iterate_episodes(range(begin, end)):
                observations = _map(np.asarray, one.observations)
                yield RawEpisode(
                    observations, _plain(one.actions), one.rewards, bool(one.terminations[-1:].any())
                )
                number += 1
        except (OSError, KeyError, ValueError) as error:
            raise UserError(
                f"{file} is damaged at episode {number}: {str(error).splitlines()[0][:120]}."
            ) from None

    begins = range(0, total, _MINARI_EPISODES)
    ends = [min(total, begin + _MINARI_EPISODES) for begin in begins]
    shards = [
        Shard(file, size * (end - begin) // max(1, total), functools.partial(read, begin, end))
        for begin, end in zip(begins, ends, strict=True)
    ]
    return RecordedSet(dataset, None if env is None else env.id, shards)


def _plain(actions: Arrays) -> np.ndarray:
    if isinstance(actions, Mapping | tuple):
        raise ValueError("its actions are several arrays, which no algorithm here takes")
    return np.asarray(actions)


@functools.cache
def import_tfds() -> Any:
    """Imports tensorflow-datasets, and TensorFlow with it, which looks for GPUs."""
    import tensorflow  # noqa: ICN001 - which tensorflow-datasets imports later, and noisily
    import tensorflow_datasets

    tensorflow.config.list_physical_devices()
    tensorflow.constant(0)

    return tensorflow_datasets


# The settings of the env of a set


def env_settings(dataset: str) -> dict[str, dict[str, Any]]:
    """Returns the `env` and the settings of this env that each set names, by the name of the set.

    `dataset` is the setting. Sets of `tfrl.collect` and Minari sets name settings. Needs no TensorFlow, and
    reads no episode.

    Raises UserError if a set is not here, or if the sets are of different envs.
    """
    check_set(dataset)
    found = {name: _about_env(name) for name in names_in(dataset)}
    _check_one_env({name: about.get("env") for name, about in found.items()})
    return found


def _about_env(dataset: str) -> dict[str, Any]:
    path = Path(dataset)
    if dataset.startswith(MINARI) or (path / MINARI_FILE).is_file():
        _, _, spec = _minari_set(dataset, "--dataset")
        return {} if spec is None else _of_spec(spec)
    folder = _rlds_folder(path)
    return (read_json(folder / METADATA_FILE) or {}) if folder is not None else {}


def _of_spec(spec: Any) -> dict[str, Any]:
    """The `env` of an EnvSpec of Gymnasium, and its settings; {} and None are those of the id."""
    import gymnasium

    known = gymnasium.registry.get(spec.id, spec)
    plain = {} if known is spec else known.kwargs
    given = {k: v for k, v in spec.kwargs.items() if k not in plain or str(v) != str(plain[k])}
    given.pop("render_mode", None)
    limit = None if spec.max_episode_steps == known.max_episode_steps else spec.max_episode_steps
    limit = None if limit is None else int(limit)  # some sets have 1e6
    return {"env": spec.id, "env_kwargs": given, "max_episode_steps": limit}


def in_common(of_sets: Mapping[str, Mapping[str, Any]], settings: Iterable[str]) -> dict[str, Any]:
    """The values of these settings in the results of `env_settings`. Raises UserError if two sets differ."""
    found: dict[str, Any] = {}
    for setting in settings:
        values = {name: about[setting] for name, about in of_sets.items() if setting in about}
        for name, value in values.items():
            first, found[setting] = next(iter(values.items()))
            if value != found[setting] and not (
                setting == "frame_skip" and _frames(of_sets[first]) == _frames(of_sets[name])
            ):
                raise UserError(
                    f"{first} was recorded with {_as_flag(setting, found[setting])}, and {name} with "
                    f"{_as_flag(setting, value)}; give {flag(setting)} for the evaluations, or equal sets."
                )
    return found


def _frames(about: Mapping[str, Any]) -> int:
    """The frames of an env step of a result of `env_settings`."""
    env_kwargs, frame_skip = about.get("env_kwargs") or {}, about.get("frame_skip")
    task: Any = SimpleNamespace(env=about["env"], env_kwargs=env_kwargs, frame_skip=frame_skip)
    return registry.frames_per_step(task)


def other_settings(dataset: str, task: Any) -> Iterator[str]:
    """Sentences about sets of the env of a task that were recorded with other settings of this env.

    `env_kwargs`, `frame_skip` and `distribution_mode` decide what steps do. `task` is a dataclass with the
    fields of `EnvSettings`. Raises UserError if a set is not here.
    """

    def frames(skip: int | None) -> int:
        return registry.frames_per_step(dataclasses.replace(task, frame_skip=skip))

    for name, about in env_settings(dataset).items():
        if registry.own_name(about.get("env", "")) != task.env:
            continue
        for setting in ("env_kwargs", "frame_skip", "distribution_mode"):
            mine = getattr(task, setting)
            theirs = about.get(setting, mine)
            if theirs != mine and (setting != "frame_skip" or frames(theirs) != frames(mine)):
                yield (
                    f"{name} was recorded with {_as_flag(setting, theirs)}, and this run has "
                    f"{_as_flag(setting, mine)}."
                )


def _as_flag(setting: str, value: Any) -> str:
    if value is None:
        return f"no {flag(setting)}"
    text = json.dumps(value) if isinstance(value, dict) else str(value)
    return f"{flag(setting)} {text if len(text) <= 60 else f'{text[:57]}...'}"


# The spaces of a set whose env is not here


def remember_spaces(dataset: str, split: str = "train") -> None:
    """Makes the spaces of a set those of the env `none`. Raises UserError.

    Those of a set of tfrl are in a file. Another set is read by a process of its own, because TensorFlow must
    not be imported before the run is set up.
    """
    check_set(dataset)
    folder = _rlds_folder(Path(names_in(dataset)[0]))
    text = None if folder is None else files.read_text(folder / FACTS_FILE)
    if text is None:
        command = [sys.executable, "-m", "tfrl.collect", "--describe", dataset, "--facts", "--split", split]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode:
            sentence = found.stderr.strip().splitlines()[-1:] or ["it ended without a word"]
            raise UserError(sentence[0].removeprefix("error: "))
        text = found.stdout
    env_facts.remember_none(text)


def facts_of(dataset: str, split: str) -> str:
    """The facts about the env of a set as JSON, found in all of its episodes; imports TensorFlow."""
    found = open_set(dataset, split)
    shown: dict[tuple[str, ...], list[np.ndarray]] = {}
    bounds: list[np.ndarray] = []
    parts: dict[tuple[str, ...], np.ndarray] = {}
    kind = "f"
    size: tuple[int, ...] = (1,)
    for shard in found.shards:
        for raw in shard.raw():
            for keys, array in _leaves(raw.observations):
                parts[keys] = array
                if array.dtype.kind in "iu" and array.dtype != np.uint8:
                    shown.setdefault(keys, []).append(array.reshape(len(array), -1).max(0))
            if len(raw.actions):
                kind, size = raw.actions.dtype.kind, raw.actions.shape[1:]
                flat = raw.actions.reshape(len(raw.actions), -1)
                bounds += [flat.min(0), flat.max(0)]
    if not bounds:
        raise UserError(f"{dataset} has no episodes.")
    spec = _observation_spec(parts, {keys: np.max(most, axis=0) for keys, most in shown.items()})
    low, high = np.min(bounds, axis=0), np.max(bounds, axis=0)
    action: ActionSpec
    if kind == "f":
        inside = bool((low >= -1).all() and (high <= 1).all())
        low, high = (-np.ones(low.shape), np.ones(low.shape)) if inside else (low, high)
        action = Box(tuple(map(float, low)), tuple(map(float, high)))
    elif size:
        counts = tuple(int(n) + 1 for n in high)
        action = MultiDiscrete(counts, (0,) * len(counts))
    else:
        action = Discrete(int(high[0]) + 1)
    return env_facts.text_of(NO_ENV, {}, Facts(spec, action, "", 30.0, with_opengl=False, saves_state=False))


def _leaves(arrays: Arrays, keys: tuple[str, ...] = ()) -> Iterable[tuple[tuple[str, ...], np.ndarray]]:
    if isinstance(arrays, dict):
        for name, inner in arrays.items():
            yield from _leaves(inner, (*keys, name))
    else:
        yield keys, arrays


def _observation_spec(
    arrays: Mapping[tuple[str, ...], np.ndarray], most: Mapping[tuple[str, ...], np.ndarray]
) -> ArraySpec:
    """The spec of observations like these arrays [T, ...] with these largest whole numbers."""
    parts = []
    for keys, array in arrays.items():
        shape, dtype = array.shape[1:], str(array.dtype)
        if len(shape) == 3 and array.dtype == np.uint8:
            parts.append(Part(keys, IMAGE, shape, dtype))
        elif keys in most:
            counts = tuple(int(n) + 1 for n in most[keys])
            parts.append(Part(keys, CHOICES, shape or (1,), dtype, counts=counts, starts=(0,) * len(counts)))
        else:
            parts.append(Part(keys, NUMBERS, shape or (1,), "float32"))
    only = parts[0]
    if len(parts) == 1 and not only.keys and only.kind == IMAGE:
        return ArraySpec(only.shape, "uint8")
    if len(parts) == 1 and not only.keys and only.kind == NUMBERS and len(only.shape) == 1:
        return ArraySpec(only.shape, "float32")
    return ArraySpec.of_parts(parts)
