"""The same as ../timm_mixup.py in Lightning."""

import lightning as L
import timm
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from torch.utils.data import DataLoader, TensorDataset


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.mixup = Mixup(mixup_alpha=0.2, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=10)
        self.criterion = SoftTargetCrossEntropy()
        self.model = timm.create_model("test_resnet", num_classes=10, in_chans=1)

    def training_step(self, batch, number):
        x, targets = self.mixup(*batch)
        loss = self.criterion(self.model(x), targets)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, number):
        x, y = batch
        right = self.model(x).argmax(1) == y
        self.log("val/accuracy", right.float().mean(), batch_size=len(y), sync_dist=True)

    def configure_optimizers(self):
        optimizer = create_optimizer_v2(self.model, "lamb", lr=5e-3, weight_decay=0.02)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class DigitsData(L.LightningDataModule):
    def data(self, is_train):
        digits = load_digits()
        x, y = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
        return TensorDataset(x[:1100], y[:1100]) if is_train else TensorDataset(x[1100:], y[1100:])

    def train_dataloader(self):
        return DataLoader(self.data(True), batch_size=64 // self.trainer.world_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.data(False), batch_size=32)


if __name__ == "__main__":
    L.seed_everything(0)
    best = ModelCheckpoint(monitor="val/accuracy", mode="max")
    trainer = L.Trainer(max_epochs=1, callbacks=[best])
    trainer.fit(Digits(), DigitsData())
    print(trainer.callback_metrics)
