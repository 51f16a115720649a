"""Utterances per second from disk into padded batches: audio files, h5py per item, WebDataset, and packed data of ours.

Two processes on two cores each make batches of 32 out of their half of the data, in random order (WebDataset: in the
order of its tar files, which is all it can do). In every case samples are copied as int16 into a padded batch that is
made in the same way. `warm`: all files lie in the page cache; `cold`: they were dropped from it right before, with
POSIX_FADV_DONTNEED, and it is checked that none of their pages is left. A cold case is run twice and the second run
counts: a virtual machine gives free memory back to its host, and whoever asks for some first would wait for that too.
Short utterances are like the Free Spoken Digit Dataset's (0.2 to 0.7 s at 8 kHz), long ones have 16.7 s at 16 kHz.

- `flac`, `wav`: `soundfile.read` of a file each;
- `h5py per item`: a slice of our own file's data set for each utterance, `file[name][begin:end]`, file kept open;
- `webdataset`: tar files of raw int16, so that nothing has to be decoded;
- `paceline`: `Stream.pad`, from the memory map straight into the batch;
- `disk, in order`: the same bytes read one after the other and left at that, which is all that the disk can give;
- `paceline, trainer`: all that training does for a batch of the same file: keyed seeds, texts, lengths, a `Grain`.

Rounds of all cases take turns, each in fresh processes; medians are shown.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import mmap
import multiprocessing
import os
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import soundfile
import torch
from numpy.typing import NDArray
from table import Row, parser, show

from paceline.cli.main import main as paceline
from paceline.data.fetch import Fetch, Request
from paceline.data.packed.reader import open_packed
from paceline.recipes.speech.data.utterances import Utterances, collate
from paceline.recipes.speech.manifest.read import read_manifests
from paceline.recipes.speech.text.labels import EncodedTexts

BATCH, PROCESSES = 32, 2
KINDS = {"short": ((0.2, 0.7), 8000), "long": ((16.7, 16.7), 16000)}
Batches = Iterator[NDArray[np.int16]]
Case = Callable[[Path, NDArray[np.int64]], Callable[[], Batches]]
"""(folder, rows of one process) -> what makes its batches, opened and ready."""
DROP = getattr(os, "POSIX_FADV_DONTNEED", 4)


def pad(rows: list[NDArray[np.int16]]) -> NDArray[np.int16]:
    """What all cases but ours do with what they have read."""
    padded = np.empty((len(rows), max(map(len, rows))), np.int16)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = row
        padded[place, len(row) :] = 0
    return padded


def cut(rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    return [rows[first : first + BATCH] for first in range(0, len(rows), BATCH)]


def of_files(suffix: str) -> Case:
    def opened(folder: Path, rows: NDArray[np.int64]) -> Callable[[], Batches]:
        names = [str(folder / suffix / f"{row}.{suffix}") for row in range(int(rows.max()) + 1)]

        def batches() -> Batches:
            for some in cut(rows):
                yield pad([soundfile.read(names[row], dtype="int16")[0] for row in some])

        return batches

    return opened


def of_h5py(folder: Path, rows: NDArray[np.int64]) -> Callable[[], Batches]:
    audio = h5py.File(folder / "all.h5", "r")["streams/audio"]
    starts = open_packed(folder / "all.h5").files[0].streams["audio"].starts

    def batches() -> Batches:
        for some in cut(rows):
            yield pad([audio[starts[row] : starts[row + 1]] for row in some])

    return batches


def of_webdataset(folder: Path, rows: NDArray[np.int64]) -> Callable[[], Batches]:
    import webdataset

    number = 0 if rows.min() == 0 else 1  # each process has tar files of its own
    data = webdataset.WebDataset(str(folder / f"half-{number}.tar"), shardshuffle=False, empty_check=False)

    def batches() -> Batches:
        waiting: list[NDArray[np.int16]] = []
        for sample in data:
            waiting.append(np.frombuffer(sample["pcm"], np.int16))
            if len(waiting) == BATCH:
                yield pad(waiting)
                waiting = []
        if waiting:
            yield pad(waiting)

    return batches


def of_paceline(folder: Path, rows: NDArray[np.int64]) -> Callable[[], Batches]:
    audio = open_packed(folder / "all.h5").stream("audio")

    def batches() -> Batches:
        for some in cut(rows):
            yield audio.pad(some)[0]

    return batches


def of_trainer(folder: Path, rows: NDArray[np.int64]) -> Callable[[], Batches]:
    manifest, _ = read_manifests([folder / "all.h5"])
    rate = open_packed(folder / "all.h5").sample_rate
    assert rate is not None
    texts = EncodedTexts(np.zeros(5 * len(manifest), np.uint8), 5 * np.arange(len(manifest) + 1))
    fetch = Fetch(Utterances(manifest, texts, rate), collate, seed=0)

    def batches() -> Batches:
        for some in cut(rows):
            yield fetch(Request(0, 0, some))["audio"].numpy()

    return batches


def of_disk(folder: Path, rows: NDArray[np.int64]) -> Callable[[], Batches]:
    """As many bytes, read one after the other and left at that: what the disk has to give."""
    descriptor = os.open(folder / "all.h5", os.O_RDONLY)
    place = open_packed(folder / "all.h5").files[0].streams["audio"]
    assert place.offset is not None
    step = place.dtype.itemsize
    room = np.zeros(BATCH * int(np.diff(place.starts).max()) * step, np.uint8)

    def batches() -> Batches:
        for some in cut(np.sort(rows)):
            begin, end = place.starts[some[0]] * step, place.starts[some[-1] + 1] * step
            os.preadv(descriptor, [room[: end - begin]], place.offset + int(begin))
            yield np.empty((len(some), 0), np.int16)

    return batches


CASES: dict[str, Case] = {
    "flac": of_files("flac"),
    "wav": of_files("wav"),
    "h5py per item": of_h5py,
    "webdataset": of_webdataset,
    "paceline": of_paceline,
    "paceline, trainer": of_trainer,
}


def make(folder: Path, kind: str, number: int) -> None:
    """The same sound as FLAC, as WAV, in tar files and packed."""
    from audio_input import speech_like

    (shortest, longest), rate = KINDS[kind]
    draw = np.random.default_rng(0)
    distinct = [speech_like(longest, draw) for _ in range(8)]
    for suffix in ("flac", "wav"):
        (folder / suffix).mkdir(parents=True)
    lines = []
    half = halves(number)[0]
    with tarfile.open(folder / "half-0.tar", "w") as first, tarfile.open(folder / "half-1.tar", "w") as second:
        for row in range(number):
            length = round(draw.uniform(shortest, longest) * rate)
            sound = np.roll(distinct[row % 8], 97 * row)[:length]
            for suffix in ("flac", "wav"):
                soundfile.write(folder / suffix / f"{row}.{suffix}", sound, rate, subtype="PCM_16")
            entry = tarfile.TarInfo(f"{row:06d}.pcm")
            entry.size = sound.nbytes
            (first if row in half else second).addfile(entry, io.BytesIO(sound.tobytes()))
            lines.append(json.dumps({"audio_filepath": f"wav/{row}.wav", "duration": length / rate, "text": "seven"}))
    (folder / "all.json").write_text("\n".join(lines))
    with contextlib.redirect_stdout(io.StringIO()):
        assert paceline(["pack", str(folder / "all.json"), str(folder / "all.h5")]) == 0
    os.sync()


def halves(number: int) -> list[range]:
    return [range(number // 2), range(number // 2, number)]


def drop_from_cache(folder: Path, most_left: float) -> None:
    """`most_left`: the share of a file's pages that may stay, because the case itself holds them."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    for path in paths:
        drop(path)
    # The large files, and some of the many small ones. What somebody has mapped and touched cannot be dropped.
    for path in [path for path in paths if path.parent == folder] + paths[::64]:
        until = time.monotonic() + 2
        while (left := share_in_cache(path)) > most_left and time.monotonic() < until:  # still being read ahead
            drop(path)
        assert left <= most_left, f"{path}: {left:.1%} is still in the page cache"


def drop(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, DROP)
    os.close(descriptor)


def share_in_cache(path: Path) -> float:
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        states = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
        place = np.frombuffer(mapped, np.uint8)
        failed = libc.mincore(
            ctypes.c_void_p(place.ctypes.data), ctypes.c_size_t(len(mapped)), ctypes.c_void_p(states.ctypes.data)
        )
        del place
    assert not failed, os.strerror(ctypes.get_errno())
    return float(np.mean(states & 1))


def _read(
    case: Case, folder: Path, rows: NDArray[np.int64], passes: int, is_cold: bool, ready: Any, answers: Any
) -> None:
    torch.set_num_threads(1)
    batches = case(folder, rows)
    if not is_cold:
        for _ in batches():
            pass
    ready.wait()  # opened, which is not what is measured; files are dropped now if they are to be cold
    ready.wait()
    began, number = time.perf_counter(), 0
    for _ in range(passes):
        for batch in batches():
            number += len(batch)
    answers.put((began, time.perf_counter(), number))


def measure(case: Case, folder: Path, number: int, passes: int, is_cold: bool) -> float:
    """Utterances per second of both processes together."""
    context = multiprocessing.get_context("fork")
    draw = np.random.default_rng(1)
    ready, answers = context.Barrier(PROCESSES + 1), context.Queue()
    workers = []
    for mine in halves(number):
        rows = draw.permutation(np.array(mine))
        words = (case, folder, rows, 1 if is_cold else passes, is_cold, ready, answers)
        workers.append(context.Process(target=_read, args=words, daemon=True))
    for worker in workers:
        worker.start()
    ready.wait()
    if is_cold:
        # The texts of a manifest are read when it is opened, and are mapped as the audio is.
        drop_from_cache(folder, most_left=0.05 if case is of_trainer else 0.0)
    ready.wait()
    found = [answers.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join()
    assert sum(each for _, _, each in found) == number * (1 if is_cold else passes)
    return number * (1 if is_cold else passes) / (max(end for _, end, _ in found) - min(at for at, _, _ in found))


def speed_of(case: Case, folder: Path, number: int, passes: int, is_cold: bool) -> float:
    if is_cold:
        measure(case, folder, number, passes, is_cold)
    return measure(case, folder, number, passes, is_cold)


def in_own_process(task: Callable[..., None], *words: Any) -> None:
    """So that nothing it reads stays mapped."""
    process = multiprocessing.get_context("fork").Process(target=task, args=words)
    process.start()
    process.join()
    assert process.exitcode == 0


def check(cases: dict[str, Case], folder: Path, number: int) -> None:
    """All cases make the same batches."""
    rows = np.array(halves(number)[0])[: 2 * BATCH]
    expected = [batch.copy() for batch in of_paceline(folder, rows)()]
    for name, case in cases.items():
        for batch, right in zip(case(folder, rows)(), expected, strict=False):
            assert np.array_equal(batch, right), name


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--short", type=int, default=8192, help="utterances")
    arguments.add_argument("--long", type=int, default=512, help="utterances")
    arguments.add_argument("--passes", type=int, default=4, help="over all data in one warm round")
    arguments.add_argument("--rounds", type=int, default=5, help="of which the median is shown")
    arguments.add_argument("--folder", type=Path, help="on the disk that is to be measured; a temporary one if not set")
    options = arguments.parse_args()
    cases = dict(CASES)
    try:
        import webdataset  # noqa: F401
    except ModuleNotFoundError:
        print("webdataset is not installed: left out")
        del cases["webdataset"]
    rows = []
    with tempfile.TemporaryDirectory(prefix="packed-data-", dir=options.folder) as made:
        for kind in KINDS:
            folder, number = Path(made, kind), getattr(options, kind)
            in_own_process(make, folder, kind, number)
            in_own_process(check, cases, folder, number)
            mb_each = (folder / "all.h5").stat().st_size / number / 1e6
            for state in ("warm", "cold"):
                speeds: dict[str, list[float]] = {name: [] for name in cases}
                for _ in range(options.rounds):
                    for name, case in cases.items():
                        slow = name in ("flac", "wav")  # one pass is long enough
                        passes = 1 if slow else options.passes
                        speeds[name].append(speed_of(case, folder, number, passes, state == "cold"))
                medians = {name: statistics.median(each) for name, each in speeds.items()}
                for name, speed in medians.items():
                    ratio = speed / medians["h5py per item"]
                    rows.append(Row(f"{kind}, {state}", name, speed, "utterances/s", "h5py per item", ratio))
                rows.append(Row(f"{kind}, {state}", "paceline", medians["paceline"] * mb_each, "MB/s"))
                if state == "cold":
                    alone = [speed_of(of_disk, folder, number, 1, True) for _ in range(options.rounds)]
                    rows.append(Row(f"{kind}, {state}", "disk, in order", statistics.median(alone) * mb_each, "MB/s"))
    show(rows, f"two processes, median of {options.rounds} rounds that take turns", options.json)


if __name__ == "__main__":
    main()
