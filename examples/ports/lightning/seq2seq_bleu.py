"""The same as ../seq2seq_bleu.py in Lightning."""

import math
import random
import sys
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from torchmetrics.text import SacreBLEUScore

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


class Sentences(L.LightningDataModule):
    def __init__(self, train, val):
        super().__init__()
        self.train, self.val = sentences(train, 400), sentences(val, 50)
        self.source, self.target = (Vocabulary(lines) for lines in zip(*self.train, strict=True))

    def collate(self, pairs):
        source = pad_sequence([self.source.encode(line) for line, _ in pairs], batch_first=True)
        target = pad_sequence([self.target.encode(line) for _, line in pairs], batch_first=True)
        return source, target, [line for _, line in pairs]

    def train_dataloader(self):
        return DataLoader(self.train, 64 // self.trainer.world_size, shuffle=True, collate_fn=self.collate)

    def val_dataloader(self):
        return DataLoader(self.val, 32, collate_fn=self.collate)


class Translation(L.LightningModule):
    def __init__(self, source, target):
        super().__init__()
        self.target = target
        self.model = Translator(len(source.words), len(target.words))
        self.bleu = SacreBLEUScore()

    def loss(self, source, target):
        logits, truth = self.model(source, target[:, :-1]), target[:, 1:]
        options = {"ignore_index": PAD, "label_smoothing": 0.1}
        return F.cross_entropy(logits.flatten(0, 1), truth.flatten(), **options), int((truth != PAD).sum())

    def training_step(self, batch, number):
        loss, _ = self.loss(*batch[:2])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, number):
        source, target, references = batch
        loss, num_tokens = self.loss(source, target)
        self.log("val/loss", loss, batch_size=num_tokens, sync_dist=True)
        written = [self.target.decode(ids) for ids in self.model.write(source).tolist()]
        self.bleu.update(written, [[line] for line in references])
        self.log("val/bleu", self.bleu, on_epoch=True, batch_size=len(references))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) ** -0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


if __name__ == "__main__":
    L.seed_everything(0)
    files = sys.argv[1:]
    data = Sentences(files[:2], files[2:])
    best = ModelCheckpoint(monitor="val/bleu", mode="max")
    trainer = L.Trainer(max_epochs=2, gradient_clip_val=1.0, callbacks=[best])
    trainer.fit(Translation(data.source, data.target), data)
    print(trainer.callback_metrics)
