"""`paceline pack IN... OUT.h5`: manifests, other packed files or a task's data as HDF5 that is read at memory speed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field

from paceline.cli.recipes import RECIPES
from paceline.config.errors import PacelineError
from paceline.config.load import load
from paceline.config.paths import near
from paceline.config.settings import Positive, Section
from paceline.data.hdf_errors import PACKED, is_packed
from paceline.observe.bars import SideBar

if TYPE_CHECKING:
    from paceline.data.pack import Source

INTERRUPTED = 130
_UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def to_bytes(size: str) -> int:
    """`512MB` as a number."""
    for unit, factor in _UNITS.items():
        number = size.lower().removesuffix(unit.lower()).strip()
        if number != size.lower() and number.replace(".", "", 1).isdigit() and float(number) > 0:
            return int(float(number) * factor)
    raise ValueError(f"is no size: give it as 500MB, 4GB, ({', '.join(_UNITS)})")


def _is_size(size: str) -> str:
    to_bytes(size)
    return size


class PackOptions(Section):
    """Pack data into HDF5 that is read at memory speed. Stopped, even by a kill, the same command goes on."""

    paths: tuple[str, ...] = ()
    """What to pack and, last, the file to write: manifests, packed files, or a task (a recipe's name or
    `path/to/file.py:ClassName`; also a function there that returns a data set). With `--info` and `--verify` packed
    files, with `--extract` one, and a folder."""
    info: bool = False
    """Show what packed files hold."""
    verify: bool = False
    """Read every byte of packed files and compare it with what was written; the exit code is 1 if one differs."""
    extract: bool = False
    """Write the rows of a packed file into a folder: WAV files and a manifest, or arrays."""
    layout: Literal["paceline", "returnn"] = "paceline"
    """`returnn`: RETURNN's HDFDataset reads the file, too; its stream `data` is the first one."""
    streams: tuple[str, ...] | None = None
    """Only these: `audio`, `text`, or the names that a sample of the task has."""
    start_seq: Annotated[int, Field(ge=0)] = 0
    """The first row, counted from 0."""
    end_seq: Annotated[int, Field(ge=0)] | None = None
    """The last row, counted from 0: it is packed, too, as RETURNN's hdf_dump does."""
    epoch: Positive = 1
    """For a task whose samples are random: they are drawn as in this epoch."""
    seed: int = 0
    """For a task whose samples are random."""
    part: str | None = None
    """Which data of a task: a stage, such as `train`, or a validation set; the first stage if not set."""
    task_config: Path | None = None
    """YAML file with settings of the task."""
    sample_rate: Positive | None = None
    """Hz that all audio gets; its own if not set, which must be one."""
    features: bool = False
    """Log-mels (float32) instead of 16-bit audio."""
    network: str = "quartznet15x5"
    """The network whose front end computes `--features`: a shipped name or a YAML file."""
    bad_data: Literal["stop", "skip"] = "stop"
    """Whether a bad line or recording ends all, or is left out and listed."""
    shard_size: Annotated[str, AfterValidator(_is_size)] = "32GB"
    """Larger data becomes several files of about this size, beside OUT.h5, which then stands for all of them."""
    processes: Positive | None = None
    """That read at a time; as many as there are cores if not set."""
    force: bool = False
    """Replace what is there."""


OPTIONS, POSITIONAL = PackOptions, ("paths",)


class PackUsage(PacelineError):
    """Words that do not say what is to be packed."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.hint = hint


def run(argv: Sequence[str]) -> int:
    options = load(PackOptions, argv, prog="paceline pack", positional=POSITIONAL)
    if not options.paths:
        raise PackUsage("nothing to pack is named", "type `paceline pack train.json train.h5`")
    if options.info + options.verify + options.extract > 1:
        raise PackUsage("more than one of `--info`, `--verify` and `--extract` is given", "give one of them")
    if options.info:
        return _info(options)
    if options.verify:
        return _verify(options)
    if options.extract:
        return _extract(options)
    try:
        return _pack(options)
    except KeyboardInterrupt:
        sys.stderr.write("stopped; the same command goes on where it was\n")
        return INTERRUPTED


def _pack(options: PackOptions) -> int:
    from paceline.data.bad_line import MOST_SHOWN
    from paceline.data.hdf_layout import h5py_or_error
    from paceline.data.pack import pack
    from paceline.data.pack_processes import default_processes

    h5py_or_error()
    *words, last = options.paths
    if not words or not is_packed(last):
        hint = (
            f"name the file to write last, with an ending of {', '.join(PACKED)}: `paceline pack train.json train.h5`"
        )
        raise PackUsage(f"{last}: is no name of a packed file" if words else "no file to write is named", hint)
    source = _source(options, [name for word in words for name in word.split(",") if name])
    with SideBar("packing", len(source)) as bar:
        found = pack(
            source,
            Path(last),
            layout=options.layout,
            shard_bytes=to_bytes(options.shard_size),
            processes=options.processes or default_processes(),
            force=options.force,
            progress=bar.show,
        )
    told = [f"skipped {line}" for line in found.skipped[:MOST_SHOWN]]
    if len(found.skipped) > MOST_SHOWN:
        told.append(f"... and {len(found.skipped) - MOST_SHOWN:,} more")
    if found.num_kept:
        told.append(f"{found.num_kept:,} rows were there already, from a packing that was stopped")
    shards = f" in {len(found.files)} shards" if len(found.files) > 1 else ""
    told.append(f"{near(last)}: {found.num_rows:,} rows, {found.nbytes / 1e6:,.1f} MB{shards}, written and compared")
    sys.stdout.write("\n".join(told) + "\n")
    return 0


def _source(options: PackOptions, words: Sequence[str]) -> Source:
    """What the words mean."""
    tasks = [word for word in words if word in RECIPES or ".py:" in word]
    if tasks and len(words) > 1:
        raise PackUsage(f"{tasks[0]} is a task, and {len(words) - 1} more inputs are given", "pack a task by itself")
    if tasks:
        return _samples(options, _data(options, tasks[0]), f"{tasks[0]}:{options.part}:{_code(options, tasks[0])}")
    if all(map(is_packed, words)) and not all(map(_is_speech, words)):
        if len(words) > 1:
            raise PackUsage("several packed files that are not speech", "pack them one by one")
        from paceline.data.hdf_dataset import PackedDataset

        return _samples(options, PackedDataset(words[0]), words[0])
    return _speech(options, words)


def _speech(options: PackOptions, words: Sequence[str]) -> Source:
    from paceline.data.manifest import read_manifests

    try:
        from paceline.data.pack_manifest import ManifestSource
    except ModuleNotFoundError as error:  # soundfile, soxr
        hint = "pip install 'paceline[asr]'"
        raise PackUsage(f"audio needs the package {error.name}, which is not installed", hint) from None
    needs_text = options.streams is None or "text" in options.streams
    manifest, reading = read_manifests(words, min_seconds=0.0, bad_data=options.bad_data, needs_text=needs_text)
    for line in reading.lines():
        sys.stdout.write(f"{line}\n")
    rows = _rows(options, len(manifest))
    features: Any = None
    if options.features:
        from paceline.recipes.asr.packing import Features

        features = Features(options.network)
    return ManifestSource(
        manifest.take(rows) if len(rows) < len(manifest) else manifest,
        sample_rate=features.sample_rate if features is not None else options.sample_rate,
        streams=options.streams,
        features=features,
        about_features=features.about if features is not None else None,
        skip_bad=options.bad_data == "skip",
    )


def _samples(options: PackOptions, data: Any, name: str) -> Source:
    from paceline.data.pack_samples import SampleSource

    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise PackUsage(f"{name}: its data can only be iterated", "give it `__getitem__` and `__len__`")
    rows = _rows(options, len(data))
    return SampleSource(data, rows, name=name, seed=options.seed, epoch=options.epoch - 1, streams=options.streams)


def _data(options: PackOptions, name: str) -> Any:
    """What `file.py:name` is: a data set, a function that returns one, or else a task."""
    from paceline.cli import tasks
    from paceline.train.task import Task

    path, _, member = name.rpartition(":")
    found = getattr(tasks.import_file(Path(path)), member, None) if path else None
    if found is None or (isinstance(found, type) and issubclass(found, Task)):
        return _task_data(options, name)
    return tasks.guarded(Path(path), f"{member}() is called", found) if callable(found) else found


def _code(options: PackOptions, name: str) -> str:
    """Of the files that make the data what it is: changed, they make other samples of the same names."""
    import xxhash

    paths = [Path(name.rpartition(":")[0]), options.task_config]  # a recipe has no file of the user's
    return "-".join(
        xxhash.xxh3_64_hexdigest(path.read_bytes()) for path in paths if path is not None and path.is_file()
    )


def _task_data(options: PackOptions, name: str) -> Any:
    """The data of a task, made as training would make it."""
    from paceline.cli.tasks import load_task
    from paceline.train.task import attach
    from paceline.world.discover import discover
    from paceline.world.start import start

    if name == "asr":
        raise PackUsage("the recipe 'asr' is packed from its manifests", "type `paceline pack train.json train.h5`")
    task = load_task(name)
    # How long to train is of no matter here, and no task can do without an answer.
    config = ["--epochs", "1"] if options.task_config is None else ["--config", str(options.task_config)]
    settings = load(task.Settings, config, prog="paceline pack")
    attach(task, settings, start(discover({}), device="cpu"), print)
    stages = {stage.name: stage.data for stage in task.stages()}
    part = options.part or next(iter(stages))
    sets = stages if part in stages else task.val_data()
    if part not in sets:
        raise PackUsage(f"{name} has no data {part!r}", f"there are: {', '.join([*stages, *task.val_data()])}")
    return sets[part]() if callable(sets[part]) else sets[part]


def _rows(options: PackOptions, number: int) -> range:
    rows = range(number)[options.start_seq : None if options.end_seq is None else options.end_seq + 1]
    if not rows:
        last = "" if options.end_seq is None else f" and `--end-seq {options.end_seq}`"
        hint = f"rows are counted from 0 to {number - 1}"
        raise PackUsage(f"nothing lies between `--start-seq {options.start_seq}`{last}", hint)
    return rows


def _is_speech(word: str) -> bool:
    from paceline.data.hdf import open_packed

    packed = open_packed(Path(word))
    return packed.of_kind("audio") is not None and packed.sample_rate is not None


def _info(options: PackOptions) -> int:
    from paceline.data.hdf import open_packed
    from paceline.data.hdf_info import info

    for path in options.paths:
        sys.stdout.write("\n".join(info(open_packed(Path(path)))) + "\n")
    return 0


def _verify(options: PackOptions) -> int:
    from paceline.data.bad_line import MOST_SHOWN
    from paceline.data.hdf import open_packed
    from paceline.data.hdf_verify import is_verifiable, num_bytes, verify

    code = 0
    for path in options.paths:
        packed = open_packed(Path(path))
        if not is_verifiable(packed):
            hint = f"`paceline pack {path} OUT.h5` makes a file that has some"
            raise PackUsage(f"{near(path)}: has no digests, as Paceline did not write it", hint)
        with SideBar(f"reading {near(path)}", num_bytes(packed)) as bar:
            damages, number = verify(packed, progress=bar.show)
        told = [str(damage) for damage in damages[:MOST_SHOWN]]
        state = f"{len(damages):,} blocks are damaged: pack it again" if damages else "sound"
        told.append(f"{near(path)}: {len(packed):,} rows, {number / 1e6:,.1f} MB read: {state}")
        sys.stdout.write("\n".join(told) + "\n")
        code = code or int(bool(damages))
    return code


def _extract(options: PackOptions) -> int:
    from paceline.data.hdf import open_packed
    from paceline.data.pack_extract import extract

    if len(options.paths) != 2:
        raise PackUsage("a packed file and a folder must be named", "type `paceline pack --extract train.h5 FOLDER`")
    packed, folder = open_packed(Path(options.paths[0])), Path(options.paths[1])
    if folder.exists() and (not folder.is_dir() or os.listdir(folder)) and not options.force:
        raise PackUsage(f"{near(folder)} exists, and is not an empty folder", "name another, or add `--force`")
    rows = _rows(options, len(packed))
    with SideBar("extracting", len(rows)) as bar:
        manifest = extract(packed, folder, rows, bar.show)
    sys.stdout.write(f"{near(manifest)}: {len(rows):,} rows\n")
    return 0
