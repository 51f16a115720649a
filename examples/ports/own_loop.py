"""Loop of one's own, with metrics of torchmetrics and a scheduler of torch.

python own_loop.py
torchrun --nproc-per-node 2 own_loop.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score

import paceline

EPOCHS, BATCH = 3, 64
torch.manual_seed(0)
digits = load_digits()
data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
train, val = random_split(data, [1500, 297])

engine = paceline.Engine(level=0, clip_norm=1.0)
model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters())
num_steps = EPOCHS * -(-len(train) // BATCH)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=num_steps)
engine.prepare(model, optimizer, scheduler)
scores = MetricCollection({"f1": MulticlassF1Score(10), "auroc": MulticlassAUROC(10)}).to(engine.device)


def loss(grain):
    return F.cross_entropy(model(grain.x), grain.y, reduction="sum"), len(grain)


def metrics(grain):
    scores.update(model(grain.x), grain.y)
    return {"loss": loss(grain), "val": scores}


for epoch in range(EPOCHS):
    for batch in engine.batches(train, global_batch=BATCH, grains=2):
        step = engine.step(loss, batch)
    result = engine.evaluate(metrics, val, eval_batch=100)
    if engine.link.is_first:
        print(f"epoch {epoch + 1}: loss {step.loss:.4f}, {result}")
engine.close()
