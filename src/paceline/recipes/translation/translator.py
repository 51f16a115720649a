"""A trained model ready to be used in any program: sentences in, sentences out, no run and no ranks around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.config.settings import FOR_USE
from paceline.core.cloud.address import local_path
from paceline.core.errors import InvalidSetting
from paceline.recipes.translation.data.corpus import as_lines
from paceline.recipes.translation.data.pairs import Collate
from paceline.recipes.translation.exchange import is_export, read_export
from paceline.recipes.translation.network.build import build_network
from paceline.recipes.translation.network.lstm import Lstm
from paceline.recipes.translation.network.shape import Shape
from paceline.recipes.translation.network.transformer import Transformer
from paceline.recipes.translation.search.decoder import Writer, beam_search, greedy, most_tokens
from paceline.recipes.translation.settings import TranslationSettings
from paceline.recipes.translation.text.vocabulary import Vocabulary
from paceline.train.apply import Which, find_checkpoint, read_run, read_weights

BATCH_TOKENS = 8192
"""Source tokens per batch, padding included."""


def load(
    path: str | Path,
    *,
    checkpoint: Which = "best",
    average: int = 1,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> Translator:
    """Return a translator from a run's folder (`checkpoint` and `average` as in `paceline eval`) or an exported one."""
    if device not in ("auto", "cpu", "cuda"):
        raise InvalidSetting(f"`device` is {device!r}", hint="choose one of auto, cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidSetting(
            "`device` is 'cuda', but torch finds no GPU here", hint='leave it out, or give `device="cpu"`'
        )
    folder = local_path(path)
    shape, vocabulary, weights = read_export(folder) if is_export(folder) else _read_run(folder, checkpoint, average)
    model = build_network(shape, len(vocabulary))
    model.load_state_dict(dict(weights))
    chosen = "cuda" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu")
    return Translator(model.to(chosen), vocabulary)


def _read_run(folder: Path, checkpoint: Which, average: int) -> tuple[Shape, Vocabulary, Mapping[str, Tensor]]:
    record = read_run(folder)
    if "train_source" not in record.settings:
        raise InvalidSetting(
            f"{folder} is a run of the task {record.task}, not of translation",
            hint="give a run of `paceline train translation`, or a folder of `paceline export`",
        )
    shape = TranslationSettings.model_validate(record.settings, context={FOR_USE: True}).shape
    return shape, Vocabulary.read(folder), read_weights(find_checkpoint(folder, checkpoint), average)


class Translator:
    """Translates sentences, in batches by length, in the order in which they are given."""

    def __init__(self, model: Transformer | Lstm, vocabulary: Vocabulary) -> None:
        self.model, self.vocabulary = model.eval(), vocabulary

    @torch.inference_mode()
    def translate(
        self, texts: str | Sequence[str], *, beam: int = 5, length_penalty: float = 0.6, output_ratio: float = 2.0
    ) -> list[str]:
        """Return the translation of each sentence, always a list; `beam=1` is greedy."""
        if beam < 1:
            raise InvalidSetting(f"`beam` is {beam}", hint="give a number of hypotheses, 1 or more")
        sentences = [texts] if isinstance(texts, str) else list(texts)
        data, out = as_lines(self.vocabulary, sentences), [""] * len(sentences)
        writer: Writer[Any] = self.model
        device = next(self.model.parameters()).device
        for batch in _batches([len(data[place].source) + 1 for place in range(len(data))]):
            source = Collate()([data[place] for place in batch])["source"].to(device)
            longest = most_tokens(source, output_ratio)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                if beam == 1:
                    found = greedy(writer, source, longest)
                else:
                    found = [each for each, _ in beam_search(writer, source, longest, beam, length_penalty)]
            for place, text in zip(batch, self.vocabulary.decode(found), strict=True):
                out[place] = text if len(data[place].source) else ""
        return out


def _batches(lengths: Sequence[int]) -> list[list[int]]:
    """Return places of sentences of like length, so that little of a batch is padding; the longest first."""
    batches: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= BATCH_TOKENS:
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches
