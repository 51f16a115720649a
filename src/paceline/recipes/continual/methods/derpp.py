"""DER++: dark experience replay, and plain replay of a second draw (Buzzega et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.recipes.continual.method import Answer, Incoming, Net, Replayed
from paceline.recipes.continual.methods.der import Der


class DerPlusPlus(Der):
    exact = True
    draws = 2
    keeps_logits = True

    def loss(self, net: Net, now: Incoming, replay: Sequence[Replayed]) -> Answer:
        answer = super().loss(net, now, replay[:1])
        if replay:
            second = replay[1]
            weight = self.settings.beta * now.num_items / second.num_items
            answer.total = answer.total + weight * self.cross_entropy(net(second.x), second.y)
        return answer
