"""Texts that a model hears in a run: of grains, of files named on the command line, of long and of live audio."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from torch import Tensor

from paceline.config.mode import Purpose
from paceline.data.grain import Grain
from paceline.recipes.speech.data.inputs import open_inputs
from paceline.recipes.speech.data.packing import check_packed
from paceline.recipes.speech.data.speech_data import SpeechData
from paceline.recipes.speech.data.utterances import Utterances
from paceline.recipes.speech.decoding.decoder import TextDecoder
from paceline.recipes.speech.decoding.from_settings import detailed, make_decoder
from paceline.recipes.speech.head import Head, output_frames, outputs_of
from paceline.recipes.speech.network.model import AcousticModel
from paceline.recipes.speech.settings import AsrSettings
from paceline.recipes.speech.streaming.use import (
    STANDARD_INPUT,
    NoFileYet,
    NotAlone,
    StreamsAreGreedy,
    Windows,
    infer_live,
    infer_long,
    long_files,
    standard_input,
)
from paceline.recipes.speech.streaming.windows import Listener, Norm
from paceline.recipes.speech.text.pieces import Pieces
from paceline.train.predictions import DetailedText


class Transcriber:
    """Decoder of a run, and what `infer` and validation read with it."""

    def __init__(
        self, settings: AsrSettings, purpose: Purpose, data: SpeechData, head: Head, say: Callable[[str], None]
    ) -> None:
        self._purpose = purpose
        self._settings, self._data, self._head, self._say = settings, data, head, say
        self._beam: TextDecoder | None = None

    def decoder(self, model: AcousticModel) -> TextDecoder:
        """Return the decoder of a model; raise for a language model and hot words that do not fit the labels."""
        if self._beam is not None:
            return self._beam
        decoder = make_decoder(self._settings, self._data.labels, model, self._head)
        if decoder.note is not None:
            self._say(decoder.note)
        if self._settings.decoder == "beam":
            self._beam = decoder  # it has no part of the model, and may hold a large language model
        return decoder

    def references(self, grain: Grain) -> list[str]:
        """Return the transcripts of a grain."""
        labels, texts = self._data.labels, grain["text"].tolist()
        return [labels.decode(ids[:length]) for ids, length in zip(texts, grain["num_labels"], strict=True)]

    def texts(self, model: AcousticModel, grain: Grain, outputs: Tensor) -> list[str]:
        """Return the text of each utterance of a grain, from outputs of the model."""
        return self.decoder(model).texts(outputs, output_frames(model, grain))

    def predict(self, model: AcousticModel, grain: Grain) -> list[str] | list[DetailedText]:
        """Return the text of each utterance of a grain; in `infer` with scores and the times of words."""
        outputs = outputs_of(model, grain)
        if self._purpose != "infer":
            return self.texts(model, grain, outputs)
        results = zip(self.decoder(model)(outputs, output_frames(model, grain)), grain["begins"], strict=True)
        return [detailed([hypothesis.later(begin) for hypothesis in best[:1]]) for best, begin in results]

    def read_inputs(self, words: Sequence[str]) -> Utterances:
        """Return files, folders and manifests as one data set."""
        settings = self._settings
        check_packed([Path(word) for word in words], settings.network, is_perturbed=False, is_training=False)
        return open_inputs(
            words,
            settings.network.sample_rate,
            skip_bad=settings.bad_data == "skip",
            check_audio=settings.check_audio,
            say=self._say,
            trim=settings.network.trims(is_training=False),
        )

    def is_stream(self, words: Sequence[str]) -> bool:
        """Return True for standard input, and for files longer than `long_s`."""
        return STANDARD_INPUT in words or long_files(words, self._settings.long_s) is not None

    def stream(self, model: AcousticModel, words: Sequence[str], out: IO[str], *, as_json: bool) -> int:
        """Write the text of long files, read in windows, or of audio on standard input while it arrives."""
        settings, is_live = self._settings, STANDARD_INPUT in words
        if is_live and len(words) > 1:
            raise NotAlone(words)
        what = "standard input" if is_live else words[0]
        self._head.check_windows(what)
        if settings.decoder == "beam":
            raise StreamsAreGreedy(what)
        norm: Norm = settings.stream_norm if settings.stream_norm != "auto" else "running" if is_live else "file"
        labels = Pieces(self._data.network.labels)
        trims = settings.network.trims(is_training=False)
        if not is_live:
            paths = long_files(words, settings.long_s) or []
            windows = Windows(settings.window_s, settings.overlap_s, norm, settings.pause_s, trims)
            return infer_long(model, labels, paths, windows, out, as_json=as_json)
        if norm == "file":
            raise NoFileYet
        listener = Listener(
            model,
            labels,
            step_s=settings.chunk_s,
            left_s=settings.overlap_s,
            right_s=settings.lookahead_s,
            pause_s=settings.pause_s,
            norm=norm,
        )
        if trims:
            self._say(
                "the network was trained with `trim_silence`: no silence is cut off live audio, because its loudest "
                "part is not known before its end"
            )
        with standard_input() as pipe:
            infer_live(listener, pipe, out, rate=settings.rate, as_json=as_json, screen=out.isatty())
        return 1
