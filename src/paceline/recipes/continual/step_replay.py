"""Replay within one step: draws before it, a piece of each for every grain, admission of the step's own examples.

Examples are admitted inside the step, right after this rank's last forward, not after the update: what admission sends
to other ranks, and what the next step replays, travels while backward runs. A rank knows its last forward because
`answered` is called once for each of its grains, in their order; a rank without a grain admits (nothing) at once.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import Conflict
from paceline.data.grain import Batch, Grain
from paceline.data.partition import grain_ranks
from paceline.recipes.continual.method import Answer, Method, Replayed
from paceline.recipes.continual.replay.buffer import Items, ReplayBuffer
from paceline.recipes.continual.settings import ContinualSettings
from paceline.recipes.continual.streams import Stream
from paceline.world.link import Link


class StepReplay:
    """The buffer during one step after the other: `begin`, then `pieces` and `answered` for each grain."""

    def __init__(
        self, buffer: ReplayBuffer, method: Method, settings: ContinualSettings, stream: Stream, link: Link
    ) -> None:
        self._buffer, self._method, self._settings, self._stream, self._link = buffer, method, settings, stream, link
        self.num_replayed = 0
        """Items of each of this step's draws."""
        self.ranks: tuple[int, ...] = ()
        """Rank of each grain of the step."""
        self.drawn: list[list[Items]] = []
        """This rank's pieces, one per grain of its own, of each draw."""
        self._answers: list[tuple[Grain, Answer]] = []

    def begin(self, batch: Batch, labels: NDArray[np.int64]) -> None:
        """Draw what the step replays; `labels` are of all its examples."""
        size = self._settings.replay_size
        if size < batch.num_grains:
            grains = batch.num_grains
            raise Conflict(
                f"a replay batch of {size} cannot be shared by {grains} grains: each needs at least one item",
                hint=f"set `--minibatch-size` to {grains} or more, or `--grains` to {size} or less",
            )
        self._batch, self._labels, self._answers = batch, labels, []
        size_of_world, in_blocks = self._link.world.size, batch.starts is not None
        self.ranks = grain_ranks(batch.num_samples, batch.num_grains, size_of_world, in_blocks=in_blocks)
        available = min(size, self._buffer.num_stored)
        self.num_replayed = available if available >= batch.num_grains else 0
        if self._method.counts_replayed:
            batch.count += self.num_replayed
        self.drawn = self._buffer.draw(size, self.ranks, self._method.draws)
        if not batch.grains:  # where others have computed theirs, before anything is reduced
            self._admit()

    def pieces(self) -> list[Replayed]:
        """Return the next grain's piece of each draw; nothing while too little is stored."""
        if not self.num_replayed:
            return []
        number = len(self._answers)
        return [self._replayed(draw[number]) for draw in self.drawn]

    def pieces_of_draw(self, draw: int) -> list[Replayed]:
        """Return this rank's pieces of one draw, one per grain of its own."""
        return [self._replayed(piece) for piece in self.drawn[draw]]

    def answered(self, grain: Grain, answer: Answer) -> None:
        """Take the method's answer for a grain; with that of this rank's last grain, examples are admitted."""
        self._answers.append((grain, answer))
        if len(self._answers) == len(self._batch.grains):
            self._admit()

    def _replayed(self, piece: Items) -> Replayed:
        return Replayed(piece["x"], piece["y"], self.num_replayed, piece.get("logits"))

    def _admit(self) -> None:
        scores = replayed = None
        if self._settings.strategy == "loss-aware":
            scores, replayed = self._scores()
        self._buffer.observe(
            self._items(), self._batch.num_samples, self.ranks, labels=self._labels, scores=scores, replayed=replayed
        )
        if not self._batch.is_last:
            self._buffer.prefetch(self._settings.replay_size, self.ranks, self._method.draws)

    def _items(self) -> Items:
        """Return this rank's new examples as the buffer stores them."""
        grains, answers = [grain for grain, _ in self._answers], [answer for _, answer in self._answers]
        if len(grains) == 1:
            items = {"x": grains[0].x, "y": grains[0].y}
        elif grains:
            items = {"x": torch.cat([grain.x for grain in grains]), "y": torch.cat([grain.y for grain in grains])}
        else:
            empty = torch.zeros(0, dtype=torch.float32, device=self._link.device)
            items = {"x": empty.to(self._stream.dtype).view(0, *self._stream.shape), "y": empty.long()}
        if self._method.keeps_logits:
            logits = [answer.logits.detach() for answer in answers]
            empty = torch.zeros((0, self._stream.num_classes), dtype=torch.float32, device=self._link.device)
            items["logits"] = logits[0] if len(logits) == 1 else torch.cat([empty, *logits])
        return items

    def _scores(self) -> tuple[Tensor, Tensor | None]:
        """Return the negative losses of this rank's examples, and of those it replayed."""
        empty = torch.zeros(0, dtype=torch.float32, device=self._link.device)
        new = [-_losses(answer.logits, grain.y) for grain, answer in self._answers]
        old = []
        if self.num_replayed:
            old = [
                -_losses(answer.replayed_logits, piece["y"])
                for (_, answer), piece in zip(self._answers, self.drawn[0], strict=True)
                if answer.replayed_logits is not None
            ]
        # A method gives outputs for what it replays on all ranks or on none, whether a rank has grains or not.
        gives_old = self.num_replayed > 0 and (bool(old) or not self._answers)
        return torch.cat([empty, *new]), torch.cat([empty, *old]) if gives_old else None


def _losses(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.detach(), y, reduction="none")
