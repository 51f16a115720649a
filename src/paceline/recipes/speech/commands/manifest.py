"""`paceline manifest scan|stats|split`: make, inspect and split manifests."""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from paceline.config.load import load
from paceline.config.settings import Positive, Section
from paceline.core.errors import NotFound
from paceline.core.json_text import json_text
from paceline.core.language import translate
from paceline.core.terminal import emit, tell, warn
from paceline.core.units import counted, plural
from paceline.observe.bars import SideBar
from paceline.recipes.speech.shards.tar_index import SUFFIX

PROG = "paceline manifest"
ACTIONS = {
    "scan": "make a manifest of a folder of audio, or measure one anew",
    "stats": "show what manifests hold, and check their audio",
    "split": "cut a manifest into parts",
}


class ScanOptions(Section):
    """Make a manifest of a folder of audio and transcripts, of a table of both, or of another manifest."""

    path: Path
    """A folder (text in a .txt beside each audio file, in transcripts.tsv, .csv or .txt, or in LibriSpeech's layout), a
    .tsv or .csv that names files and texts, WebDataset shards ('shard-{0..7}.tar'), or a manifest whose durations are
    measured anew."""
    out: Path | None = None
    """The manifest to write; PATH/manifest.json for a folder, `train.measured.json` for train.json if not set."""
    force: bool = False
    """Replace what is there."""
    threads: Positive | None = None
    """Files read at a time; as many as there are cores, and at least 4, if not set."""


with warnings.catch_warnings():
    # `json` hides a method that pydantic itself has given up; it is the word that users know.
    warnings.filterwarnings("ignore", message='Field name "json"', category=UserWarning)

    class StatsOptions(Section):
        """Show what a manifest holds; the exit code is 1 if a line, or with `--check` an audio file, cannot be used."""

        path: str
        """A manifest, or several with commas between."""
        check: bool = False
        """Decode every audio file: is it there, sound to its end, and as long as its line says?"""
        threads: Positive | None = None
        """Files read at a time; as many as there are cores, and at least 4, if not set."""
        json: bool = False  # type: ignore[assignment]
        """Print JSON instead of text."""


class SplitOptions(Section):
    """Cut a manifest into parts of given shares of its hours; the same seed gives the same parts."""

    path: str
    """A manifest, or several with commas between."""
    parts: str = "train=0.9,val=0.1"
    """Names and shares. Part `val` of all.json is written as all-val.json."""
    seed: int = 0
    """Decides which utterance goes where."""
    by: str | None = None
    """A key of the lines, such as `speaker`: lines of one value stay together; without it, those of one audio file."""
    out: Path | None = None
    """Folder for the parts; the manifest's own if not set."""
    force: bool = False
    """Replace what is there."""


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message='Field name "json"', category=UserWarning)

    class ManifestOptions(SplitOptions, StatsOptions, ScanOptions):
        """Make, look at or cut manifests."""

        action: Literal["scan", "stats", "split"]
        """What to do."""
        path: str  # type: ignore[assignment]
        """What to do it with: a manifest, or several with commas between; for `scan` a folder or a table, too."""
        out: Path | None = None
        """The manifest that `scan` writes, the folder for the parts of `split`."""


OPTIONS, POSITIONAL = ManifestOptions, ("action", "path")


def run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        tell(_help())
        return 0 if argv else 2
    action, rest = argv[0], argv[1:]
    if action not in ACTIONS:
        nearest = difflib.get_close_matches(action, ACTIONS, n=1)
        meant = translate("did you mean `paceline {name}`?").format(name=f"manifest {nearest[0]}" if nearest else "")
        hint = meant if nearest else f"there are {', '.join(ACTIONS)}"
        what = f"there is no `{PROG} {action}`"
        warn(f"{translate('error: ')}{what}\n  {hint}\n")
        return 2
    if action == "scan":
        return _scan(load(ScanOptions, rest, prog=f"{PROG} scan", positional=("path",)))
    if action == "stats":
        return _stats(load(StatsOptions, rest, prog=f"{PROG} stats", positional=("path",)))
    return _split(load(SplitOptions, rest, prog=f"{PROG} split", positional=("path",)))


def _help() -> str:
    lines = [f"  {name:<8}{translate(what)}" for name, what in ACTIONS.items()]
    return "\n".join(
        [
            translate("usage: {prog} ACTION [OPTIONS]").format(prog=PROG),
            "",
            *lines,
            "",
            translate("`{prog} ACTION --help` lists its options").format(prog=PROG),
            "",
        ]
    )


def _scan(options: ScanOptions) -> int:
    from paceline.recipes.speech.manifest import scan as scanning
    from paceline.recipes.speech.manifest.read import NotAManifest

    try:
        if options.path.suffix != SUFFIX and not options.path.exists():
            raise NotAManifest(options.path, "there is no such file or folder")
    except OSError as error:
        raise NotAManifest(options.path, f"cannot be read: {error.strerror}") from None
    out = options.out or scanning.default_out(options.path)
    scanning.refuse_overwriting([out], options.force)
    sources = scanning.gather(options.path, out)
    with SideBar("measuring", len(sources.entries)) as bar:
        scan = scanning.scan(sources, out, threads=_threads(options.threads), progress=bar.show)
    if not scan.lines:
        details = "".join(f"\n  {line}" for line in scan.report())
        raise NotFound(
            f"{options.path}: there is nothing to make a manifest of{details}",
            hint="texts are found in a .txt beside each audio file, in transcripts.tsv, .csv or .txt (file, text), in "
            "LibriSpeech's *.trans.txt, and in a .tsv with the columns path and sentence",
        )
    scanning.write_lines(out, map(scanning.as_line, scan.lines))
    tell("\n".join([*scan.report(), f"{out}: {counted(len(scan.lines), 'utterance')}, {scan.hours:,.2f} h"]) + "\n")
    return 0


def _stats(options: StatsOptions) -> int:
    from dataclasses import asdict

    from paceline.recipes.speech.manifest import stats as manifest_stats
    from paceline.recipes.speech.manifest.bad_line import shown
    from paceline.recipes.speech.manifest.read import read_manifests

    manifest, reading = read_manifests(options.path, min_seconds=0.0, bad_data="skip")
    bad, num_bad = list(reading.bad), reading.num_bad
    if options.check:
        from paceline.recipes.speech.audio.check import check_all

        with SideBar("checking", len(manifest)) as bar:
            threads = _threads(options.threads)
            broken = check_all(manifest, range(len(manifest)), threads=threads, progress=bar.show, whole=True)
        bad, num_bad = bad + broken, num_bad + len(broken)
    statistics = manifest_stats.stats(manifest)
    if options.json:
        listed = [{**asdict(line), "path": str(line.path)} for line in bad]
        emit(json_text({**statistics.as_json(), "num_bad": num_bad, "bad": listed}) + "\n")
    else:
        summary = [f"bad lines: {num_bad:,}", *shown(bad, num_bad), ""] if num_bad else []
        if options.check and not num_bad:
            number = len(manifest)
            words = f"{counted(number, 'file')} {plural(number, 'was')} decoded and {plural(number, 'is')} sound"
            summary = [words if number == 1 else f"all {words}", ""]
        tell("\n".join([*summary, *manifest_stats.show(statistics)]) + "\n")
    return 1 if num_bad else 0


def _split(options: SplitOptions) -> int:
    from paceline.data.packed.errors import is_packed
    from paceline.recipes.speech.manifest import split as splitting
    from paceline.recipes.speech.manifest.read import NotAManifest, manifest_paths, read_manifests
    from paceline.recipes.speech.manifest.scan import named_like, refuse_overwriting

    shares = splitting.parse_parts(options.parts)
    for path in filter(is_packed, manifest_paths(options.path)):
        hint = "split the manifest it was made from; `paceline pack --extract FILE FOLDER` makes one"
        raise NotAManifest(path, "is packed, and has no lines to write", hint)
    first = manifest_paths(options.path)[0]
    folder = options.out or first.parent
    outs = {part: folder / named_like(first, f"-{part}").name for part in shares}
    refuse_overwriting(list(outs.values()), options.force)
    manifest, _ = read_manifests(options.path, min_seconds=0.0)
    for part in splitting.split(manifest, shares, outs, seed=options.seed, by=options.by):
        part.write()
        tell(f"{part}\n")
    return 0


def _threads(threads: int | None) -> int:
    return threads or max(4, len(os.sched_getaffinity(0)))
