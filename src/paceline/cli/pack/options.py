"""Options of `paceline pack`, and the check that they go together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from paceline.config.settings import Positive, Section
from paceline.core.errors import PacelineError
from paceline.recipes.speech.manifest.bad_line import MOST_SHOWN

_UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def to_bytes(size: str) -> int:
    """Convert a size such as `512MB`."""
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

    aliases: ClassVar[dict[str, str]] = {"model_config": "network"}

    paths: tuple[str, ...] = ()
    """What to pack and, last, the file to write: manifests, parallel text, packed files, or a task (a recipe's name or
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
    trim_silence: bool = False
    """Without the silence at both ends of recordings; for training with `--trim-silence`, which then reads them as they
    are."""
    features: bool = False
    """Log-mels (float32) instead of 16-bit audio."""
    network: str = "quartznet15x5"
    """The network whose front end computes `--features`: a shipped name or a YAML file."""
    bad_data: Literal["stop", "skip"] = "stop"
    """Whether a bad line, recording or sample, or a damaged row of packed data, ends all, or is left out and listed."""
    shard_size: Annotated[str, AfterValidator(_is_size)] = "32GB"
    """Larger data becomes several files of about this size, beside OUT.h5, which then stands for all of them."""
    processes: Positive | None = None
    """That read at a time; as many as there are cores if not set."""
    force: bool = False
    """Replace what is there; of a folder, with `--extract`, what an extraction has written there before."""


class PackUsage(PacelineError):
    """A command line that does not say what is to be packed."""

    what: str
    advice: str
    sentence = "{what}"
    hint = "{advice}"


def refuse_idle(options: PackOptions, where: str, names: Collection[str]) -> None:
    """Refuse options among `names` that are set and have no effect."""
    is_set = options.model_fields_set & set(names)
    chosen = [name for name in PackOptions.model_fields if name in is_set and getattr(options, name) is not False]
    idle = [f"`--{name.replace('_', '-')}`" for name in chosen]
    if idle:
        has, it = ("has", "it") if len(idle) == 1 else ("have", "them")
        raise PackUsage(f"{', '.join(idle)} {has} no effect {where}", f"leave {it} out")


def rows_of(options: PackOptions, number: int, name: str) -> range:
    """Return those of `number` rows that are wanted."""
    if not number:
        raise PackUsage(f"{name}: holds no rows", "give data with at least one")
    rows = range(number)[options.start_seq : None if options.end_seq is None else options.end_seq + 1]
    if not rows:
        last = "" if options.end_seq is None else f" and `--end-seq {options.end_seq}`"
        hint = f"rows are counted from 0 to {number - 1}"
        raise PackUsage(f"nothing lies between `--start-seq {options.start_seq}`{last}", hint)
    return rows


def skipped_lines(skipped: Sequence[str]) -> list[str]:
    """Return the first skipped rows as they are shown, and the number of the others."""
    lines = [f"skipped {line}" for line in skipped[:MOST_SHOWN]]
    return lines + ([f"... and {len(skipped) - MOST_SHOWN:,} more"] if len(skipped) > MOST_SHOWN else [])
