"""Image classifier of timm with its Mixup, its loss and its optimizer.

python timm_mixup.py
torchrun --nproc-per-node 2 timm_mixup.py
"""

import timm
import torch
from sklearn.datasets import load_digits
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from torch.utils.data import TensorDataset

import paceline


class Digits(paceline.Task):
    mixup = Mixup(mixup_alpha=0.2, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=10)
    criterion = SoftTargetCrossEntropy()

    def model(self):
        return timm.create_model("test_resnet", num_classes=10, in_chans=1)

    def data(self, is_train):
        digits = load_digits()
        x, y = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
        return TensorDataset(x[:1100], y[:1100]) if is_train else TensorDataset(x[1100:], y[1100:])

    def train_data(self):
        return self.data(True)

    def val_data(self):
        return {"val": self.data(False)}

    def loss(self, model, grain):
        x, targets = self.mixup(grain.x, grain.y)
        return self.criterion(model(x), targets) * len(grain), len(grain)

    def metrics(self, model, grain):
        right = model(grain.x).argmax(1) == grain.y
        return {"accuracy": (right.sum(), len(grain))}

    def optimizer(self, groups, settings, device):
        return create_optimizer_v2(groups, "lamb", lr=settings.lr, weight_decay=0.02)


if __name__ == "__main__":
    settings = {"global_batch": 64, "grains": 2, "drop_last": True, "epochs": 1, "lr": 5e-3, "schedule": "cosine"}
    result = paceline.fit(Digits(), monitor="val/accuracy", monitor_mode="max", **settings)
    print(result.metrics)
