"""Labels of a run: the characters of its network, subwords from its folder or a file, or subwords that it learns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.config.mode import Purpose
from paceline.core.disk import replacing
from paceline.core.errors import Conflict, NotFound, PacelineError
from paceline.core.run_folder import RunFolder
from paceline.recipes.speech.data.corpus import texts_of
from paceline.recipes.speech.exchange.export import check_labels
from paceline.recipes.speech.manifest.columns import Manifest
from paceline.recipes.speech.settings import AsrSettings
from paceline.recipes.speech.text.labels import Labels, normalized
from paceline.recipes.speech.text.pieces import are_subwords
from paceline.recipes.speech.text.subwords.labels import Subwords
from paceline.recipes.speech.text.subwords.tokenizer import (
    MODEL,
    WORD_PIECES,
    Tokenizer,
    learn_bpe,
    parse_tokenizer,
    read_tokenizer,
    stored,
)
from paceline.train.checkpoint.format import listed


class RunLabels:
    """Finds the labels of a run; all ranks must ask together, and one of them reads or learns."""

    def __init__(
        self,
        settings: AsrSettings,
        purpose: Purpose,
        rank: int,
        gather: Callable[[Any], list[Any]],
        say: Callable[[str], None],
    ) -> None:
        self._is_used = purpose != "train"
        self._settings, self._rank, self._gather, self._say = settings, rank, gather, say
        self._found: Labels | Subwords | None = None
        self._is_looked_for = False

    def known(self) -> Labels | Subwords | None:
        """Return the labels; None if they are to be learned, which takes the transcripts of training."""
        if self._is_looked_for:
            return self._found
        self._is_looked_for = True
        settings = self._settings
        if settings.vocabulary is None and settings.tokenizer is None and not are_subwords(settings.network.labels):
            self._found = Labels(settings.network.labels)
        else:
            self._found = self._shared(self._read)
        return self._found

    def learned(self) -> Labels | Subwords:
        """Return the labels, once they are known or learned."""
        assert self._found is not None
        return self._found

    def learn(self, training: Manifest | None) -> Labels | Subwords:
        """Return the labels, learned from these transcripts if they are not known."""
        known = self.known()
        if known is not None:
            return known
        settings = self._settings
        assert training is not None
        assert settings.vocabulary is not None
        letters = Labels(settings.network.labels)
        texts = normalized(texts_of(training), letters, settings.text_rules)
        size = settings.vocabulary
        self._found = self._shared(lambda: learn_bpe(texts, size))
        assert self._found is not None
        self._say(f"labels: {self._found.tokenizer.shown}, learned from {len(training):,} transcripts")
        return self._found

    def store(self, run: Path) -> None:
        """Write the subwords into the folder of a run."""
        labels = self._found
        if not isinstance(labels, Subwords) or stored(run) == labels.tokenizer:
            return
        for name in (MODEL, WORD_PIECES):
            (run / name).unlink(missing_ok=True)
        with replacing(run / labels.tokenizer.file, "wb") as file:
            file.write(labels.tokenizer.content)

    def _shared(self, find: Callable[[], Tokenizer | None]) -> Subwords | None:
        """Return what the first rank finds, or raise its error, on all."""
        found: Tokenizer | PacelineError | None = None
        if self._rank == 0:
            try:
                found = find()
            except PacelineError as error:
                found = error
        plain = (found.content, found.file) if isinstance(found, Tokenizer) else found
        shared = self._gather(plain)[0]
        if isinstance(shared, PacelineError):
            raise shared
        if shared is None:
            return None
        content, file = shared
        return Subwords.of(found if isinstance(found, Tokenizer) else parse_tokenizer(content, file, file))

    def _read(self) -> Tokenizer | None:
        settings = self._settings
        homes = [] if settings.out is None else [settings.out]
        if isinstance(settings.resume, Path):  # a checkpoint of another run
            homes.append(settings.resume.parent.parent)
        for home in homes:
            # A run that failed before its first checkpoint binds nobody.
            own = stored(home) if self._is_used or listed(RunFolder(home).checkpoints) else None
            if own is not None:
                self._check_same(own, home)
                return own
            if self._is_used or listed(RunFolder(home).checkpoints):
                raise NotFound(
                    f"{home} has lost its {MODEL} (or {WORD_PIECES}): without it, no text can be read or written",
                    hint="bring it back: a copy or an export of the run has it, too",
                )
        if settings.tokenizer is not None:
            return self._given(settings.tokenizer)
        if settings.vocabulary is not None:
            return None
        labels = settings.network.labels
        raise NotFound(
            f"the labels of the network are {len(labels):,} subwords ({', '.join(labels[:4])}, ...), and no tokenizer "
            "is known that cuts texts into them",
            hint="name its file: `--tokenizer tokenizer.model`, NeMo's folder of it, or the .nemo archive of the "
            "network",
        )

    def _given(self, path: Path) -> Tokenizer:
        tokenizer = read_tokenizer(path)
        if are_subwords(self._settings.network.labels):
            check_labels(self._settings.network.labels, tokenizer.pieces, path)
        self._say(f"labels: {tokenizer.shown} of {path}")
        return tokenizer

    def _check_same(self, own: Tokenizer, run: Path) -> None:
        """Refuse another tokenizer for a run that goes on; one whose file is gone is the run's own."""
        given = self._settings.tokenizer
        if given is None or self._is_used:
            return
        if not given.exists():
            self._say(f"labels: {given} is gone; the run has its own copy of it")
        elif read_tokenizer(given) != own:
            raise Conflict(
                f"{given} has different subwords than {run} was trained with: its classes would change their meaning",
                hint="leave out `--tokenizer`, the run has its own; for other subwords, begin a new run with "
                "`--init-from CHECKPOINT --new-decoder`",
            )
