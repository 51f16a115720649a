"""Hours of audio decoded per second, beam 16 with a 3-gram model, beside pyctcdecode in the same call; same words.

    python benchmarks/decoding.py --texts train.json                  # C on one thread and on all, pyctcdecode on one
    python benchmarks/decoding.py --texts train.json --device cuda    # batches on the GPU, beside C on the CPU

The network's output is made from text: each letter for one or two frames of 20 ms, blanks between, 14 letters a second,
and normal noise on the logits, so strong that the best path has about one word in three wrong. With `--frame-ms 80
--subwords` labels are pieces of words and frames as long as FastConformer's. The language model is made of the same
text by the estimator of `paceline lm`. pyctcdecode decodes the first `--peer` utterances only, with KenLM, from the
ARPA file that we wrote; words and scores are compared. Where it is not installed its rows are left out, and it is said.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from table import Row, parser, show

from paceline.recipes.speech.decoding.arpa import read_arpa, write_arpa
from paceline.recipes.speech.decoding.decoder import BeamDecoder
from paceline.recipes.speech.decoding.kneser_ney import estimate
from paceline.recipes.speech.text.decode import greedy
from paceline.recipes.speech.text.error_rate import word_errors
from paceline.recipes.speech.text.labels import ENGLISH
from paceline.recipes.speech.text.pieces import Pieces

LETTERS_PER_SECOND = 14.0


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--texts", type=Path, help="manifest with transcripts; a made-up language if not given")
    arguments.add_argument("--utterances", type=int, default=256)
    arguments.add_argument("--peer", type=int, default=16, help="utterances that pyctcdecode decodes")
    arguments.add_argument("--beam", type=int, default=16)
    arguments.add_argument("--batch", type=int, default=256, help="utterances searched together on the GPU")
    arguments.add_argument("--noise", type=float, default=2.0)
    arguments.add_argument("--frame-ms", type=float, default=20.0)
    arguments.add_argument("--subwords", action="store_true")
    arguments.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = arguments.parse_args()
    dice = np.random.default_rng(0)
    texts = _texts(options.texts, dice)
    labels = _subwords(texts) if options.subwords else ENGLISH
    chosen = [texts[number] for number in dice.permutation(len(texts))[: options.utterances]]
    outputs = [_output(text, labels, options.noise, options.frame_ms / 1000, dice) for text in chosen]
    hours = sum(map(len, outputs)) * options.frame_ms / 3.6e6
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lm.arpa")
        model = estimate([text.split() for text in texts], 3)
        write_arpa(path, model.words, model.levels)
        decoder = BeamDecoder(labels, beam_width=options.beam, lm=read_arpa(path))
        padded, lengths = _padded(outputs)
        rows = [Row("greedy", "word error rate", _error_rate(chosen, _greedy(padded, lengths, labels)), "%")]
        words = _on_cpu(decoder, padded, lengths, hours, rows)
        rows.append(Row("beam with 3-gram", "word error rate", _error_rate(chosen, words), "%"))
        if options.device == "cuda":
            _on_gpu(decoder, padded, lengths, hours, options.batch, words, rows)
        if options.peer:
            _beside_peer(decoder, outputs[: options.peer], labels, path, options, rows)
    show(rows, f"beam {options.beam} with a 3-gram model, {hours:.2f} h of audio", options.json)


def _on_cpu(decoder: BeamDecoder, padded: torch.Tensor, lengths: list[int], hours: float, rows: list[Row]) -> list[str]:
    all_threads = torch.get_num_threads()
    for threads in dict.fromkeys((1, all_threads)):
        torch.set_num_threads(threads)
        decoder.texts(padded[:2], lengths[:2])
        seconds, words = _timed(lambda: decoder.texts(padded, lengths), repeats=3)
        rows.append(Row(f"C, {threads} threads", "decoded", hours / seconds, "h/s"))
    return words


def _on_gpu(
    decoder: BeamDecoder,
    padded: torch.Tensor,
    lengths: list[int],
    hours: float,
    batch: int,
    words: list[str],
    rows: list[Row],
) -> None:
    there = padded.cuda()

    def decode() -> list[str]:
        found = []
        for begin in range(0, len(lengths), batch):
            found += decoder.texts(there[begin : begin + batch], lengths[begin : begin + batch])
        return found

    first, heard = _timed(decode, repeats=1)
    seconds, heard = _timed(decode, repeats=3)
    name = f"{torch.cuda.get_device_name()}, {batch} at a time"
    rows.append(Row(name, "first call, graphs recorded", first, "s"))
    rows.append(Row(name, "decoded", hours / seconds, "h/s", rows[1].case, hours / seconds / rows[1].value))
    same = sum(one == other for one, other in zip(words, heard, strict=True))
    rows.append(Row(name, "utterances with the words of the CPU", same / len(words) * 100, "%"))


def _beside_peer(
    decoder: BeamDecoder, outputs: list[NDArray[np.float32]], labels: Pieces, path: Path, options: Any, rows: list[Row]
) -> None:
    try:
        import kenlm  # noqa: F401
        import pyctcdecode
    except ImportError as error:
        print(f"pyctcdecode is left out: {error}")
        return
    logging.disable(logging.WARNING)
    names = list(labels.pieces) if options.subwords else list(labels.symbols)
    peer = pyctcdecode.build_ctcdecoder([*names, ""], str(path), alpha=0.5, beta=1.5)
    hours = sum(map(len, outputs)) * options.frame_ms / 3.6e6
    torch.set_num_threads(1)
    same, worst = 0, 0.0
    padded, lengths = _padded(outputs)
    seconds, ours = _timed(lambda: decoder(padded, lengths), repeats=3)
    begin = time.perf_counter()
    theirs = [
        peer.decode_beams(each.astype(np.float64), beam_width=options.beam, prune_history=True)[0] for each in outputs
    ]
    their_seconds = time.perf_counter() - begin
    for (text, _, _, _, score), hypotheses in zip(theirs, ours, strict=True):
        same += hypotheses[0].text == text
        worst = max(worst, abs(hypotheses[0].score - score))
    name = f"pyctcdecode {_version()} with KenLM, 1 thread"
    rows.append(Row(name, "decoded", hours / their_seconds, "h/s"))
    rows.append(
        Row("C, the same utterances, 1 thread", "decoded", hours / seconds, "h/s", name, their_seconds / seconds)
    )
    rows.append(Row("C and pyctcdecode", "utterances with the same words", same / len(outputs) * 100, "%"))
    rows.append(Row("C and pyctcdecode", "largest difference of scores", worst, "nats"))


def _version() -> str:
    from importlib.metadata import version

    return version("pyctcdecode")


def _timed(action: Any, repeats: int) -> tuple[float, Any]:
    best, result = float("inf"), None
    for _ in range(repeats):
        begin = time.perf_counter()
        result = action()
        best = min(best, time.perf_counter() - begin)
    return best, result


def _texts(path: Path | None, dice: np.random.Generator) -> list[str]:
    if path is not None:
        return [json.loads(line)["text"].lower() for line in path.read_text().splitlines()]
    letters = list("etaoinshrdlucmfwypvbgk")
    words = ["".join(dice.choice(letters, size=dice.integers(2, 9))) for _ in range(5000)]
    odds = 1 / np.arange(1, len(words) + 1)
    return [" ".join(dice.choice(words, size=dice.integers(10, 35), p=odds / odds.sum())) for _ in range(1500)]


def _subwords(texts: list[str]) -> Pieces:
    """Pieces of up to three letters, the most frequent ones: enough for a benchmark."""
    from collections import Counter

    counts: Counter[str] = Counter()
    for word in " ".join(texts).split():
        marked = "\u2581" + word
        counts.update(marked[begin : begin + size] for begin in range(len(marked)) for size in (2, 3))
    single = sorted({character for word in texts for character in "\u2581" + word.replace(" ", "")})
    return Pieces((*single, *[piece for piece, _ in counts.most_common(1024 - len(single)) if piece not in single]))


def _ids(text: str, labels: Pieces) -> list[int]:
    number = {piece: place for place, piece in enumerate(labels.pieces)}
    rest, ids = "\u2581" * (max(map(len, labels.pieces)) > 1) + text.replace(" ", "\u2581"), []
    while rest:
        size = next((size for size in (3, 2, 1) if rest[:size] in number), 0)
        if size:
            ids.append(number[rest[:size]])
        rest = rest[size or 1 :]
    return ids


def _output(text: str, labels: Pieces, noise: float, frame_s: float, dice: np.random.Generator) -> NDArray[np.float32]:
    blank, path = labels.blank, []
    ids = _ids(text, labels)
    gap = max(len(text) / LETTERS_PER_SECOND / frame_s / max(len(ids), 1) - 1.5, 0.1)
    for label in ids:
        if path and path[-1] == label:
            path.append(blank)
        path += [label] * dice.integers(1, 3) + [blank] * dice.poisson(gap)
    best = np.array(path)
    logits = noise * dice.normal(size=(len(best), blank + 1))
    logits[np.arange(len(best)), best] += 8 + np.log((blank + 1) / 29)
    logits[best == blank, blank] += 4
    return torch.from_numpy(logits).log_softmax(-1).float().numpy()


def _padded(outputs: list[NDArray[np.float32]]) -> tuple[torch.Tensor, list[int]]:
    lengths = [len(each) for each in outputs]
    padded = torch.zeros(len(outputs), max(lengths), outputs[0].shape[1])
    for number, each in enumerate(outputs):
        padded[number, : len(each)] = torch.from_numpy(each)
    return padded, lengths


def _greedy(padded: torch.Tensor, lengths: list[int], labels: Pieces) -> list[str]:
    return [" ".join(labels.decode(ids).split()) for ids in greedy(padded, lengths, labels.blank)]


def _error_rate(references: list[str], heard: list[str]) -> float:
    pairs = [word_errors(*pair) for pair in zip(references, heard, strict=True)]
    return 100 * sum(errors for errors, _ in pairs) / sum(words for _, words in pairs)


if __name__ == "__main__":
    main()
