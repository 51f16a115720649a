"""`paceline pack --info`, `--verify` and `--extract`: packed files looked at, checked and taken apart."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from paceline.cli.pack.options import PackOptions, PackUsage, refuse_idle, rows_of
from paceline.core.errors import PacelineError
from paceline.core.paths import near
from paceline.core.units import size
from paceline.observe.bars import SideBar

_EXTRACTING = frozenset({"start_seq", "end_seq", "bad_data", "force"})
"""Options that mean something to `--extract`; none do to the others."""
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


def _each(paths: tuple[str, ...], look: Callable[[str], int]) -> int:
    """Look at every file, whatever is wrong with others; the worst of their codes."""
    codes = []
    for path in paths:
        try:
            codes.append(look(path))
        except PacelineError as error:
            if len(paths) == 1:
                raise
            sys.stdout.flush()
            sys.stderr.write(f"error: {error}\n" + (f"  {error.hint}\n" if error.hint else ""))
            codes.append(UNREADABLE)
    return max(codes)


def _info(path: str) -> int:
    from paceline.data.packed.info import info
    from paceline.data.packed.reader import open_packed

    sys.stdout.write("\n".join(info(open_packed(Path(path)))) + "\n")
    return 0


def _verify(path: str) -> int:
    from paceline.data.manifest.bad_line import MOST_SHOWN
    from paceline.data.packed.reader import open_packed
    from paceline.data.packed.verify import is_verifiable, num_bytes, verify

    packed = open_packed(Path(path))
    if not is_verifiable(packed):
        hint = f"`paceline pack {path} OUT.h5` makes a file that has some"
        raise PackUsage(f"{near(path)}: has no digests, as Paceline did not write it", hint)
    with SideBar(f"reading {near(path)}", num_bytes(packed)) as bar:
        damages, number = verify(packed, progress=bar.show)
    told = [str(damage) for damage in damages[:MOST_SHOWN]]
    blocks = f"{len(damages):,} block{'s are' if len(damages) > 1 else ' is'} damaged"
    again = f"pack it again, or what is sound of it: `paceline pack {near(path)} sound.h5 --bad-data skip`"
    told.append(
        f"{near(path)}: {len(packed):,} rows, {size(number)} read: {f'{blocks}: {again}' if damages else 'sound'}"
    )
    sys.stdout.write("\n".join(told) + "\n")
    return DAMAGED if damages else 0


def _extract(options: PackOptions) -> int:
    from paceline.data.manifest.bad_line import MOST_SHOWN
    from paceline.data.packed.extract import extract, is_free
    from paceline.data.packed.reader import open_packed

    if len(options.paths) != 2:
        raise PackUsage("a packed file and a folder must be named", "type `paceline pack --extract train.h5 FOLDER`")
    packed, folder = open_packed(Path(options.paths[0])), Path(options.paths[1])
    if not is_free(folder) and not options.force:
        raise PackUsage(f"{near(folder)} exists, and is not an empty folder", "name another, or add `--force`")
    rows = rows_of(options, len(packed), options.paths[0])
    with SideBar("extracting", len(rows)) as bar:
        found = extract(packed, folder, rows, bar.show, skip_bad=options.bad_data == "skip")
    told = [f"skipped {line}" for line in found.skipped[:MOST_SHOWN]]
    if len(found.skipped) > MOST_SHOWN:
        told.append(f"... and {len(found.skipped) - MOST_SHOWN:,} more")
    if found.num_others:
        many = f"{found.num_others:,} other files were there, and stay"
        told.append(f"{near(folder)}: {many if found.num_others > 1 else '1 other file was there, and stays'}")
    told.append(f"{near(found.manifest)}: {found.num_rows:,} rows")
    sys.stdout.write("\n".join(told) + "\n")
    return 0
