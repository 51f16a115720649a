"""Replay buffer whose content and replay order are those of one process, on any number of ranks.

Every rank takes the same decisions (which item is kept in which slot, what is replayed) from the global index of each
item and the number of the step; only payload travels. `replicated`: every rank holds everything, and the few items that
a step admits go to all. `sharded`: an item stays on the rank that saw it, and what a step replays goes to the ranks
that need it, sent ahead while the step before is still computing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.errors import Conflict, RanksDiffer
from paceline.core.units import counted
from paceline.recipes.continual.replay import admission
from paceline.recipes.continual.replay.admission import Admission, Strategy
from paceline.recipes.continual.replay.draw import Drawer
from paceline.recipes.continual.replay.exchange import (
    Admitted,
    Arrival,
    Cut,
    Pieces,
    Placement,
    Replicated,
    Sharded,
    cut,
    numbers_of_all,
    words_of_all,
)
from paceline.recipes.continual.replay.table import Field, Integers, Layout, Table
from paceline.world.link import Link

Mode = Literal["replicated", "sharded"]
Items = dict[str, torch.Tensor]

CHECK_EVERY = 100
"""Steps between two comparisons of the ranks' buffers."""


class Request(NamedTuple):
    """Draws to be replayed in a step."""

    step: int
    size: int
    pieces: Pieces
    draws: int


class ReplayBuffer:
    """`capacity` items of these fields. All ranks must make it alike and call its methods in the same order.

    A step is: `draw` what to replay, compute, `observe` the step's own items, `prefetch` for the next step. `pieces`
    are the ranks of the grains of the step (all 0 in a single process).
    """

    def __init__(
        self,
        capacity: int,
        fields: Mapping[str, Field],
        link: Link,
        *,
        seed: int = 0,
        strategy: Strategy = "reservoir",
        mode: Mode = "replicated",
        check_every: int | None = CHECK_EVERY,
    ) -> None:
        self.capacity, self.seed, self.strategy, self.mode = capacity, seed, strategy, mode
        self.layout = Layout(fields)
        self.num_seen = 0
        """Items of the stream so far: the global index of the next one."""
        self.num_steps = 0
        """Steps observed so far, which key the draws."""
        self._link, self._check_every = link, check_every
        self._placement = self._empty()
        self._admission = Admission(strategy, seed, capacity)
        self._drawer = Drawer(seed, None if strategy == "herding" else capacity)
        self._ahead: tuple[Request, Arrival] | None = None
        self._first_draw: tuple[Integers, Cut] | None = None  # of the step under way

    def _empty(self) -> Placement:
        is_sharded = self.mode == "sharded" and self._link.world.size > 1
        return (Sharded if is_sharded else Replicated)(self.layout, self.capacity, self._link)

    @property
    def table(self) -> Table:
        """Slots, and the payload that this rank holds."""
        return self._placement.table

    @property
    def num_stored(self) -> int:
        return self.table.num_stored

    # -- what to replay ------------------------------------------------------------------------------------------

    def draw(self, size: int, pieces: Sequence[int], draws: int = 1) -> list[list[Items]]:
        """Return, for each of `draws` independent draws of `size` items, this rank's pieces, one per grain it has.

        Fewer items while fewer are stored; no pieces at all (empty lists) while there is less than one item per grain.
        """
        self._placement.settle()
        request = self._request(size, pieces, draws)
        if request.size == 0:
            self._first_draw = None
            return [[] for _ in range(draws)]
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == request:
            rows = ahead[1].wait()
        else:
            if ahead is not None:
                ahead[1].wait()  # the step came with other pieces than foreseen
            rows = self._placement.fetch(*self._slots_of(request), draws).wait()
        sizes = self._cut(request.size, request.pieces).sizes
        if len(sizes) * draws == 1:
            return [[self.layout.unpack(rows)]]
        each = [self.layout.unpack(part) for part in rows.split(sizes * draws)] if sizes else []
        return [each[number * len(sizes) : (number + 1) * len(sizes)] for number in range(draws)]

    def prefetch(self, size: int, pieces: Sequence[int], draws: int = 1) -> None:
        """Send what the next step will replay, if it has these pieces; else it is sent when that step draws."""
        request = self._request(size, pieces, draws)
        if request.size and self._placement.travels:
            self._ahead = (request, self._placement.fetch(*self._slots_of(request), draws))

    def _request(self, size: int, pieces: Sequence[int], draws: int) -> Request:
        if size > self.capacity:
            raise Conflict(
                f"a replay batch of {size} cannot come from a buffer of {self.capacity}",
                hint=f"set `--buffer-size` to {size} or more, or `--minibatch-size` to {self.capacity} or less",
            )
        available = min(size, self.num_stored)
        return Request(self.num_steps, available if available >= len(pieces) else 0, tuple(pieces), draws)

    def _slots_of(self, request: Request) -> tuple[Integers, Cut]:
        """Return the slots of all draws, one after the other, and the cut of one."""
        step, size, pieces, draws = request
        drawn = [self._drawer.slots(step, number, self.num_stored, size) for number in range(draws)]
        one_draw = self._cut(size, pieces)
        self._first_draw = (drawn[0], one_draw)
        return drawn[0] if draws == 1 else np.concatenate(drawn), one_draw

    def _forget_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead[1].wait()
            self._ahead = None

    # -- what to keep --------------------------------------------------------------------------------------------

    def observe(
        self,
        items: Mapping[str, torch.Tensor],
        num_items: int,
        pieces: Sequence[int],
        *,
        labels: Integers | None = None,
        scores: torch.Tensor | None = None,
        replayed: torch.Tensor | None = None,
    ) -> None:
        """Admit items of one step: `items` are those of this rank's grains, `num_items` all of them.

        `labels` are of all items of the step, for class-balanced admission. `scores` are of this rank's, for loss-aware
        admission (the negative losses), and `replayed` of its pieces of the first draw, whose scores have changed; both
        are given on all ranks, or on none.
        """
        self._placement.settle()
        self._forget_ahead()
        self._check()
        here = self._cut(num_items, tuple(pieces))
        first, self.num_seen = self.num_seen, self.num_seen + num_items
        self.num_steps += 1
        all_scores = None
        if self.strategy == "loss-aware" and scores is not None:
            all_scores = self._gather_scores(here, scores, replayed)
        slots = self._admission.slots(first, num_items, self.table, labels, all_scores)
        if slots is None:
            return
        positions = admission.last_of_each(slots)
        if len(positions):
            admitted = Admitted(
                positions,
                slots[positions],
                first + positions,
                None if labels is None else labels[positions],
                None if all_scores is None else all_scores[positions],
            )
            self._placement.store(items, here, admitted)

    def _gather_scores(self, here: Cut, scores: torch.Tensor, replayed: torch.Tensor | None) -> NDArray[np.float64]:
        """Return the scores of all items of the step and note those of what was replayed: one message per rank."""
        first_draw = None if replayed is None else self._first_draw
        counts, local = here.counts, scores
        if first_draw is not None and replayed is not None:
            local = torch.cat([scores.double(), replayed.double()])
            counts = tuple(new + old for new, old in zip(counts, first_draw[1].counts, strict=True))
        all_scores = np.empty(len(here.ranks), np.float64)
        for rank, numbers in enumerate(numbers_of_all(self._link, local, counts)):
            values = numbers.detach().double().cpu().numpy()
            all_scores[here.ranks == rank] = values[: here.counts[rank]]
            if first_draw is not None:
                slots, there = first_draw
                self.table.score[slots[there.ranks == rank]] = values[here.counts[rank] :]
        return all_scores

    def choose(
        self,
        items: Mapping[str, torch.Tensor],
        features: torch.Tensor,
        num_items: int,
        pieces: Sequence[int],
        labels: Integers,
    ) -> None:
        """Keep, at the end of a stage, those of its items that are nearest to their class's mean `features` (herding).

        Classes get equal shares of the buffer; what is already there of other classes is cut down to its share, best
        items first. `items` and `features` are this rank's, `labels` are of all items.
        """
        self._placement.settle()
        self._forget_ahead()
        here = self._cut(num_items, tuple(pieces))
        all_features = np.empty((num_items, features.shape[1]), np.float64)
        for rank, numbers in enumerate(numbers_of_all(self._link, features, here.counts)):
            all_features[here.ranks == rank] = numbers.detach().double().cpu().numpy()
        first, self.num_seen = self.num_seen, self.num_seen + num_items
        new = np.unique(labels)
        stored = self.table.label[: self.num_stored]
        classes = np.union1d(new, stored)
        num_candidates = [(labels == name).sum() if name in new else (stored == name).sum() for name in classes]
        quotas = admission.quotas(np.array(num_candidates), self.capacity).tolist()
        quota = dict(zip(classes.tolist(), quotas, strict=True))
        kept = [np.flatnonzero(stored == name)[: quota[name]] for name in classes.tolist() if name not in new]
        self.table.keep(np.concatenate([np.zeros(0, np.int64), *kept]))
        chosen = []
        for name in new.tolist():
            members = np.flatnonzero(labels == name)
            chosen.append(members[admission.herd(all_features[members], quota[name])])
        positions = np.concatenate(chosen)
        slots = np.arange(self.num_stored, self.num_stored + len(positions))
        if len(positions):
            self._placement.store(items, here, Admitted(positions, slots, first + positions, labels[positions], None))
        self._placement.settle()

    def _cut(self, num_positions: int, pieces: Pieces) -> Cut:
        return cut(num_positions, pieces, self._link.world.rank, self._link.world.size)

    # -- are the ranks the same ----------------------------------------------------------------------------------

    def digest(self, exact_only: bool = True) -> int:
        """Return a number over slot, global index and payload (floats left out if `exact_only`), the same at any world
        size and in both modes. All ranks must call it."""
        self._placement.settle()
        return self._placement.digest(exact_only)

    def _check(self) -> None:
        """Compare, every `check_every` steps, what the ranks have decided, and where all hold the same payload, that
        too."""
        if self._link.world.size == 1 or not self._check_every or self.num_steps % self._check_every:
            return
        prints = words_of_all(self._link, (self._placement.fingerprint() + self.num_seen) % 2**64)
        if len(set(prints)) > 1:
            others = ", ".join(str(rank) for rank, digest in enumerate(prints) if digest != prints[0])
            raise RanksDiffer(
                f"the replay buffers of ranks {others} differ from that of rank 0 after step {self.num_steps}",
                hint="every rank must observe the same steps with the same labels: is the data, its order or the seed "
                "another on some rank, or was the buffer changed on one of them alone?",
            )

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, torch.Tensor]:
        """Return everything on the first rank, nothing on the others; all ranks must call it."""
        self._placement.settle()
        table, stored = self.table, np.arange(self.num_stored)
        rows = self._placement.collect(stored)
        if rows is None:
            return {}
        return {
            "num_seen": torch.tensor(self.num_seen, device="cpu"),
            "num_steps": torch.tensor(self.num_steps, device="cpu"),
            "index": torch.from_numpy(table.index[stored]),
            "label": torch.from_numpy(table.label[stored]),
            "score": torch.from_numpy(table.score[stored]),
            "classes_seen": torch.from_numpy(self._admission.counts.seen.copy()),
            "classes_full": torch.from_numpy(self._admission.counts.is_full.copy()),
            **{f"item.{name}": tensor.contiguous() for name, tensor in self.layout.unpack(rows).items()},
        }

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over a `state`, on any number of ranks; each takes its share."""
        items = {name.removeprefix("item."): tensor for name, tensor in state.items() if name.startswith("item.")}
        index = state["index"].numpy().copy()
        if items.keys() != self.layout.fields.keys() or len(index) > self.capacity:
            raise Conflict(
                f"the checkpoint's replay buffer has {counted(len(index), 'item')} of {', '.join(items)}; this one has "
                f"room for {self.capacity} of {', '.join(self.layout.fields)}",
                hint="resume with the buffer settings and the method of the run",
            )
        self._ahead = self._first_draw = None
        self.num_seen, self.num_steps = int(state["num_seen"]), int(state["num_steps"])
        self._admission.counts = admission.ClassCounts(
            state["classes_seen"].numpy().copy(), state["classes_full"].numpy().astype(np.bool_)
        )
        self._placement = self._empty()
        if len(index):
            self._placement.load(index, state["label"].numpy(), state["score"].numpy(), items)
