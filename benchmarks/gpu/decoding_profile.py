"""Time of the parts of the search on the GPU: preparing steps, the loop, reading results; and its kernels."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import decoding as bench

from paceline.recipes.asr.decoding.decoder import BeamDecoder
from paceline.recipes.asr.decoding.kneser_ney import estimate
from paceline.recipes.asr.decoding.ngram import Ngrams
from paceline.recipes.asr.text.labels import ENGLISH

dice = np.random.default_rng(0)
texts = bench._texts(Path(sys.argv[1]), dice)
model = estimate([text.split() for text in texts], 3)
decoder = BeamDecoder(ENGLISH, lm=Ngrams(model.words, model.levels))
outputs = [bench._output(text, ENGLISH, 2.3, 0.02, dice) for text in texts[:256]]
padded, lengths = bench._padded(outputs)
there = padded.cuda()
for batch in (16, 64, 256):
    part, of = there[:batch], lengths[:batch]
    part = part[:, : max(of)]
    decoder.texts(part, of)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    found = decoder.on_gpu(part, of)
    middle = time.perf_counter()
    decoder.texts(part, of)
    end = time.perf_counter()
    hours = sum(of) * 0.02 / 3600
    print(f"batch {batch}: {hours:.3f} h, search {middle - begin:.4f} s, with words {end - middle:.4f} s: {hours / (end - middle):.2f} h/s")
inner = decoder.on_gpu._on[there.device]
steps = inner._steps(there, lengths)
print("steps", len(steps.num_labels), "of frames", there.shape[1], "labels", np.bincount(steps.num_labels))
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]) as seen:
    decoder.on_gpu(there, lengths)
    torch.cuda.synchronize()
print(seen.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=60))
