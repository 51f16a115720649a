"""The same as ../own_loop.py in Lightning: Fabric."""

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score

EPOCHS, BATCH = 3, 64
fabric = Fabric(precision="32-true")
fabric.launch()
fabric.seed_everything(0)
digits = load_digits()
data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
train, val = random_split(data, [1500, 297])

model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters())
num_steps = EPOCHS * -(-len(train) // BATCH)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=num_steps)
model, optimizer = fabric.setup(model, optimizer)
train_loader, val_loader = fabric.setup_dataloaders(
    DataLoader(train, BATCH // fabric.world_size, shuffle=True), DataLoader(val, 100)
)
scores = MetricCollection({"f1": MulticlassF1Score(10), "auroc": MulticlassAUROC(10)}).to(fabric.device)
mean_loss = MeanMetric().to(fabric.device)

for epoch in range(EPOCHS):
    model.train()
    for x, y in train_loader:
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    model.eval()
    with torch.no_grad():
        for x, y in val_loader:
            output = model(x)
            scores.update(output, y)
            mean_loss.update(F.cross_entropy(output, y), len(y))
    result = {**scores.compute(), "loss": mean_loss.compute()}
    scores.reset(), mean_loss.reset()
    fabric.print(f"epoch {epoch + 1}: loss {loss.item():.4f}, {result}")
