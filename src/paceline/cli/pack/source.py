"""Inputs of `paceline pack`: manifests, packed files, a task or a data set."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from paceline.cli.pack.options import PackOptions, PackUsage, refuse_idle, rows_of
from paceline.config.load import load
from paceline.config.train_command import POSITIONAL, task_settings, train_options
from paceline.core import plugins
from paceline.core.cloud.address import local_path
from paceline.core.terminal import tell
from paceline.core.units import counted, plural
from paceline.data.packed.errors import is_packed

if TYPE_CHECKING:
    from paceline.data.packed.pack import Source
    from paceline.recipes.speech.data.packing import Features

_OF_SPEECH = ("sample_rate", "features", "network", "trim_silence")
_OF_TASKS = ("part", "task_config")
_OF_RANDOM = ("epoch", "seed")
"""Options that have an effect only there."""


def source_of(options: PackOptions, words: Sequence[str]) -> Source:
    """Return the source of packing that the words name."""
    for word in words:
        if word.endswith(".py"):
            raise PackUsage(f"{word}: nothing in it is named", f"type {word}:NAME; {_available(word)}")
    recipes = plugins.names("recipes")
    tasks = [word for word in words if word in recipes or ".py:" in word]
    if tasks and len(words) > 1:
        raise PackUsage(
            f"{tasks[0]} is a task, and {counted(len(words) - 1, 'more input')} {plural(len(words) - 1, 'is')} given",
            "pack a task by itself",
        )
    if tasks:
        refuse_idle(options, "on the data of a task", _OF_SPEECH)
        data = _data(options, tasks[0])
        return _samples(options, data, tasks[0], f"{options.part}:{_code(options, tasks[0])}")
    if all(map(is_packed, words)) and not all(map(_is_speech, words)):
        if len(words) > 1:
            raise PackUsage("several packed files that are not speech", "pack them one by one")
        from paceline.data.packed.dataset import PackedDataset

        refuse_idle(options, "on packed data that is not speech", {*_OF_SPEECH, *_OF_TASKS, *_OF_RANDOM})
        return _samples(options, PackedDataset(words[0]), words[0])
    if _are_texts(words):
        return _parallel(options, words)
    return _speech(options, words)


def _are_texts(words: Sequence[str]) -> bool:
    """Return True for files of pairs (.tsv, .jsonl), or for text files of two languages (`sides`)."""
    from paceline.recipes.translation.text.parallel import has_pairs

    names = [_plain_name(word) for word in words]
    if all(name.endswith((".json", ".jsonl")) for name in names):
        return has_pairs(local_path(words[0]))
    if any(name.endswith((".json", ".jsonl", ".nemo", ".tar")) or is_packed(Path(name)) for name in names):
        return False
    return all(name.endswith(".tsv") for name in names) or len(names) == 2 or len(_endings(words)) == 2


def _endings(words: Sequence[str]) -> list[str]:
    """Return the endings of the names of files, without `.gz`."""
    return list(dict.fromkeys(Path(_plain_name(word)).suffix for word in words))


def sides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return text files, and their translations in the same order: two files, or as many of one ending as of another.

    >>> sides(["a.en", "a.de", "b.en", "b.de"])
    (['a.en', 'b.en'], ['a.de', 'b.de'])
    """
    if len(words) == 2:
        return [words[0]], [words[1]]
    first, second = ([word for word in words if _endings([word]) == [ending]] for ending in _endings(words))
    if len(first) != len(second):
        counts = ", ".join(f"{len(files)} {_endings(files)[0] or 'without an ending'}" for files in (first, second))
        raise PackUsage(f"text files of two languages, but not as many of each ({counts})", "name both files of a pair")
    return first, second


def _plain_name(word: str) -> str:
    return Path(word).name.lower().removesuffix(".gz")


def _parallel(options: PackOptions, words: Sequence[str]) -> Source:
    """Return parallel text, for the recipe `translation`."""
    from paceline.recipes.translation.text.parallel import TextFiles, read_parallel

    refuse_idle(options, "on parallel text", {*_OF_SPEECH, *_OF_TASKS, *_OF_RANDOM})
    if _plain_name(words[0]).endswith((".tsv", ".json", ".jsonl")):
        files = TextFiles("pack", pairs=tuple(map(local_path, words)))
    else:
        sources, targets = (tuple(map(local_path, side)) for side in sides(words))
        files = TextFiles("pack", sources, targets)
    text = read_parallel(files, skip_bad=options.bad_data == "skip")
    for bad in text.bad:
        tell(f"skipped {bad}\n")
    return _samples(options, text, ", ".join(words), text.fingerprint)


def _speech(options: PackOptions, words: Sequence[str]) -> Source:
    from paceline.data.packed.layout import LeftOut
    from paceline.recipes.speech.manifest.read import read_manifests

    try:
        from paceline.recipes.speech.data.pack_source import ManifestSource
    except ModuleNotFoundError as error:  # soundfile, soxr
        hint = "pip install 'paceline[asr]'"
        raise PackUsage(f"audio needs the package {error.name}, which is not installed", hint) from None
    refuse_idle(options, "on manifests and packed speech", {*_OF_TASKS, *_OF_RANDOM})
    if not options.features:
        refuse_idle(options, "without `--features`", {"network"})
    needs_text = options.streams is None or "text" in options.streams
    manifest, reading = read_manifests(words, min_seconds=0.0, bad_data=options.bad_data, needs_text=needs_text)
    for line in reading.lines():
        tell(f"{line}\n")
    rows = rows_of(options, len(manifest), ", ".join(words))
    features = _features(options) if options.features else None
    return ManifestSource(
        manifest.take(rows) if len(rows) < len(manifest) else manifest,
        sample_rate=options.sample_rate if features is None else features.sample_rate,
        streams=options.streams,
        features=features,
        trim=options.trim_silence,
        skip_bad=options.bad_data == "skip",
        bad_lines=LeftOut(reading.num_bad, tuple(map(str, reading.bad))) if reading.num_bad else None,
    )


def _features(options: PackOptions) -> Features:
    from paceline.recipes.speech.data.packing import Features

    features = Features(options.network)
    if options.sample_rate not in (None, features.sample_rate):
        what = f"`--sample-rate {options.sample_rate}`: the front end of {options.network} hears"
        hint = "leave it out, or name a network of that rate with `--network`"
        raise PackUsage(f"{what} {features.sample_rate} Hz", hint)
    return features


def _samples(options: PackOptions, data: Any, name: str, version: str = "") -> Source:
    """`version`: differs where the same name means other data."""
    from paceline.data.dataset import DatasetTraits
    from paceline.data.packed.from_samples import SampleSource

    if not DatasetTraits(data).is_map_style:
        what = "its data can only be iterated" if hasattr(data, "__iter__") else f"is {_kind(data)}, and no data set"
        raise PackUsage(f"{name}: {what}", "give it `__getitem__` and `__len__`")
    return SampleSource(
        data,
        rows_of(options, len(data), name),
        name=f"{name}:{version}",
        seed=options.seed,
        epoch=options.epoch - 1,
        streams=options.streams,
        skip_bad=options.bad_data == "skip",
    )


def _kind(data: Any) -> str:
    return "None" if data is None else f"of type {type(data).__name__}"


def _data(options: PackOptions, name: str) -> Any:
    """Return the data of `file.py:name`: a data set, the result of a function, or the data of a task."""
    from paceline.core.user_file import guarded
    from paceline.train import find_task as tasks
    from paceline.train.task import Task

    path, _, member = name.rpartition(":")
    if not path:
        return _task_data(options, name)
    module = tasks.import_file(Path(path))
    if not hasattr(module, member):
        raise PackUsage(f"{path} has no {member!r}", _available(path, member))
    value = getattr(module, member)
    if isinstance(value, type) and issubclass(value, Task):
        return _task_data(options, name)
    refuse_idle(options, "on a data set that is no task", _OF_TASKS)
    return guarded(Path(path), f"{member}() is called", value) if callable(value) else value


def _available(path: str, member: str = "") -> str:
    """Return a hint at what a file has to pack: tasks, classes and functions that it defines, and sequences."""
    from paceline.train import find_task as tasks

    module = tasks.import_file(Path(path))
    names = [name for name, value in vars(module).items() if not name.startswith("_") and _may_be_data(value, module)]
    nearest = difflib.get_close_matches(member, names, n=1)
    guess = f"did you mean {path}:{nearest[0]}? " if nearest else ""
    return f"{guess}there are: {', '.join(names)}" if names else "it has no task, no function and no data set"


def _may_be_data(value: Any, module: ModuleType) -> bool:
    if callable(value):
        return getattr(value, "__module__", None) == module.__name__
    return hasattr(value, "__getitem__") and hasattr(value, "__len__") and not isinstance(value, str | bytes | dict)


def _code(options: PackOptions, name: str) -> str:
    """Return a digest of the files that define the data: changed, they make other samples of the same names."""
    import xxhash

    paths = [Path(name.rpartition(":")[0]), options.task_config]  # a recipe has no file of the user's
    return "-".join(
        xxhash.xxh3_64_hexdigest(path.read_bytes()) for path in paths if path is not None and path.is_file()
    )


def _task_data(options: PackOptions, name: str) -> Any:
    """Return the data of a task, made as training would make it."""
    from paceline.train.find_task import load_task
    from paceline.train.task import Surroundings, stages_of
    from paceline.world.discover.environment import discover
    from paceline.world.start import start

    if name in ("asr", "speech"):
        raise PackUsage("the recipe 'asr' is packed from its manifests", "type `paceline pack train.json train.h5`")
    task = load_task(name)
    # The length of training does not matter here, but every task needs one.
    config = [] if options.task_config is None else ["--config", str(options.task_config)]
    words = [name, *config, "--epochs", "1"]
    settings = task_settings(
        load(train_options(task.Settings), words, prog="paceline pack", positional=POSITIONAL), task.Settings
    )
    task.attach(Surroundings(settings, start(discover({}), device="cpu"), print))
    packed = task.pack_data()
    if packed:
        part = options.part or next(iter(packed))
        if part not in packed:
            raise PackUsage(f"{name} has no data {part!r}", f"there are: {', '.join(packed)}")
        return packed[part]
    stages = {stage.name: stage.data for stage in stages_of(task)}
    part = options.part or next(iter(stages))
    sets = stages if part in stages else task.val_data()
    if part not in sets:
        raise PackUsage(f"{name} has no data {part!r}", f"there are: {', '.join([*stages, *task.val_data()])}")
    return sets[part]() if callable(sets[part]) else sets[part]


def _is_speech(word: str) -> bool:
    from paceline.data.packed.reader import open_packed

    packed = open_packed(local_path(word))
    return packed.of_kind("audio") is not None and packed.sample_rate is not None
