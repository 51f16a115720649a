"""Experience replay with asymmetric cross-entropy: new examples do not push down the classes of earlier tasks.

Caccia et al., "New Insights on Reducing Abrupt Representation Change in Online Continual Learning", 2022. A new example
competes with the classes of its step and with those that have not come yet; stored examples compete with all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.recipes.continual.method import Answer, Incoming, Method, Net, Replayed


class ErAce(Method):
    exact = True
    draws = 1

    def loss(self, net: Net, now: Incoming, replay: Sequence[Replayed]) -> Answer:
        output = net(now.x)
        if self.stage == 0:
            return Answer(self.cross_entropy(output, now.y), len(now), output)
        # Of the whole step, so that the cut into grains and ranks does not matter.
        allowed = ~self.task.stream.seen[self.stage]
        allowed[torch.from_numpy(now.labels)] = True
        masked = output.masked_fill(~allowed.to(output.device), torch.finfo(output.dtype).min)
        total = self.cross_entropy(masked, now.y)
        old_output = None
        if replay:
            old = replay[0]
            old_output = net(old.x)
            # Each of the two means has its own number of examples; the sum is divided by that of the new ones.
            total = total + now.num_items / old.num_items * self.cross_entropy(old_output, old.y)
        return Answer(total, len(now), output, old_output)
