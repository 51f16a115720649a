"""Experience replay: new and stored examples in one batch, one mean over both.

Ratcliff, "Connectionist models of recognition memory", 1990; as a baseline in Buzzega et al. 2020.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.recipes.continual.method import Answer, Incoming, Method, Net, Replayed


class ER(Method):
    exact = True
    draws = 1
    counts_replayed = True

    def loss(self, net: Net, now: Incoming, replay: Sequence[Replayed]) -> Answer:
        if not replay:
            output = net(now.x)
            return Answer(self.cross_entropy(output, now.y), len(now), output)
        old = replay[0]
        output = net(torch.cat([now.x, old.x]))
        total = self.cross_entropy(output, torch.cat([now.y, old.y]))
        return Answer(total, len(output), output[: len(now)], output[len(now) :])
