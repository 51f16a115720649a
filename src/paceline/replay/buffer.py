"""A replay buffer whose content and replay order are those of one process, on any number of ranks.

Every rank takes the same decisions (which item is kept in which slot, what is replayed) from the global index of each
item and the number of the step; only payload travels. `replicated`: every rank holds everything, and the few items that
a step admits go to all. `sharded`: an item stays on the rank that saw it, and what a step replays goes to the ranks
that need it, sent ahead while the step before is still computing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.replay import admission, digest
from paceline.replay.draw import draws
from paceline.replay.errors import BufferDiverged, BufferTooSmall, StateMisfit
from paceline.replay.exchange import Arrival, numbers_of_all, to_all, to_each, words_of_all
from paceline.replay.layout import Field, Layout
from paceline.replay.pieces import Cut, Pieces, cut
from paceline.replay.slots import NOWHERE, SlotTable
from paceline.replay.store import Integers, Store
from paceline.replay.strategy import Admission, Strategy
from paceline.world.link import Link

Mode = Literal["replicated", "sharded"]
Items = dict[str, torch.Tensor]

CHECK_EVERY = 100
"""Steps between two comparisons of the ranks' buffers."""
DRAWN_AHEAD = 64
"""Steps whose draws are made at once."""


@dataclass(frozen=True)
class Request:
    """What is to be replayed in a step."""

    step: int
    size: int
    pieces: Pieces
    draws: int


class ReplayBuffer:
    """`capacity` items of these fields. All ranks must make it alike and call its methods in the same order.

    A step is: `draw` what to replay, compute, `observe` the step's own items, `prefetch` for the next step. `pieces`
    says which rank has which grain of the step (all 0 in a single process).
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
        self.slots = SlotTable(capacity)
        self.num_seen = 0
        """Items of the stream so far: the global index of the next one."""
        self.num_steps = 0
        """Steps observed so far, which key the draws."""
        self._link, self._check_every = link, check_every
        self._rank, self._num_ranks = link.world.rank, link.world.size
        self._is_sharded = mode == "sharded" and self._num_ranks > 1
        self._store = self._empty_store()
        self._admission = Admission(strategy, seed, capacity)
        self._landing: tuple[Integers, Integers, Integers, Arrival] | None = None
        self._ahead: tuple[Request, Arrival] | None = None
        self._drawn: tuple[Integers, Cut] | None = None
        self._drawn_ahead: dict[int, tuple[tuple[int, int], int, Integers]] = {}

    @property
    def num_stored(self) -> int:
        return self.slots.num_stored

    @property
    def num_held(self) -> int:
        """Items whose payload this rank has."""
        return int((self.slots.row != NOWHERE).sum())

    # -- what to replay ------------------------------------------------------------------------------------------

    def draw(self, size: int, pieces: Sequence[int], draws: int = 1) -> list[list[Items]]:
        """For each of `draws` independent draws of `size` items, this rank's pieces, one per grain of its own.

        Fewer items while fewer are stored; no pieces at all (empty lists) while there is less than one item per grain.
        """
        self._land()
        request = Request(self.num_steps, self._size(size, pieces), tuple(pieces), draws)
        if request.size == 0:
            self._drawn = None
            return [[] for _ in range(draws)]
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == request:
            rows = ahead[1].wait()
        else:
            if ahead is not None:
                ahead[1].wait()  # the step came with other pieces than foreseen
            rows = self._fetch(request)
        sizes = self._cut(request.size, request.pieces).sizes
        if len(sizes) * draws == 1:
            return [[self.layout.unpack(rows)]]
        each = [self.layout.unpack(part) for part in rows.split(sizes * draws)] if sizes else []
        return [each[number * len(sizes) : (number + 1) * len(sizes)] for number in range(draws)]

    def prefetch(self, size: int, pieces: Sequence[int], draws: int = 1) -> None:
        """Send what the next step will replay, if it has these pieces; else it is sent when that step draws."""
        request = Request(self.num_steps, self._size(size, pieces), tuple(pieces), draws)
        if self._is_sharded and request.size:
            self._ahead = (request, self._send(request))

    def _forget_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead[1].wait()
            self._ahead = None

    def _size(self, size: int, pieces: Sequence[int]) -> int:
        if size > self.capacity:
            raise BufferTooSmall(self.capacity, size)
        stored = min(size, self.num_stored)
        return stored if stored >= len(pieces) else 0

    def _slots_of(self, request: Request) -> Integers:
        drawn = [self._draw(request.step, number, request.size) for number in range(request.draws)]
        self._drawn = (drawn[0], self._cut(request.size, request.pieces))
        return drawn[0] if request.draws == 1 else np.concatenate(drawn)

    def _draw(self, step: int, number: int, size: int) -> Integers:
        """One draw; while the number of stored items does not change, those of the next steps are drawn with it."""
        asked, first, drawn = self._drawn_ahead.get(number, ((0, 0), 0, np.zeros((0, 0), np.int64)))
        if asked != (self.num_stored, size) or not first <= step < first + len(drawn):
            is_full = self.num_stored == self.capacity and self.strategy != "herding"
            steps = range(step, step + (DRAWN_AHEAD if is_full else 1))
            asked, first = (self.num_stored, size), step
            drawn = draws(self.seed, steps, number, self.num_stored, size)
            self._drawn_ahead[number] = (asked, first, drawn)
        found: Integers = drawn[step - first]
        return found

    def _fetch(self, request: Request) -> torch.Tensor:
        """This rank's rows of a request, now."""
        if self._is_sharded:
            return self._send(request).wait()
        slots = self._slots_of(request)
        if self._num_ranks > 1:
            one = self._cut(request.size, request.pieces)
            slots = slots.reshape(request.draws, -1)[:, one.mine].reshape(-1)
        return self._store.read(self.slots.row[slots])

    def _send(self, request: Request) -> Arrival:
        one = self._cut(request.size, request.pieces)
        return self._exchange(self._slots_of(request), np.tile(one.ranks, request.draws))

    def _exchange(self, slots: Integers, receivers: Integers) -> Arrival:
        """Each of these slots to a rank, all known to all."""
        owners = self.slots.owner[slots]
        sent = np.flatnonzero(owners == self._rank)
        sent = sent[np.argsort(receivers[sent], kind="stable")]
        sources = owners[receivers == self._rank]
        order = np.empty(len(sources), np.int64)  # they arrive by owner
        order[np.argsort(sources, kind="stable")] = np.arange(len(sources))
        return to_each(
            self._store.read(self.slots.row[slots[sent]]),
            np.bincount(receivers[sent], minlength=self._num_ranks).tolist(),
            np.bincount(sources, minlength=self._num_ranks).tolist(),
            self._store.index(order),
        )

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
        """The items of one step: `items` are those of this rank's grains, `num_items` all of them.

        `labels` are of all items of the step, for class-balanced admission. `scores` are of this rank's, for loss-aware
        admission (the negative losses), and `replayed` of its pieces of the first draw, whose scores have changed; both
        are given on all ranks, or on none.
        """
        self._land()
        self._forget_ahead()
        self._check()
        here = self._cut(num_items, tuple(pieces))
        first, self.num_seen = self.num_seen, self.num_seen + num_items
        self.num_steps += 1
        all_scores = None
        if self.strategy == "loss-aware" and scores is not None:
            all_scores = self._gather_scores(here, scores, replayed)
        slots = self._admission.slots(first, num_items, self.slots, labels, all_scores)
        kept = None if slots is None else admission.last_of_each(slots)
        if slots is not None and kept is not None and len(kept):
            self._keep(
                items,
                here,
                kept,
                slots[kept],
                first + kept,
                None if labels is None else labels[kept],
                None if all_scores is None else all_scores[kept],
            )

    def _gather_scores(self, here: Cut, scores: torch.Tensor, replayed: torch.Tensor | None) -> NDArray[np.float64]:
        """Scores of all items of the step, and of what was replayed, in one message per rank."""
        drawn = None if replayed is None else self._drawn
        counts, mine = here.counts, scores
        if drawn is not None and replayed is not None:
            mine = torch.cat([scores.double(), replayed.double()])
            counts = tuple(own + more for own, more in zip(counts, drawn[1].counts, strict=True))
        found = np.empty(len(here.ranks), np.float64)
        for rank, numbers in enumerate(numbers_of_all(self._link, mine, counts)):
            values = numbers.detach().double().cpu().numpy()
            found[here.ranks == rank] = values[: here.counts[rank]]
            if drawn is not None:
                slots, there = drawn
                self.slots.score[slots[there.ranks == rank]] = values[here.counts[rank] :]
        return found

    def choose(
        self,
        items: Mapping[str, torch.Tensor],
        features: torch.Tensor,
        num_items: int,
        pieces: Sequence[int],
        labels: Integers,
    ) -> None:
        """Herding, at the end of a stage: of all its items, those nearest to their class's mean `features`.

        Classes get equal shares of the buffer; what is already there of other classes is cut down to its share, best
        items first. `items` and `features` are this rank's, `labels` are of all items.
        """
        self._land()
        self._forget_ahead()
        here = self._cut(num_items, tuple(pieces))
        everyone = numbers_of_all(self._link, features, here.counts)
        found = np.empty((num_items, features.shape[1]), np.float64)
        for rank, numbers in enumerate(everyone):
            found[here.ranks == rank] = numbers.detach().double().cpu().numpy()
        first, self.num_seen = self.num_seen, self.num_seen + num_items
        table = self.slots
        new = np.unique(labels)
        old = table.label[: self.num_stored]
        classes = np.union1d(new, old)
        held = np.array([(labels == name).sum() if name in new else (old == name).sum() for name in classes])
        given = dict(zip(classes.tolist(), admission.quotas(held, self.capacity).tolist(), strict=True))
        kept = [np.flatnonzero(old == name)[: given[name]] for name in classes.tolist() if name not in new]
        table.keep(np.concatenate([np.zeros(0, np.int64), *kept]))
        chosen = []
        for name in new.tolist():
            members = np.flatnonzero(labels == name)
            chosen.append(members[admission.herd(found[members], given[name])])
        positions = np.concatenate(chosen)
        slots = np.arange(self.num_stored, self.num_stored + len(positions))
        if len(positions):
            self._keep(items, here, positions, slots, first + positions, labels[positions], None)
        self._land()

    def _keep(
        self,
        items: Mapping[str, torch.Tensor],
        here: Cut,
        positions: Integers,
        slots: Integers,
        index: Integers,
        labels: Integers | None,
        scores: NDArray[np.float64] | None,
    ) -> None:
        """Put items into slots; their payload stays here, or goes to all."""
        owners = here.ranks[positions]
        is_mine = owners == self._rank
        self.layout.check(items, len(here.mine))
        local = np.searchsorted(here.mine, positions[is_mine])
        rows = self.layout.pack(items, torch.from_numpy(local), self._link.device)
        if self._is_sharded or self._num_ranks == 1:
            self._write(self.slots.put(slots, index, owners, is_mine, labels, scores), rows)
            return
        everyone = np.ones(len(slots), np.bool_)
        places = self.slots.put(slots, index, owners, everyone, labels, scores)
        counts = np.bincount(owners, minlength=self._num_ranks).tolist()
        number = np.zeros(len(owners), np.int64)  # of each item among those of its owner
        for rank in range(self._num_ranks):
            number[owners == rank] = np.arange(counts[rank])
        self._landing = (places, owners, number, to_all(self._link, rows, counts))

    def _land(self) -> None:
        """Store what was sent to all."""
        if self._landing is not None:
            places, owners, number, arrival = self._landing
            self._landing = None
            rows = arrival.wait()
            self._write(places, rows[self._store.index(owners), self._store.index(number)])

    # -- payload on this rank ------------------------------------------------------------------------------------

    def _empty_store(self) -> Store:
        return Store(self.layout, self.capacity, 0 if self._is_sharded else self.capacity, self._link.device)

    def _write(self, rows: Integers, payload: torch.Tensor) -> None:
        self._store.write(rows, payload, self.slots.num_rows)

    def _cut(self, num_positions: int, pieces: Pieces) -> Cut:
        return cut(num_positions, pieces, self._rank, self._num_ranks)

    # -- are we the same -----------------------------------------------------------------------------------------

    def digest(self, exact_only: bool = True) -> int:
        """A number over slot, global index and payload (floats left out if `exact_only`), the same at any world size
        and in both modes. All ranks must call it."""
        self._land()
        part = self._digest_part(exact_only)
        return digest.agreed(words_of_all(self._link, part)) if self._is_sharded else part

    def _digest_part(self, exact_only: bool) -> int:
        slots = np.flatnonzero(self.slots.row != NOWHERE)
        sums = digest.row_sums(self._store.read(self.slots.row[slots]), self.layout, exact_only)
        return digest.digest(slots, self.slots.index[slots], sums)

    def _check(self) -> None:
        """Now and then, compare what the ranks have decided, and where all hold the same payload, that too."""
        if self._num_ranks == 1 or not self._check_every or self.num_steps % self._check_every:
            return
        if self._is_sharded:
            slots = np.arange(self.num_stored)
            mine = digest.digest(slots, self.slots.index[slots], self.slots.owner[slots].astype(np.uint64))
        else:
            mine = self._digest_part(exact_only=False)
        everyone = words_of_all(self._link, (mine + self.num_seen) % 2**64)
        if len(set(everyone)) > 1:
            raise BufferDiverged(self.num_steps, everyone)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, torch.Tensor]:
        """Everything, on the first rank (nothing on the others); all ranks must call it."""
        self._land()
        stored = np.arange(self.num_stored)
        if self._is_sharded:
            rows = self._exchange(stored, np.zeros_like(stored)).wait()
            if self._rank:
                return {}
        else:
            rows = self._store.read(self.slots.row[stored])
        table = self.slots
        return {
            "num_seen": torch.tensor(self.num_seen),
            "num_steps": torch.tensor(self.num_steps),
            "index": torch.from_numpy(table.index[stored]),
            "label": torch.from_numpy(table.label[stored]),
            "score": torch.from_numpy(table.score[stored]),
            "classes_seen": torch.from_numpy(self._admission.counts.seen.copy()),
            "classes_full": torch.from_numpy(self._admission.counts.is_full.copy()),
            **{f"item.{name}": tensor.contiguous() for name, tensor in self.layout.unpack(rows).items()},
        }

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """The counterpart of `state`, on any number of ranks; each takes its share."""
        items = {name.removeprefix("item."): tensor for name, tensor in state.items() if name.startswith("item.")}
        index = state["index"].numpy().copy()
        if items.keys() != self.layout.fields.keys() or len(index) > self.capacity:
            raise StateMisfit(len(index), list(items), self.capacity, list(self.layout.fields))
        self._landing = self._ahead = self._drawn = None
        self.num_seen, self.num_steps = int(state["num_seen"]), int(state["num_steps"])
        self._admission.counts = admission.ClassCounts(
            state["classes_seen"].numpy().copy(), state["classes_full"].numpy().astype(np.bool_)
        )
        self.slots = SlotTable(self.capacity)
        self._store = self._empty_store()
        if not len(index):
            return
        slots = np.arange(len(index))
        owners = slots % self._num_ranks
        is_held = owners == self._rank if self._is_sharded else np.ones(len(slots), np.bool_)
        label, score = state["label"].numpy(), state["score"].numpy()
        places = self.slots.put(slots, index, owners, is_held, label, score)
        chosen = torch.from_numpy(slots[is_held])
        self._write(places, self.layout.pack(items, chosen, self._link.device))
