"""A trained model ready to be used in any program: audio in, text out, no run and no ranks around it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import InvalidSetting, PacelineError
from paceline.recipes.speech.audio.file import AudioFacts, AudioUnreadable
from paceline.recipes.speech.audio.read import read_audio
from paceline.recipes.speech.audio.trim import bounds
from paceline.recipes.speech.data.inputs import InputsUnreadable, measure_all
from paceline.recipes.speech.data.utterances import Utterance, collate
from paceline.recipes.speech.decoding.decoder import BeamDecoder, GreedyDecoder, Hypothesis, TextDecoder
from paceline.recipes.speech.exchange.weights import read_model
from paceline.recipes.speech.head import head_of
from paceline.recipes.speech.network.config import NetworkSettings, read_network
from paceline.recipes.speech.network.model import AcousticModel
from paceline.recipes.speech.sound.arrays import as_array, as_samples
from paceline.recipes.speech.streaming.use import LongText, StreamsAreGreedy, Windows, transcribe_long
from paceline.recipes.speech.streaming.windows import PAUSE_S, Listener, Norm
from paceline.recipes.speech.text.pieces import Pieces
from paceline.recipes.speech.text.subwords.tokenizer import stored
from paceline.train.apply import Which, find_checkpoint, read_run, read_weights

BATCH_SECONDS = 240.0
"""Audio per batch, padding included."""

Audio = str | Path | NDArray[Any]


class NotSpeech(PacelineError):
    """A run of another task."""

    path: Path
    task: str
    sentence = "{path} is a run of the task {task}, not of speech recognition"
    hint = "give a run of `paceline train asr`, a folder of `paceline export`, or a .nemo archive"


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise InvalidSetting(f"`{name}` is {value!r}", hint=f"choose one of {', '.join(choices)}")


def _check_seconds(*, above_0: Mapping[str, float], others: Mapping[str, float]) -> None:
    """Raise where a window or stream would stand still: some times must be above 0, the others at least 0."""
    for name, value in {**above_0, **others}.items():
        if not (value > 0 or (value == 0 and name in others)) or value == math.inf:
            advice = "give seconds, at least 0" if name in others else "give seconds, above 0"
            raise InvalidSetting(f"`{name}` is {value}", hint=advice)


def load(
    path: str | Path,
    *,
    checkpoint: Which = "best",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    decoder: Literal["greedy", "beam"] = "greedy",
    max_symbols: int = 10,
    beam_width: int = 16,
    lm: str | Path | None = None,
    lm_weight: float = 0.5,
    word_bonus: float = 1.5,
    hotwords: Sequence[str] = (),
    hotword_weight: float = 10.0,
) -> Recognizer:
    """Return a recogniser from a run's folder (`checkpoint` as in `paceline eval`), an exported folder or a NeMo
    archive. A language model (ARPA file or KenLM binary) and hot words are for `decoder="beam"`. A transducer writes at
    most `max_symbols` labels in a frame; it has no beam."""
    _check_choice("device", device, ("auto", "cpu", "cuda"))
    _check_choice("decoder", decoder, ("greedy", "beam"))
    if beam_width < 1:
        raise InvalidSetting(f"`beam_width` is {beam_width}", hint="give a number of hypotheses, 1 or more")
    if max_symbols < 1:
        raise InvalidSetting(f"`max_symbols` is {max_symbols}", hint="give a number of labels, 1 or more")
    if decoder == "greedy" and (lm is not None or hotwords):
        what = "`lm`" if lm is not None else "`hotwords`"
        raise InvalidSetting(f"{what} with `decoder` 'greedy', which has no use for it", hint='give `decoder="beam"`')
    if isinstance(hotwords, str):
        raise InvalidSetting(f"`hotwords` is the text {hotwords!r}", hint="give a list of words")
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidSetting(
            "`device` is 'cuda', but torch finds no GPU here", hint='leave it out, or give `device="cpu"`'
        )
    path = Path(path)
    network, weights = read_model(path) or _read_run(path, checkpoint)
    model = AcousticModel(network)
    model.load_state_dict(dict(weights))
    chosen = "cuda" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu")
    labels, head = Pieces(network.labels), head_of(network)
    if decoder == "greedy":
        return Recognizer(model.to(chosen), network, head.greedy_decoder(model, labels, max_symbols))
    head.check_beam()
    beam = BeamDecoder(
        labels,
        beam_width=beam_width,
        lm=lm,
        lm_weight=lm_weight,
        word_bonus=word_bonus,
        hotwords=hotwords,
        hotword_weight=hotword_weight,
        frame_seconds=model.frame_seconds,
    )
    return Recognizer(model.to(chosen), network, beam)


def _read_run(folder: Path, checkpoint: Which) -> tuple[NetworkSettings, Mapping[str, Tensor]]:
    record = read_run(folder)
    settings: dict[str, Any] = record.settings
    if "network" not in settings:
        raise NotSpeech(folder, str(record.task))
    network, tokenizer = read_network(settings["network"]), stored(folder)
    if tokenizer is not None:
        network = network.model_copy(update={"labels": tokenizer.pieces})
    return network, read_weights(find_checkpoint(folder, checkpoint))


class Recognizer:
    """Transcribes files and arrays, in batches by length, in the order in which they are given."""

    def __init__(self, model: AcousticModel, network: NetworkSettings, decoder: TextDecoder | None = None) -> None:
        self.model, self.network = model.eval(), network
        self.labels = Pieces(network.labels)
        """Its classes: see `Pieces` for how they make words."""
        self.sample_rate = network.sample_rate
        self.decoder = decoder or head_of(network).greedy_decoder(model, self.labels)

    @torch.inference_mode()
    def transcribe(self, audio: Audio | Sequence[Audio]) -> list[str]:
        """Return the text of each file or array (of the model's sample rate); always a list."""
        texts: dict[int, str] = {}
        for places, outputs, lengths, _ in self._outputs(audio):
            texts |= dict(zip(places, self.decoder.texts(outputs, lengths), strict=True))
        return [texts[place] for place in range(len(texts))]

    @torch.inference_mode()
    def hypotheses(self, audio: Audio | Sequence[Audio], num_best: int = 1) -> list[list[Hypothesis]]:
        """Return what each recording may say, best first: text, scores, and words with their times in seconds.

        Greedy decoding knows one hypothesis. Times count from where the audio begins, with `trim_silence`, too.
        """
        found: dict[int, list[Hypothesis]] = {}
        for places, outputs, lengths, begins in self._outputs(audio):
            for place, best, begin in zip(places, self.decoder(outputs, lengths, num_best), begins, strict=True):
                found[place] = [each.later(begin) for each in best]
        return [found[place] for place in range(len(found))]

    def _outputs(self, audio: Audio | Sequence[Audio]) -> Iterator[tuple[list[int], Tensor, list[int], list[float]]]:
        """Yield places of recordings, what their text is read off, their lengths in frames, and the seconds of silence
        that were cut off before them."""
        given = _listed(audio)
        for batch in _batches(self._lengths(given), int(BATCH_SECONDS * self.sample_rate)):
            samples, cuts = zip(*(self._samples(given[place]) for place in batch), strict=True)
            yield batch, *self._listen(list(samples)), [cut / self.sample_rate for cut in cuts]

    def transcribe_long(
        self,
        path: str | Path,
        *,
        window_s: float = 30.0,
        overlap_s: float = 4.0,
        pause_s: float = PAUSE_S,
        norm: Norm = "file",
    ) -> LongText:
        """Return text and word times of a file of any length, read in windows: memory does not grow with it.

        Silence at its ends is cut off where the network's `trim_silence` says so; times count from its beginning.
        """
        self._check_greedy(str(path))
        _check_seconds(above_0={"window_s": window_s}, others={"overlap_s": overlap_s, "pause_s": pause_s})
        _check_choice("norm", norm, get_args(Norm))
        trims = self.network.trims(is_training=False)
        return transcribe_long(self.model, self.labels, Path(path), Windows(window_s, overlap_s, norm, pause_s, trims))

    def stream(
        self,
        *,
        chunk_s: float = 0.5,
        lookahead_s: float = 1.0,
        overlap_s: float = 4.0,
        pause_s: float = PAUSE_S,
        norm: Literal["running", "window"] = "running",
    ) -> Listener:
        """Return an object that hears audio as it comes: `feed(samples)` (int16 or floats, at `sample_rate`) returns
        the text so far, `finish()` the whole text. Silence is never cut off: where a stream ends, and what its loudest
        part is, nobody knows."""
        self._check_greedy("a stream")
        others = {"lookahead_s": lookahead_s, "overlap_s": overlap_s, "pause_s": pause_s}
        _check_seconds(above_0={"chunk_s": chunk_s}, others=others)
        _check_choice("norm", norm, ("running", "window"))
        return Listener(
            self.model, self.labels, step_s=chunk_s, left_s=overlap_s, right_s=lookahead_s, pause_s=pause_s, norm=norm
        )

    def _check_greedy(self, what: str) -> None:
        head_of(self.network).check_windows(what)
        if not isinstance(self.decoder, GreedyDecoder):
            raise StreamsAreGreedy(what)

    def _lengths(self, given: Sequence[Path | NDArray[Any]]) -> list[int]:
        """Return lengths in samples; raise for everything that cannot be used, before anything is transcribed."""
        measured = measure_all(list(dict.fromkeys(each for each in given if isinstance(each, Path))))
        bad = [str(found) for found in measured.values() if isinstance(found, AudioUnreadable)]
        if bad:
            raise InputsUnreadable(bad, len(bad), "mend them or leave them out")
        seconds = {path: found.seconds for path, found in measured.items() if isinstance(found, AudioFacts)}
        return [round(seconds[each] * self.sample_rate) if isinstance(each, Path) else len(each) for each in given]

    def _samples(self, audio: Path | NDArray[Any]) -> tuple[NDArray[np.int16], int]:
        """Return a recording, and how many samples of silence were cut off before it."""
        samples = self._read(audio)
        first, end = bounds(samples) if self.network.trims(is_training=False) else (0, len(samples))
        return samples[first:end], first

    def _read(self, audio: Path | NDArray[Any]) -> NDArray[np.int16]:
        if isinstance(audio, Path):
            return read_audio(audio, sample_rate=self.sample_rate)
        return as_samples(audio)

    def _listen(self, audio: list[NDArray[np.int16]]) -> tuple[Tensor, list[int]]:
        device = next(self.model.parameters()).device
        nothing = np.zeros(0, dtype=np.uint8)
        padded = collate([Utterance(samples, nothing, 0) for samples in audio])
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            outputs = self.model(padded["audio"].to(device), padded["lengths"].to(device))
        return outputs, [self.model.output_length(number) for number in padded["num_samples"]]


def _listed(audio: Any) -> list[Path | NDArray[Any]]:
    """Return files and arrays, of one of them or of several."""
    is_one = isinstance(audio, str | Path | np.ndarray | Tensor) or not isinstance(audio, Iterable)
    return [_one(each) for each in ([audio] if is_one else audio)]


def _one(audio: Any) -> Path | NDArray[Any]:
    return Path(audio) if isinstance(audio, str | Path) else as_array(audio)


def _batches(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Return places of recordings of like length, so that little of a batch is padding; the longest first."""
    batches: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= most:
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches
