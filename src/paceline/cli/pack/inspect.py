"""`paceline pack --info`, `--verify` and `--extract`: describe, check and unpack packed files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from paceline.cli.pack.options import PackOptions, PackUsage, refuse_idle, rows_of, skipped_lines
from paceline.core.cloud.address import local_path
from paceline.core.errors import PacelineError
from paceline.core.paths import near
from paceline.core.terminal import tell, warn
from paceline.core.units import counted, duration, plural, size
from paceline.data.packed.extract import extract, is_free
from paceline.data.packed.layout import LeftOut
from paceline.data.packed.reader import Packed, Stream, open_packed
from paceline.data.packed.verify import is_verifiable, num_bytes, verify
from paceline.observe.bars import SideBar
from paceline.recipes.speech.manifest.bad_line import MOST_SHOWN

_EXTRACTING = frozenset({"start_seq", "end_seq", "bad_data", "force"})
"""Options with an effect on `--extract`; none have one on the others."""
UNREADABLE, DAMAGED = 2, 1


def run(options: PackOptions) -> int:
    action = next(name for name in ("info", "verify", "extract") if getattr(options, name))
    idle = set(PackOptions.model_fields) - {"paths", action}
    refuse_idle(options, f"with `--{action}`", idle - _EXTRACTING if options.extract else idle)
    if options.extract:
        return _extract(options)
    if not options.paths:
        raise PackUsage("no packed file is named", f"type `paceline pack --{action} train.h5`")
    return _each(options.paths, _info if options.info else _verify)


def _each(paths: tuple[str, ...], action: Callable[[str], int]) -> int:
    """Apply an action to every file, whatever is wrong with others; return the worst of their exit codes."""
    codes = []
    for path in paths:
        try:
            codes.append(action(path))
        except PacelineError as error:
            if len(paths) == 1:
                raise
            sys.stdout.flush()
            warn(f"{error.rendered()}\n")
            codes.append(UNREADABLE)
    return max(codes)


def _info(path: str) -> int:

    tell("\n".join(_description(open_packed(local_path(path)))) + "\n")
    return 0


def _verify(path: str) -> int:

    packed = open_packed(local_path(path))
    if not is_verifiable(packed):
        hint = f"`paceline pack {path} OUT.h5` makes a file that has some"
        raise PackUsage(f"{near(path)}: has no digests, as Paceline did not write it", hint)
    with SideBar(f"reading {near(path)}", num_bytes(packed)) as bar:
        damages, number = verify(packed, progress=bar.show)
    report = [str(damage) for damage in damages[:MOST_SHOWN]]
    blocks = f"{counted(len(damages), 'block')} {plural(len(damages), 'is')} damaged"
    again = f"pack it again, or what is sound of it: `paceline pack {near(path)} sound.h5 --bad-data skip`"
    rows, outcome = counted(len(packed), "row"), f"{blocks}: {again}" if damages else "sound"
    report.append(f"{near(path)}: {rows}, {size(number)} read: {outcome}")
    tell("\n".join(report) + "\n")
    return DAMAGED if damages else 0


def _extract(options: PackOptions) -> int:

    if len(options.paths) != 2:
        raise PackUsage("a packed file and a folder must be named", "type `paceline pack --extract train.h5 FOLDER`")
    packed, folder = open_packed(local_path(options.paths[0])), Path(options.paths[1])
    if not is_free(folder) and not options.force:
        raise PackUsage(f"{near(folder)} exists, and is not an empty folder", "name another, or add `--force`")
    rows = rows_of(options, len(packed), options.paths[0])
    with SideBar("extracting", len(rows)) as bar:
        extraction = extract(packed, folder, rows, bar.show, skip_bad=options.bad_data == "skip")
    report = skipped_lines(extraction.skipped)
    if extraction.num_others:
        number = extraction.num_others
        stay = "stays" if number == 1 else "stay"
        report.append(f"{near(folder)}: {counted(number, 'other file')} {plural(number, 'was')} there, and {stay}")
    report.append(f"{near(extraction.manifest)}: {counted(extraction.num_rows, 'row')}")
    tell("\n".join(report) + "\n")
    return 0


def _description(packed: Packed) -> list[str]:
    """Return lines about a packed file, its shards and its streams."""
    first = packed.files[0]
    shards = f", {len(packed.files)} shards" if len(packed.files) > 1 else ""
    writer = ", written by another program" if first.packing is None else ""
    lines = [f"{near(packed.path)}: {counted(len(packed), 'row')}, layout {first.layout}{shards}{writer}"]
    if packed.sample_rate is not None:
        lines.append(f"  sample rate: {packed.sample_rate} Hz")
    if "lengths" in packed.columns and packed.sample_rate is not None:
        lines.append(f"  length: {duration(float(packed.columns['lengths'].sum()))}")
    lines += [f"  {_stream(packed.stream(name))}" for name in packed.names]
    if len(packed):
        lines.append(f"  tags: {packed.tags[0]} ... {packed.tags[len(packed) - 1]}")
    return lines + _left_out(packed)


def _left_out(packed: Packed) -> list[str]:
    """Return the number of lines and recordings that were left out when it was packed, and the first of them."""
    bad_lines = packed.about.bad_lines or LeftOut(0, ())  # the same in all shards
    number = bad_lines.number + len(packed.skipped)
    if not number:
        return []
    shown = [*bad_lines.first, *packed.skipped][:MOST_SHOWN]
    more = [f"    ... and {number - len(shown):,} more"] if number > len(shown) else []
    return [f"  left out when it was packed: {number:,}", *(f"    {line}" for line in shown), *more]


def _stream(stream: Stream) -> str:
    steps = stream.lengths
    kind = "" if stream.kind == "values" else f"{stream.kind}, "
    shape = f" ({', '.join(map(str, stream.shape))} each)" if stream.shape else ""
    span = f"{steps.min(initial=2**62):,} to {steps.max(initial=0):,} steps" if len(steps) else "no rows"
    slow = "" if stream.is_mapped else ", in chunks: `paceline pack` it again to read it at memory speed"
    nbytes = int(steps.sum()) * stream.step_bytes
    return f"{stream.name}: {kind}{stream.dtype}{shape}, {span}, {size(nbytes)}{slow}"
