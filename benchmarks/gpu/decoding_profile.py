"""Seconds of the search on the GPU by batch size, beside C on the CPU; same words.

python benchmarks/gpu/decoding_profile.py train.json [--subwords]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import decoding as bench

from paceline.recipes.speech.decoding.decoder import BeamDecoder
from paceline.recipes.speech.decoding.kneser_ney import estimate
from paceline.recipes.speech.decoding.ngram import Ngrams
from paceline.recipes.speech.text.labels import ENGLISH

dice = np.random.default_rng(0)
texts = bench._texts(Path(sys.argv[1]), dice)
is_subwords = "--subwords" in sys.argv
labels, frame_s = (bench._subwords(texts), 0.08) if is_subwords else (ENGLISH, 0.02)
model = estimate([text.split() for text in texts], 3)
decoder = BeamDecoder(labels, lm=Ngrams(model.words, model.levels))
outputs = [bench._output(text, labels, 2.0, frame_s, dice) for text in texts[:1024]]
outputs = outputs * (1 if is_subwords else 4)
padded, lengths = bench._padded(outputs)
there = padded.cuda()
begin = time.perf_counter()
decoder.texts(there[:1], lengths[:1])
print(f"first call {time.perf_counter() - begin:.2f} s")
expected = decoder.texts(padded[:256], lengths[:256])
found = decoder.texts(there[:256], lengths[:256])
print("words as on the CPU:", np.mean([one == other for one, other in zip(expected, found, strict=True)]))
for batch in (16, 64, 256, 1024, 4096):
    if batch > len(outputs):
        break
    of = lengths[:batch]
    part = there[:batch, : max(of)]
    best, searching = float("inf"), float("inf")
    for _ in range(3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        decoder.on_gpu(part, of)
        middle = time.perf_counter()
        decoder.texts(part, of)
        best, searching = min(best, time.perf_counter() - middle), min(searching, middle - begin)
    hours = sum(of) * frame_s / 3600
    print(f"batch {batch}: {hours:.3f} h, search {searching:.4f} s, with words {best:.4f} s: {hours / best:.2f} h/s")
