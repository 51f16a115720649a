"""The demo corpus: phrases spoken by espeak-ng in many voices, written as FLAC files with manifests.

The same settings give the same bytes on one machine. espeak-ng keeps a state, so everything is spoken in one fixed
order by one fresh process: `make_corpus` starts this module as a child.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.config.settings import Positive, Section
from paceline.core.errors import Failed, PacelineError
from paceline.recipes.speech.demo.espeak import Espeak, EspeakFailed, require_espeak
from paceline.recipes.speech.demo.phrases import phrase

ABOUT: Final = "corpus.json"
VERSION: Final = 1
"""Of what this module writes for given settings; a corpus of another version is made anew."""
SAMPLE_RATE: Final = 16_000
ACCENTS: Final = ("en-us", "en", "en-gb-x-rp", "en-gb-scotland", "en-us-nyc", "en-gb-x-gbclan")
# Voices that sound like people: no whispers, robots and echoes, none that clips at VOLUME.
SEEN_SPEAKERS: Final = (
    *("f1", "f2", "f3", "f5", "Alicia", "Andrea", "Annie", "belinda", "grandma", "shelby"),
    *("m1", "m2", "m4", "m5", "m7", "m8", "Alex", "Andy", "Denis", "Gene", "Lee", "Mario", "Mike", "Reed"),
    *("adam", "croak", "david", "grandpa", "gustave", "john", "klatt4", "marcelo", "michel", "norbert"),
    *("pablo", "rob", "robert", "sandro", "victor", "benjamin"),
)
UNSEEN_SPEAKERS: Final = ("f4", "aunty", "linda", "m3", "m6", "Michael", "boris", "edward", "max", "travis")
VOLUME: Final = 40
WORDS_PER_MINUTE: Final = (130, 220)
PITCH: Final = (35, 65)
PITCH_RANGE: Final = (30, 70)
SILENCE_S: Final = (0.1, 0.3)
"""Before and after the speech."""
PEAK: Final = (0.1, 0.9)
"""The loudest sample, as a share of full scale."""
_PROGRESS_EVERY: Final = 25
_PROGRESS: Final = re.compile(r"(\d+) of (\d+)")


class CorpusFolderUnusable(PacelineError):
    """The folder cannot be written, or holds something that is not for this module to replace."""

    folder: Path
    why: str
    sentence = "no demo corpus can be written to {folder}: {why}"
    hint = "name a new or empty folder for the demo corpus"


class CorpusSettings(Section):
    """How much the demo corpus holds."""

    num_train: Positive = 8000
    """Utterances to train on."""
    num_val_seen: Positive = 200
    """Utterances of the validation set whose voices are also in the training set."""
    num_val_unseen: Positive = 200
    """Utterances of the validation set whose voices are not."""
    seed: int = 0
    """Chooses texts, voices, rates and pitches."""

    @property
    def sizes(self) -> dict[str, int]:
        """Utterances of each set by its name, in the order in which they are spoken."""
        return {"train": self.num_train, "val-seen": self.num_val_seen, "val-unseen": self.num_val_unseen}


class Utterance(NamedTuple):
    """One thing to say, and how."""

    path: str
    """Of its audio, relative to the corpus."""
    text: str
    voice: str
    words_per_minute: int
    pitch: int
    pitch_range: int
    lead_s: float
    tail_s: float
    peak: float


@dataclass(frozen=True)
class SpokenCorpus:
    """A corpus on disk."""

    folder: Path
    num_utterances: int
    hours: float
    reused: bool
    """It was there already."""

    @property
    def train(self) -> Path:
        return self.folder / "train.json"

    @property
    def val_seen(self) -> Path:
        return self.folder / "val-seen.json"

    @property
    def val_unseen(self) -> Path:
        return self.folder / "val-unseen.json"


def make_corpus(
    folder: Path, settings: CorpusSettings | None = None, progress: Callable[[int, int], None] | None = None
) -> SpokenCorpus:
    """The corpus in `folder`: the one that is there if it is whole and of these settings, else a new one.

    It appears all at once, when it is complete. `progress` hears how many utterances of how many are done.
    """
    settings = settings or CorpusSettings()
    folder = folder.absolute()
    if found := find_corpus(folder, settings):
        return found
    if folder.exists() and not (folder / ABOUT).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise CorpusFolderUnusable(folder, "it holds other files")
    require_espeak()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        workshop = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise CorpusFolderUnusable(folder, str(error)) from error
    try:
        made = workshop / "new"
        made.mkdir()
        _speak_in_child(made, settings, progress)
        if folder.exists():
            folder.rename(workshop / "old")
        made.rename(folder)
    except OSError as error:
        # another process may have been faster with the same corpus
        if found := find_corpus(folder, settings):
            return found
        raise CorpusFolderUnusable(folder, str(error)) from error
    finally:
        shutil.rmtree(workshop, ignore_errors=True)
    about = json.loads((folder / ABOUT).read_text())
    return SpokenCorpus(folder, about["num_utterances"], about["hours"], reused=False)


def find_corpus(folder: Path, settings: CorpusSettings) -> SpokenCorpus | None:
    """The corpus in `folder` if it was made with these settings and no file is missing or changed."""
    try:
        about = json.loads((folder / ABOUT).read_text())
        if about["version"] != VERSION or about["settings"] != settings.model_dump():
            return None
        if about["digest"] != _digest(folder, settings):
            return None
        return SpokenCorpus(folder, int(about["num_utterances"]), float(about["hours"]), reused=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def script(settings: CorpusSettings) -> Iterator[Utterance]:
    """Everything to be said, in order. The speakers of `val-unseen` speak nowhere else, in no accent."""
    dice = random.Random(settings.seed)
    for name, count in settings.sizes.items():
        speakers = UNSEEN_SPEAKERS if name == "val-unseen" else SEEN_SPEAKERS
        voices = [f"{accent}+{speaker}" for accent in ACCENTS for speaker in speakers]
        dice.shuffle(voices)
        for number in range(count):
            yield Utterance(
                path=f"{name}/{number:05d}.flac",
                text=phrase(dice),
                voice=voices[number % len(voices)],
                words_per_minute=dice.randint(*WORDS_PER_MINUTE),
                pitch=dice.randint(*PITCH),
                pitch_range=dice.randint(*PITCH_RANGE),
                lead_s=dice.uniform(*SILENCE_S),
                tail_s=dice.uniform(*SILENCE_S),
                peak=dice.uniform(*PEAK),
            )


def speak(folder: Path, settings: CorpusSettings) -> None:
    """Write the whole corpus into an empty folder. For a fresh process, see above."""
    import soundfile

    espeak = Espeak()
    total = sum(settings.sizes.values())
    lines: dict[str, list[str]] = {}
    num_samples = 0
    for number, utterance in enumerate(script(settings), 1):
        samples = _perform(espeak, utterance)
        num_samples += len(samples)
        data = io.BytesIO()
        soundfile.write(data, samples, SAMPLE_RATE, format="FLAC", subtype="PCM_16")
        path = folder / utterance.path
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data.getvalue())
        line = {
            "audio_filepath": utterance.path,
            "duration": len(samples) / SAMPLE_RATE,
            "text": utterance.text,
            "voice": utterance.voice,
        }
        lines.setdefault(path.parent.name, []).append(json.dumps(line) + "\n")
        if number % _PROGRESS_EVERY == 0 or number == total:
            print(f"{number} of {total}", flush=True)
    for name, manifest in lines.items():
        (folder / f"{name}.json").write_text("".join(manifest))
    about = {
        "about": "demo corpus spoken by `paceline.recipes.speech.demo.speak`",
        "version": VERSION,
        "espeak_ng": espeak.version,
        "settings": settings.model_dump(),
        "num_utterances": total,
        "hours": num_samples / SAMPLE_RATE / 3600,
        "digest": _digest(folder, settings),
    }
    (folder / ABOUT).write_text(json.dumps(about, indent=2) + "\n")


def _perform(espeak: Espeak, utterance: Utterance) -> NDArray[np.int16]:
    """The utterance at our sample rate, with silence around it, as loud as it says."""
    import soxr

    spoken = espeak.say(
        utterance.text,
        utterance.voice,
        words_per_minute=utterance.words_per_minute,
        pitch=utterance.pitch,
        pitch_range=utterance.pitch_range,
        volume=VOLUME,
    )
    resampled = soxr.resample(spoken.astype(np.float32), espeak.sample_rate, SAMPLE_RATE)
    loudest = float(np.abs(resampled).max(initial=0.0))
    if loudest == 0.0:
        raise EspeakFailed(f"voice {utterance.voice!r} is silent")
    scaled = np.rint(resampled * (utterance.peak * 32767 / loudest)).astype(np.int16)
    return np.pad(scaled, (round(utterance.lead_s * SAMPLE_RATE), round(utterance.tail_s * SAMPLE_RATE)))


def _speak_in_child(folder: Path, settings: CorpusSettings, progress: Callable[[int, int], None] | None) -> None:
    command = [
        sys.executable,
        "-m",
        "paceline.recipes.speech.demo.speak",
        os.fspath(folder),
        settings.model_dump_json(),
    ]
    said: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        try:
            for line in child.stdout or ():
                done = _PROGRESS.fullmatch(line.strip())
                if done is None:
                    said.append(line.strip())
                elif progress is not None:
                    progress(int(done[1]), int(done[2]))
        except BaseException:
            child.kill()
            raise
    if child.returncode != 0:
        last_words = next(filter(None, reversed(said)), "no output")
        raise Failed(
            f"speaking the demo corpus ended with code {child.returncode}: {last_words}",
            hint="see whether the disk has room; the command was `python -m paceline.recipes.speech.demo.speak`",
        )


def _digest(folder: Path, settings: CorpusSettings) -> str:
    """Return the digest of all manifests and audio files of these settings; fails where one is missing."""
    digest = hashlib.blake2b(digest_size=16)
    for name, count in settings.sizes.items():
        for path in (f"{name}.json", *(f"{name}/{number:05d}.flac" for number in range(count))):
            data = (folder / path).read_bytes()
            digest.update(f"{path} {len(data)}\n".encode())
            digest.update(data)
    return digest.hexdigest()


def main(words: Sequence[str]) -> int:
    """The child: a folder and the settings as JSON."""
    try:
        speak(Path(words[0]), CorpusSettings.model_validate_json(words[1]))
    except PacelineError as error:
        print(error, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
