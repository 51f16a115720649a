"""GAN of handwritten digits: two models that take turns, in a loop of one's own.

python gan.py
torchrun --nproc-per-node 2 gan.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import paceline

torch.manual_seed(0)
real = torch.tensor(load_digits().data[:512], dtype=torch.float32) / 8 - 1
generator = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())
discriminator = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(64, 1))

critic = paceline.Engine(level=0)
maker = paceline.Engine(level=0, link=critic.link)
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
maker.prepare(generator, generator_optimizer)
critic.prepare(discriminator, discriminator_optimizer, beside=[generator])


def fakes(grain):
    return generator(torch.randn(len(grain), 16, device=critic.device))


def score(images, truth):
    scores = discriminator(images)
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, truth), reduction="sum")


def critic_loss(grain):
    return (score(grain.data, 1.0) + score(fakes(grain).detach(), 0.0)) / 2, len(grain)


def maker_loss(grain):
    return score(fakes(grain), 1.0), len(grain)


for batch in critic.batches(real, global_batch=64, grains=2, epochs=4):
    criticised = critic.step(critic_loss, batch)
    discriminator.requires_grad_(False)
    made = maker.step(maker_loss, batch)
    discriminator.requires_grad_(True)
print({"critic": criticised.loss, "maker": made.loss})
maker.close()
critic.close()
