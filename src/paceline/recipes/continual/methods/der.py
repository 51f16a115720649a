"""Dark experience replay: stored examples shall have the outputs that they had when they were new.

Buzzega et al., "Dark Experience for General Continual Learning: a Strong, Simple Baseline", 2020.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.recipes.continual.method import Answer, Incoming, Method, Net, Replayed, per_example


class Der(Method):
    exact = True
    draws = 1
    keeps_logits = True

    def loss(self, net: Net, now: Incoming, replay: Sequence[Replayed]) -> Answer:
        output = net(now.x)
        total = self.cross_entropy(output, now.y)
        old_output = None
        if replay:
            old = replay[0]
            assert old.logits is not None
            old_output = net(old.x)
            distance = per_example((old_output - old.logits).square()).sum()
            # A mean over the draw beside a mean over the step, which divides the whole.
            total = total + self.settings.alpha * now.num_items / old.num_items * distance
        return Answer(total, len(now), output, old_output)
