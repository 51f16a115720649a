"""Data of a run: its corpora, the labels that transcripts are written in, and the files about them in its folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from paceline.config.mode import Purpose
from paceline.core.run_folder import RunFolder
from paceline.recipes.speech.data.corpus import Corpora, Corpus, Opening, parts_of
from paceline.recipes.speech.data.run_labels import RunLabels
from paceline.recipes.speech.data.utterances import Utterances
from paceline.recipes.speech.manifest.bad_line import BadLine
from paceline.recipes.speech.network.config import NetworkSettings
from paceline.recipes.speech.settings import AsrSettings
from paceline.recipes.speech.text.labels import Labels
from paceline.recipes.speech.text.subwords.labels import Subwords
from paceline.recipes.speech.text.subwords.tokenizer import Tokenizer
from paceline.world.link import Link


class SpeechData:
    """Corpora and labels of a run. All ranks must call `labels`, `network` and `corpora` together."""

    def __init__(self, settings: AsrSettings, purpose: Purpose, link: Link, say: Callable[[str], None]) -> None:
        self._settings, self._purpose, self._link, self._say = settings, purpose, link, say
        self._run_labels = RunLabels(settings, purpose, link.world.rank, link.gather_objects, say)
        self._corpora: Corpora | None = None
        self._unread: list[BadLine] = []

    def serves(self, settings: AsrSettings) -> bool:
        """Return True if these settings ask for the same labels, so that nothing needs to be opened again."""
        ours = self._settings
        return settings is ours or all(
            getattr(settings, name) == getattr(ours, name) for name in ("network", "vocabulary", "tokenizer")
        )

    @property
    def labels(self) -> Labels | Subwords:
        """Labels of the run. Labels that are learned from the transcripts need the corpora, and open them."""
        if self._run_labels.known() is None:
            self.corpora()
        return self._run_labels.learned()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of the labels, if they are subwords."""
        labels = self.labels
        return labels.tokenizer if isinstance(labels, Subwords) else None

    @property
    def network(self) -> NetworkSettings:
        """Network of the settings with the labels of the run."""
        labels, network = self.labels.symbols, self._settings.network
        return network if network.labels == labels else network.model_copy(update={"labels": labels})

    def corpora(self) -> Corpora:
        """Return all data sets of the run. The first call opens them, and learns the labels if they are to be."""
        if self._corpora is None:
            share = self._link.world.rank, self._link.world.size
            opening = Opening(self._settings, share, self._link.gather_objects, self._say, self._run_labels.learn)
            self._corpora = opening.open(parts_of(self._settings, self._purpose))
        return self._corpora

    def write(self, out: Path | None, unread: Iterable[BadLine] = ()) -> None:
        """Write the list of bad lines, with `unread` added, and the subwords into the folder of a run, if there is one.

        A benchmark has no folder; in training it exists by the time data is requested.
        """
        if self._link.world.rank != 0 or out is None or not RunFolder(out).is_run:
            return
        self._run_labels.store(out)
        self._unread += unread
        bad = self.corpora().bad.and_also(self._unread)
        if bad.total:
            bad.write(out)


def utterances(
    corpus: Corpus, settings: AsrSettings, *, is_training: bool = False, on_device: bool = False
) -> Utterances:
    """Return a corpus as a data set; that of training is perturbed, by the workers or `on_device`."""
    return Utterances(
        corpus.manifest,
        corpus.texts,
        settings.network.sample_rate,
        settings if is_training else None,
        trim=settings.network.trims(is_training=is_training),
        skip_bad=settings.bad_data == "skip",
        on_device=on_device,
    )
