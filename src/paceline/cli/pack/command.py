"""`paceline pack IN... OUT.h5`: manifests, other packed files or a task's data as HDF5 that is read at memory speed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.cli.pack.options import PackOptions, PackUsage, to_bytes
from paceline.config.load import load
from paceline.core.paths import near
from paceline.core.units import size
from paceline.data.packed.errors import PACKED, is_packed
from paceline.observe.bars import SideBar

OPTIONS, POSITIONAL = PackOptions, ("paths",)
INTERRUPTED = 130


def run(argv: Sequence[str]) -> int:
    options = load(PackOptions, argv, prog="paceline pack", positional=POSITIONAL)
    if options.info + options.verify + options.extract > 1:
        raise PackUsage("more than one of `--info`, `--verify` and `--extract` is given", "give one of them")
    try:
        if options.info or options.verify or options.extract:
            from paceline.cli.pack import look as pack_look

            return pack_look.run(options)
        return _pack(options)
    except KeyboardInterrupt:
        goes_on = not (options.info or options.verify or options.extract)
        sys.stderr.write(f"stopped{'; the same command goes on where it was' if goes_on else ''}\n")
        return INTERRUPTED


def _pack(options: PackOptions) -> int:
    from paceline.cli.pack.source import source_of
    from paceline.data.manifest.bad_line import MOST_SHOWN
    from paceline.data.packed.layout import h5py_or_error
    from paceline.data.packed.pack import pack
    from paceline.data.packed.processes import default_processes

    if not options.paths:
        raise PackUsage("nothing to pack is named", "type `paceline pack train.json train.h5`")
    h5py_or_error()
    *words, last = options.paths
    if not words or not is_packed(last):
        hint = (
            f"name the file to write last, with an ending of {', '.join(PACKED)}: `paceline pack train.json train.h5`"
        )
        raise PackUsage(f"{last}: is no name of a packed file" if words else "no file to write is named", hint)
    source = source_of(options, [name for word in words for name in word.split(",") if name])
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
    told.append(f"{near(last)}: {found.num_rows:,} rows, {size(found.nbytes)}{shards}, written and compared")
    sys.stdout.write("\n".join(told) + "\n")
    return 0
