"""Translation with a Transformer of torch, validated by corpus BLEU (sacrebleu) of what it writes.

python seq2seq_bleu.py
torchrun --nproc-per-node 2 seq2seq_bleu.py
python seq2seq_bleu.py train.en train.de val.en val.de     # one sentence per line
"""

import math
import random
import sys
from pathlib import Path

import sacrebleu
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import paceline

PAD, BEGIN, END, UNKNOWN = range(4)


def sentences(files, number):
    """Return pairs of sentences: of two files, or so many made-up ones (numbers, and the same backwards)."""
    if files:
        return list(zip(*(Path(file).read_text(encoding="utf-8").splitlines() for file in files), strict=True))
    words, draw = (
        ["null", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"],
        random.Random(number),
    )
    lines = [draw.choices(words, k=draw.randint(3, 7)) for _ in range(number)]
    return [(" ".join(line), " ".join(reversed(line))) for line in lines]


class Vocabulary:
    def __init__(self, lines):
        self.words = ["", "", "", "?", *sorted({word for line in lines for word in line.split()})]
        self.ids = {word: number for number, word in enumerate(self.words) if word}

    def encode(self, line):
        return torch.tensor([BEGIN, *(self.ids.get(word, UNKNOWN) for word in line.split()), END])

    def decode(self, ids):
        ends = [place for place, number in enumerate(ids) if number == END]
        return " ".join(self.words[number] for number in ids[: ends[0] if ends else None] if number > END)


class Translator(nn.Module):
    def __init__(self, source, target, width=64):
        super().__init__()
        self.source, self.target = nn.Embedding(source, width), nn.Embedding(target, width)
        self.transformer = nn.Transformer(width, 4, 2, 2, 2 * width, dropout=0.1, batch_first=True)
        self.transformer.encoder.enable_nested_tensor = False
        self.output = nn.Linear(width, target)

    def place(self, embedded):
        time, half = embedded.shape[1], embedded.shape[2] // 2
        rates = torch.exp(torch.arange(half, device=embedded.device) * (-math.log(1e4) / half))
        angles = torch.arange(time, device=embedded.device).unsqueeze(1) * rates
        return embedded + torch.cat([angles.sin(), angles.cos()], 1)

    def forward(self, source, target):
        later = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=target.device).triu(1)
        source_pad, target_pad = source == PAD, target == PAD
        source, target = self.place(self.source(source)), self.place(self.target(target))
        return self.output(self.transformer(source, target, None, later, None, source_pad, target_pad, source_pad))

    def write(self, source, longest=40):
        written = torch.full((len(source), 1), BEGIN, device=source.device)
        for _ in range(min(longest, 2 * source.shape[1])):
            written = torch.cat([written, self(source, written)[:, -1:].argmax(2)], 1)
        return written[:, 1:]


def bleu(written, references):
    return sacrebleu.corpus_bleu(written, [references]).score


class Translation(paceline.Task):
    def __init__(self, train, val):
        self.train, self.val = sentences(train, 400), sentences(val, 50)
        self.source, self.target = (Vocabulary(lines) for lines in zip(*self.train, strict=True))

    def collate(self, pairs):
        source = pad_sequence([self.source.encode(line) for line, _ in pairs], batch_first=True)
        return source, pad_sequence([self.target.encode(line) for _, line in pairs], batch_first=True)

    def model(self):
        return Translator(len(self.source.words), len(self.target.words))

    def train_data(self):
        return self.train

    def val_data(self):
        return {"val": self.val}

    def loss(self, model, grain):
        source, target = grain
        logits, truth = model(source, target[:, :-1]), target[:, 1:]
        options = {"ignore_index": PAD, "label_smoothing": 0.1, "reduction": "sum"}
        return F.cross_entropy(logits.flatten(0, 1), truth.flatten(), **options), (truth != PAD).sum()

    def metrics(self, model, grain):
        written = [self.target.decode(ids) for ids in model.write(grain.x).tolist()]
        references = [self.val[sample][1] for sample in grain.samples]
        return {"loss": self.loss(model, grain), "bleu": paceline.Gathered(bleu, written, references)}


if __name__ == "__main__":
    files = sys.argv[1:]
    settings = {"global_batch": 64, "grains": 2, "epochs": 2, "lr": 2e-3, "clip_norm": 1.0, "schedule": "inverse-sqrt"}
    task = Translation(files[:2], files[2:])
    result = paceline.fit(task, monitor="val/bleu", monitor_mode="max", **settings)
    print(result.metrics)
