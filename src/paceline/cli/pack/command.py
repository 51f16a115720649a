"""`paceline pack IN... OUT.h5`: pack manifests, other packed files or a task's data into HDF5 read at memory speed."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.cli.pack.options import PackOptions, PackUsage, skipped_lines, to_bytes
from paceline.config.load import load
from paceline.core.cloud.address import local_path
from paceline.core.cloud.file_copy import send
from paceline.core.paths import near
from paceline.core.terminal import tell, warn
from paceline.core.units import counted, plural, size
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
            from paceline.cli.pack import inspect

            return inspect.run(options)
        return _pack(options)
    except KeyboardInterrupt:
        goes_on = not (options.info or options.verify or options.extract)
        warn(f"stopped{'; the same command goes on where it was' if goes_on else ''}\n")
        return INTERRUPTED


def _pack(options: PackOptions) -> int:
    from paceline.cli.pack.source import source_of
    from paceline.data.packed.layout import h5py_or_error
    from paceline.data.packed.pack import default_processes, pack

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
    target = local_path(last)
    with SideBar("packing", len(source)) as bar:
        result = pack(
            source,
            target,
            layout=options.layout,
            shard_bytes=to_bytes(options.shard_size),
            processes=options.processes or default_processes(),
            force=options.force,
            progress=bar.show,
        )
    for file in dict.fromkeys([*result.files, target]):
        send(file)
    report = skipped_lines(result.skipped)
    if result.num_resumed:
        rows = f"{counted(result.num_resumed, 'row')} {plural(result.num_resumed, 'was')}"
        report.append(f"{rows} there already, from a packing that was stopped")
    shards = f" in {len(result.files)} shards" if len(result.files) > 1 else ""
    report.append(
        f"{near(last)}: {counted(result.num_rows, 'row')}, {size(result.nbytes)}{shards}, written and compared"
    )
    tell("\n".join(report) + "\n")
    return 0
