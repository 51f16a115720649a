"""Long and live audio beside the whole recording, on the same model: word errors, agreement and latency.

    paceline demo --runs-dir runs --out runs/demo
    python benchmarks/streaming.py runs/demo runs/demo-speech/val-unseen.json --minutes 5

Utterances of a manifest are joined to one recording, those of one voice one after the other, with pauses of quiet
noise. It is transcribed utterance by utterance, as a whole, in windows, and as a stream that is fed 20 ms at a time. A
pause ends a word in all of them. The latency of a word is the time from its end in the audio to the moment
when it is final: audio that has to arrive, and the computation of the step that made it final.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray

import paceline.asr
from paceline.recipes.speech.audio.recordings import Recordings
from paceline.recipes.speech.manifest.line import parse_object
from paceline.recipes.speech.manifest.raw_lines import raw_lines
from paceline.recipes.speech.manifest.read import read_manifests
from paceline.recipes.speech.recognizer import Recognizer
from paceline.recipes.speech.streaming.use import Windows, transcribe_long
from paceline.recipes.speech.text.error_rate import word_edits

FEED_S = 0.02
QUIET = 5.0
"""Deviation of the noise in pauses, where full scale is 32768."""
CHUNKS = ((0.24, 0.48), (0.48, 0.48), (0.48, 0.96), (0.96, 0.96), (0.96, 1.92))
"""Chunk and lookahead, in seconds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--pause-s", type=float, default=0.5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--folder", type=Path, default=Path("."))
    options = parser.parse_args()
    recognizer = paceline.asr.load(options.run, device=options.device)
    utterances, texts = gather(options.manifest, recognizer.sample_rate, options.minutes, options.pause_s)
    recording = np.concatenate(utterances)
    path = options.folder / "streaming-benchmark.wav"
    soundfile.write(path, recording, recognizer.sample_rate, subtype="PCM_16")
    seconds = len(recording) / recognizer.sample_rate
    threads = torch.get_num_threads()
    print(f"{len(texts)} utterances, {seconds / 60:.1f} minutes; torch {torch.__version__}, {threads} threads")
    said = " ".join(texts)
    began = time.perf_counter()
    alone = " ".join(recognizer.transcribe(list(utterances)))
    print_row("utterance by utterance", said, alone, alone, time.perf_counter() - began, seconds)
    began = time.perf_counter()
    at_once = Windows(2 * seconds, 0.0, "file")
    whole = transcribe_long(recognizer.model, recognizer.labels, path, at_once).text
    print_row("whole recording", said, whole, whole, time.perf_counter() - began, seconds)
    plain = recognizer.transcribe(recording)[0]
    is_same = plain.replace(" ", "") == whole.replace(" ", "")
    print(f"    `transcribe` has {'the same' if is_same else 'other'} letters")
    for norm in ("file", "running", "window"):
        for window_s, overlap_s in ((30.0, 4.0), (30.0, 1.0), (10.0, 4.0)) if norm == "file" else ((30.0, 4.0),):
            began = time.perf_counter()
            found = transcribe_long(recognizer.model, recognizer.labels, path, Windows(window_s, overlap_s, norm))
            taken = time.perf_counter() - began
            print_row(
                f"windows {window_s:g} s, overlap {overlap_s:g} s, {norm}", said, found.text, whole, taken, seconds
            )
    for norm in ("running", "window"):
        for chunk_s, lookahead_s in CHUNKS if norm == "running" else CHUNKS[2:3]:
            stream(recognizer, recording, said, whole, chunk_s, lookahead_s, norm)
    path.unlink()


def gather(path: Path, rate: int, minutes: float, pause_s: float) -> tuple[list[NDArray[np.int16]], list[str]]:
    """Return utterances, each with a pause behind it, and their texts."""
    manifest, _ = read_manifests([path])
    recordings = Recordings(manifest, rate)
    pause = (np.random.default_rng(0).standard_normal(round(pause_s * rate)) * QUIET).astype(np.int16)
    voices = [
        str(parse_object(raw).get("voice", parse_object(raw).get("speaker", ""))) for _, raw in raw_lines(manifest)
    ]
    utterances: list[NDArray[np.int16]] = []
    texts: list[str] = []
    left = minutes * 60 * rate
    for row in sorted(range(len(manifest)), key=lambda row: voices[row]):
        if left <= 0:
            break
        utterances.append(np.concatenate([recordings.read(row), pause]))
        texts.append(manifest.text(row).lower())
        left -= len(utterances[-1])
    return utterances, texts


def stream(
    recognizer: Recognizer,
    samples: NDArray[np.int16],
    said: str,
    whole: str,
    chunk_s: float,
    lookahead_s: float,
    norm: str,
) -> None:
    """Feed as a microphone would, in simulated time: computation is timed, waiting is counted."""
    listener = recognizer.stream(chunk_s=chunk_s, lookahead_s=lookahead_s, norm=norm)  # type: ignore[arg-type]
    rate, step = recognizer.sample_rate, round(FEED_S * recognizer.sample_rate)
    words: list[str] = []
    latencies: list[float] = []
    steps: list[float] = []
    for start in range(0, len(samples), step):
        heard_before = listener.heard_s
        began = time.perf_counter()
        listener.feed(samples[start : start + step])
        taken = time.perf_counter() - began
        if listener.heard_s > heard_before:
            steps.append(taken)
        for word in listener.take_final():
            words.append(word.text)
            latencies.append((start + step) / rate + taken - word.end_s)
    listener.finish()
    words += [word.text for word in listener.words()]
    name = f"live, chunk {chunk_s:g} s, lookahead {lookahead_s:g} s, {norm}"
    print_row(name, said, " ".join(words), whole, sum(steps), len(samples) / rate)
    low, high = np.percentile(latencies, [50, 95])
    own, slow = 1e3 * np.percentile(steps, [50, 95])
    print(
        f"    latency: {listener.latency_s:.2f} s of audio at most; to a final word {low:.2f} s (median), {high:.2f} s "
        f"(95 %); computation {own:.0f} ms (median), {slow:.0f} ms (95 %) per chunk",
        flush=True,
    )


def print_row(name: str, said: str, text: str, whole: str, taken_s: float, seconds: float) -> None:
    errors, other = word_edits(said, text), word_edits(whole, text)
    print(
        f"{name:46} WER {100 * errors.errors / errors.words:6.2f} %   against the whole recording "
        f"{100 * other.errors / max(other.words, 1):6.2f} %   {seconds / taken_s:7.1f} times real time",
        flush=True,
    )


if __name__ == "__main__":
    main()
