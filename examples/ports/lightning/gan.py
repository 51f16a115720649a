"""The same as ../gan.py in Lightning: manual optimization."""

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader


class Gan(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())
        self.discriminator = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(64, 1))

    def fakes(self, real):
        return self.generator(torch.randn(len(real), 16, device=self.device))

    def score(self, images, truth):
        scores = self.discriminator(images)
        return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, truth))

    def training_step(self, real, number):
        critic, maker = self.optimizers()
        self.toggle_optimizer(critic)
        critic_loss = (self.score(real, 1.0) + self.score(self.fakes(real).detach(), 0.0)) / 2
        self.manual_backward(critic_loss)
        critic.step()
        critic.zero_grad()
        self.untoggle_optimizer(critic)
        self.toggle_optimizer(maker)
        maker_loss = self.score(self.fakes(real), 1.0)
        self.manual_backward(maker_loss)
        maker.step()
        maker.zero_grad()
        self.untoggle_optimizer(maker)
        self.log_dict({"critic": critic_loss, "maker": maker_loss}, sync_dist=True)

    def configure_optimizers(self):
        critic = torch.optim.Adam(self.discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
        maker = torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
        return [critic, maker], []

    def train_dataloader(self):
        real = torch.tensor(load_digits().data[:512], dtype=torch.float32) / 8 - 1
        return DataLoader(real, batch_size=64 // self.trainer.world_size, shuffle=True)


if __name__ == "__main__":
    L.seed_everything(0)
    trainer = L.Trainer(max_epochs=4)
    trainer.fit(Gan())
    print(trainer.callback_metrics)
