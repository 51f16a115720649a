"""All tasks at once, as if nothing came later: the upper bound. Only the last row of the matrix is measured."""

from __future__ import annotations

import torch

from paceline.recipes.continual.files import Labelled
from paceline.recipes.continual.methods.finetune import Finetune
from paceline.train.task import Stage


class Joint(Finetune):
    exact = True
    is_joint = True

    def stages(self) -> list[Stage]:
        return [Stage("all tasks", lambda: self.task.stage_data(self._everything()))]

    def _everything(self) -> Labelled:
        parts = [experience.train() for experience in self.task.stream.experiences]
        return Labelled(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))
