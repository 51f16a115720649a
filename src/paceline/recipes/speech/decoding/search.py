"""The search in tensors: all utterances of a batch at a time, on a GPU or on a CPU.

Prefix beam search over CTC log-probabilities, as pyctcdecode 0.5 does it, with the same scores. A beam is a text, the
word that is being written, and the last label (or blank). In each frame every beam is continued by every label that is
probable enough; beams that became the same text, word and last label are one, their probabilities added. A beam's
score is its acoustic log-probability, that of its finished words in the language model (times a weight, with a bonus
for each word), and that of its unfinished word, which is only about whether any known word begins so. The best
`beam_width` beams go on, without those far below the best one and those whose last words are a better one's, too.

Texts and words are 64-bit hashes (`words.py`): no string is looked at before the results. Frames in which one and the
same label is the only probable one change nothing but scores, so a run of them is one step; most frames of a trained
model are of that kind. On CUDA a step is recorded once as a graph for each number of labels, and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from paceline.recipes.speech.decoding.limits import FLOOR, Found, Limits, Weights
from paceline.recipes.speech.decoding.ngram import LanguageModel
from paceline.recipes.speech.decoding.words import Alphabet, WordTable, signed

_LN10: Final = 2.302585092994045684
_MIX_A: Final = signed(0xD6E8FEB86659FD93)
_MIX_B: Final = signed(0x9FB21C651E98DF25)
_NONE: Final = float("-inf")
_EMPTY_TEXT: Final = 1
_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of labels for which a step is made; one that fits is taken."""


@dataclass
class _Words:
    """Tables on the device."""

    hashes: Tensor
    ids: Tensor
    partials: Tensor
    is_hot: Tensor


@dataclass
class _Model:
    """Language model on the device."""

    num_words: int
    order: int
    start: int
    end: int
    unknown: int
    unigrams: Tensor
    keys: Tensor
    log_probs: Tensor
    nexts: Tensor
    backoffs: Tensor
    fails: Tensor

    def advance(self, states: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities (base 10) and next states by the back-off rule."""
        result = torch.zeros(states.shape, dtype=torch.float64, device=states.device)
        nexts = torch.full_like(states, -1)
        state = states
        for _ in range(self.order - 1 if len(self.keys) else 0):
            wanted = state * self.num_words + words
            places = torch.searchsorted(self.keys, wanted).clamp_(max=len(self.keys) - 1)
            is_open = (nexts < 0) & (state > 0)
            is_hit = (self.keys[places] == wanted) & is_open
            backs = is_open & ~is_hit
            result = result + torch.where(is_hit, self.log_probs[places], 0.0)
            result = result + torch.where(backs, self.backoffs[state], 0.0)
            nexts = torch.where(is_hit, self.nexts[places], nexts)
            state = torch.where(backs, self.fails[state], state)
        rest = nexts < 0
        result = result + torch.where(rest, self.unigrams[words], 0.0)
        after = words + 1 if self.order > 1 else torch.zeros_like(words)
        return result, torch.where(rest, after, nexts)


@dataclass
class _Asked:
    """Language model that only the host can ask."""

    model: LanguageModel
    start: int
    end: int
    unknown: int

    def advance(self, states: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        pairs = torch.stack([states.flatten(), words.flatten()], 1).cpu().numpy()
        unique, places = np.unique(pairs, axis=0, return_inverse=True)
        found, nexts = self.model.advance(unique[:, 0], unique[:, 1])
        places = places.reshape(-1)
        shape, device = states.shape, states.device
        return (
            torch.from_numpy(found[places]).view(shape).to(device),
            torch.from_numpy(nexts[places]).view(shape).to(device),
        )


class TensorSearch:
    """Search of a batch of utterances by tensor operations."""

    def __init__(
        self, alphabet: Alphabet, table: WordTable, model: LanguageModel | None, weights: Weights, limits: Limits
    ) -> None:
        self._alphabet, self._table, self._model = alphabet, table, model
        self._weights, self._limits = weights, limits
        self._on: dict[torch.device, _OnDevice] = {}

    def __call__(self, log_probs: Tensor, lengths: Sequence[int], num_wanted: int = 1) -> list[list[Found]]:
        """Return the best results of each utterance; `log_probs` is (batch, frames, classes)."""
        device = log_probs.device
        if device not in self._on:
            self._on[device] = _OnDevice(device, self._alphabet, self._table, self._model, self._weights, self._limits)
        with torch.no_grad():
            return self._on[device].search(log_probs, lengths, min(num_wanted, self._limits.beam_width))


@dataclass
class _Beams:
    """State of a search: (utterances, beams) each, `history` with one more dimension."""

    acoustic: Tensor
    path: Tensor
    """Log-probability of the best path alone, whose times are told."""
    lm: Tensor
    hot: Tensor
    partial: Tensor
    text: Tensor
    part: Tensor
    part_length: Tensor
    part_word: Tensor
    part_hot: Tensor
    last: Tensor
    state: Tensor
    history: Tensor
    """Hashes of the last words, the latest first."""

    def copy_(self, other: _Beams) -> None:
        for name in vars(self):
            getattr(self, name).copy_(getattr(other, name))


@dataclass
class _Steps:
    """Input of a search: runs of equal frames of each utterance as one step each, (utterances, steps, ...)."""

    labels: Tensor
    """Of the probable ones of a step, the most probable first; beyond their number any."""
    scores: Tensor
    """Their log-probabilities, -inf beyond their number."""
    num_labels: list[int]
    """Of each step, the most that an utterance has."""
    num_steps: Tensor
    step_of_frame: Tensor


class _OnDevice:
    def __init__(
        self,
        device: torch.device,
        alphabet: Alphabet,
        table: WordTable,
        model: LanguageModel | None,
        weights: Weights,
        limits: Limits,
    ) -> None:
        self.device, self.limits, self.weights = device, limits, weights
        self.blank = alphabet.blank
        # one more label: the blank adds nothing
        self.hashes = self._put(np.append(alphabet.hashes, 0))
        self.powers = self._put(np.append(alphabet.powers, 1))
        self.piece_lengths = self._put(np.append(alphabet.lengths, 0).astype(np.int64))
        self.starts = self._put(np.append(alphabet.starts, False))
        none = len(table.hashes) == 0
        self.words = _Words(
            self._put(np.zeros(1, np.int64) if none else table.hashes),
            self._put(np.full(1, -1, np.int64) if none else table.words.astype(np.int64)),
            self._put(np.zeros(1) if none else table.partials),
            self._put(np.zeros(1, bool) if none else table.is_hot),
        )
        self.has_words = not none
        self.model: _Model | _Asked | None = None
        order = 1
        if model is not None:
            order = model.order
            start = model.start if weights.boundary else model.empty
            tables = model.tables
            if tables is None:
                self.model = _Asked(model, start, model.end, model.unknown)
            else:
                self.model = _Model(
                    tables.num_words,
                    order,
                    start,
                    model.end,
                    model.unknown,
                    self._put(tables.unigrams.astype(np.float64)),
                    self._put(tables.keys),
                    self._put(tables.log_probs.astype(np.float64)),
                    self._put(tables.nexts.astype(np.int64)),
                    self._put(tables.backoffs.astype(np.float64)),
                    self._put(tables.fails.astype(np.int64)),
                )
        self.num_history = max(1, order - 1)
        self.earlier = torch.ones(limits.beam_width, limits.beam_width, dtype=torch.bool, device=device).tril(-1)
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._states: dict[int, _Beams] = {}

    def _put(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    # -- the whole search ----------------------------------------------------------------------------------------

    def search(self, log_probs: Tensor, lengths: Sequence[int], num_wanted: int) -> list[list[Found]]:
        num = len(log_probs)
        if not num:
            return []
        if self.device.type == "cuda":  # few sizes, so that few graphs are recorded
            more = _batch_size(num) - num
            log_probs = torch.nn.functional.pad(log_probs, (0, 0, 0, 0, 0, more))
            lengths = [*lengths, *[0] * more]
        found = self._search(log_probs, lengths, num_wanted)
        return found[:num]

    def _search(self, log_probs: Tensor, lengths: Sequence[int], num_wanted: int) -> list[list[Found]]:
        batch = len(log_probs)
        steps = self._steps(log_probs, lengths)
        beams = self._first(batch)
        width = self.limits.beam_width
        num = len(steps.num_labels)
        parents = torch.zeros(num, batch, width, dtype=torch.int64, device=self.device)
        labels = torch.full((num, batch, width), self.blank, dtype=torch.int64, device=self.device)
        run = self._runner(beams, batch)
        for number, size in enumerate(steps.num_labels):
            run(steps, number, size, parents[number], labels[number])
        beams = self._current(beams, batch)
        scores, chosen, lm, acoustic = self._finish(beams, num_wanted)
        return self._results(steps, parents, labels, chosen, scores, acoustic, lm, lengths)

    def _runner(self, beams: _Beams, batch: int) -> Callable[[_Steps, int, int, Tensor, Tensor], None]:
        is_recorded = self.device.type == "cuda" and isinstance(self.model, _Model | None)

        def eagerly(steps: _Steps, number: int, size: int, parents: Tensor, labels: Tensor) -> None:
            active = steps.num_steps > number
            tokens, scores = steps.labels[:, number, :size], steps.scores[:, number, :size]
            after, origin, last = self._step(beams, tokens, scores, active)
            beams.copy_(after)
            parents.copy_(origin)
            labels.copy_(last)

        def replayed(steps: _Steps, number: int, size: int, parents: Tensor, labels: Tensor) -> None:
            graph = self._graph(batch, size)
            graph.tokens.copy_(steps.labels[:, number, :size])
            graph.scores.copy_(steps.scores[:, number, :size])
            torch.gt(steps.num_steps, number, out=graph.active)
            graph.replay()
            parents.copy_(graph.origin)
            labels.copy_(graph.last)

        if not is_recorded:
            return eagerly
        self._shared(batch).copy_(beams)
        return replayed

    def _shared(self, batch: int) -> _Beams:
        """The beams that all graphs of a batch size read and write."""
        if batch not in self._states:
            self._states[batch] = self._first(batch)
        return self._states[batch]

    def _current(self, beams: _Beams, batch: int) -> _Beams:
        return self._states.get(batch, beams)

    def _graph(self, batch: int, size: int) -> _Graph:
        key = (batch, size)
        if key not in self._graphs:
            self._graphs[key] = _Graph(self, self._shared(batch), batch, size)
        return self._graphs[key]

    def _steps(self, log_probs: Tensor, lengths: Sequence[int]) -> _Steps:
        """Return the probable labels of each frame, runs of frames with the same sole one made one."""
        batch, frames, classes = log_probs.shape
        lengths_there = torch.tensor(list(lengths), dtype=torch.int64, device="cpu").to(self.device)
        is_frame = torch.arange(frames, device=self.device) < lengths_there[:, None]
        rows = log_probs.double()
        best = rows.argmax(-1, keepdim=True)
        is_probable = (rows >= self.limits.token_log_prob).scatter_(-1, best, True)
        counts = is_probable.sum(-1)
        sole = torch.where((counts == 1) & is_frame, best[..., 0], -1)
        repeats = torch.zeros_like(is_frame)
        repeats[:, 1:] = (sole[:, 1:] == sole[:, :-1]) & (sole[:, 1:] >= 0)
        step_of_frame = (~repeats).long().cumsum(1) - 1
        begins = ~repeats & is_frame
        num_steps = begins.sum(1)
        most = int(num_steps.max()) if frames else 0
        size = int(torch.where(is_frame, counts, 0).max()) if frames else 1
        size = _fitting(max(size, 1), classes)
        clipped = rows.clamp(FLOOR, 0.0)
        top, labels = torch.where(is_probable, clipped, _NONE).topk(size, -1)
        # a step has the labels of its first frame; further frames of it add the score of their sole label
        slot = torch.where(is_frame, step_of_frame, most)
        scores_by_step = torch.full((batch, most + 1, size), _NONE, dtype=torch.float64, device=self.device)
        labels_by_step = torch.full((batch, most + 1, size), self.blank, dtype=torch.int64, device=self.device)
        first_slot = torch.where(begins, step_of_frame, most)[..., None].expand(-1, -1, size)
        scores_by_step.scatter_(1, first_slot, top)
        labels_by_step.scatter_(1, first_slot, labels)
        more = torch.zeros(batch, most + 1, dtype=torch.float64, device=self.device)
        more.scatter_add_(1, torch.where(repeats, slot, most), torch.where(repeats & is_frame, top[..., 0], 0.0))
        scores_by_step[..., 0] += more
        counts_by_step = torch.zeros(batch, most + 1, dtype=torch.int64, device=self.device)
        counts_by_step.scatter_(1, torch.where(begins, step_of_frame, most), counts)
        sizes = counts_by_step[:, :most].amax(0).tolist()
        return _Steps(
            labels_by_step[:, :most],
            scores_by_step[:, :most],
            [min(_fitting(max(number, 1), classes), size) for number in sizes],
            num_steps,
            step_of_frame,
        )

    def _first(self, batch: int) -> _Beams:
        shape, device = (batch, self.limits.beam_width), self.device

        def full(value: float, kind: torch.dtype) -> Tensor:
            return torch.full(shape, value, dtype=kind, device=device)

        acoustic = full(_NONE, torch.float64)
        acoustic[:, 0] = 0.0
        state = 0 if self.model is None else self.model.start
        return _Beams(
            acoustic=acoustic,
            path=full(0.0, torch.float64),
            lm=full(0.0, torch.float64),
            hot=full(0.0, torch.float64),
            partial=full(0.0, torch.float64),
            text=full(_EMPTY_TEXT, torch.int64),
            part=full(0, torch.int64),
            part_length=full(0, torch.int64),
            part_word=full(-1, torch.int64),
            part_hot=full(0, torch.bool),
            last=full(-1, torch.int64),
            state=full(state, torch.int64),
            history=torch.zeros(*shape, self.num_history, dtype=torch.int64, device=device),
        )

    # -- one step ------------------------------------------------------------------------------------------------

    def _step(self, beams: _Beams, tokens: Tensor, scores: Tensor, active: Tensor) -> tuple[_Beams, Tensor, Tensor]:
        """Return the beams after a step, where each came from, and its last label. `tokens` is (utterances, labels)."""
        width = self.limits.beam_width
        size = tokens.shape[1]
        # (utterances, labels, beams) from here on: beams of one label may become the same, those of two never
        token = tokens[:, :, None]
        is_same = (token == self.blank) | (token == beams.last[:, None])
        starts = self.starts[token] & ~is_same
        grows = ~is_same & ~starts

        done_text = _mixed(beams.text * _MIX_B + beams.part)
        is_word = beams.part_length > 0
        done_text = torch.where(is_word, done_text, beams.text)
        piece = self.hashes[token]
        longer = beams.part[:, None] * self.powers[token] + piece
        text = torch.where(starts, done_text[:, None], beams.text[:, None].expand(-1, size, -1))
        part = torch.where(is_same, beams.part[:, None], torch.where(starts, piece.expand(-1, -1, width), longer))

        acoustic = beams.acoustic[:, None] + scores[:, :, None]
        is_alive = acoustic > _NONE
        key = _mixed(text * _MIX_B + part)
        equal = (key[..., :, None] == key[..., None, :]) & is_alive[..., :, None] & is_alive[..., None, :]
        is_first = is_alive & ~(equal & self.earlier).any(-1)
        most = acoustic.amax(-1, keepdim=True).clamp_min(-1e300)
        summed = torch.where(equal, (acoustic - most).exp()[..., None, :], 0.0).sum(-1).log() + most
        alone = equal.sum(-1) == 1
        acoustic = torch.where(alone, acoustic, summed)
        paths = beams.path[:, None] + scores[:, :, None]
        path, likeliest = torch.where(equal, paths[..., None, :], _NONE).max(-1)

        # unfinished words
        part_length = self.piece_lengths[token] + torch.where(starts, 0, beams.part_length[:, None])
        part_length = torch.where(is_same, beams.part_length[:, None], part_length)
        found_partial, found_word, found_hot = self._look_up(part, part_length)
        partial = torch.where(is_same, beams.partial[:, None], found_partial)

        # finished words
        done_lm, done_state = beams.lm, beams.state
        if self.model is not None:
            value, done_state = self._word_score(beams.state, beams.part_word)
            done_lm = torch.where(is_word, beams.lm + value, beams.lm)
            done_state = torch.where(is_word, done_state, beams.state)
        done_hot = beams.hot + self.weights.hotword_weight * (is_word & beams.part_hot)
        lm = torch.where(starts, done_lm[:, None], beams.lm[:, None])
        hot = torch.where(starts, done_hot[:, None], beams.hot[:, None])

        score = torch.where(is_first, acoustic + lm + hot + partial, _NONE).flatten(1)
        chosen_score, chosen = score.topk(width, -1)
        chosen_score = torch.where(chosen_score >= chosen_score[:, :1] + self.limits.beam_log_prob, chosen_score, _NONE)
        origin = chosen % width

        def from_beam(values: Tensor) -> Tensor:
            return values.gather(1, origin)

        def picked(values: Tensor) -> Tensor:
            return values.flatten(1).gather(1, chosen)

        did_start, did_grow = picked(starts), picked(grows)
        ended = did_start & from_beam(is_word)
        history = beams.history.gather(1, origin[..., None].expand(-1, -1, self.num_history))
        with_word = torch.cat([from_beam(beams.part)[..., None], history[..., :-1]], -1)
        changed = did_start | did_grow
        after = _Beams(
            acoustic=torch.where(chosen_score > _NONE, picked(acoustic), _NONE),
            path=picked(path),
            lm=picked(lm),
            hot=picked(hot),
            partial=picked(partial),
            text=picked(text),
            part=picked(part),
            part_length=picked(part_length),
            part_word=torch.where(changed, picked(found_word), from_beam(beams.part_word)),
            part_hot=torch.where(changed, picked(found_hot), from_beam(beams.part_hot)),
            last=tokens.gather(1, chosen // width),
            state=torch.where(did_start, from_beam(done_state), from_beam(beams.state)),
            history=torch.where(ended[..., None], with_word, history),
        )
        if self.limits.prune_history:
            past = _mixed(after.part * _MIX_B + after.last + 2)
            for column in after.history.unbind(-1):
                past = _mixed(past * _MIX_B + column)
            is_alive = after.acoustic > _NONE
            twice = ((past[:, :, None] == past[:, None]) & is_alive[:, None] & self.earlier).any(-1)
            after.acoustic = torch.where(twice, _NONE, after.acoustic)
        origin = picked(likeliest)
        return self._where(active, after, beams, origin, tokens.gather(1, chosen // width))

    def _where(
        self, active: Tensor, after: _Beams, before: _Beams, origin: Tensor, label: Tensor
    ) -> tuple[_Beams, Tensor, Tensor]:
        """Return the beams before the step where an utterance has ended."""
        column = active[:, None]
        values = {
            name: torch.where(column if value.dim() == 2 else column[..., None], value, getattr(before, name))
            for name, value in vars(after).items()
        }
        itself = torch.arange(self.limits.beam_width, device=self.device)
        return _Beams(**values), torch.where(column, origin, itself), torch.where(column, label, self.blank)

    def _look_up(self, part: Tensor, length: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the score of unfinished words, the known word that each is as a whole (or -1), and if it is hot."""
        places = torch.searchsorted(self.words.hashes, part).clamp_(max=len(self.words.hashes) - 1)
        is_known = (self.words.hashes[places] == part) & (length > 0) & self.has_words
        partial = torch.where(is_known, self.words.partials[places], 0.0)
        if self.model is not None:
            long = torch.where(length > 6, length.double() / 6, 1.0)
            partial = torch.where(is_known | (length == 0), partial, self.weights.unknown_offset * long)
        word = torch.where(is_known, self.words.ids[places], -1)
        return partial, word, is_known & self.words.is_hot[places]

    def _word_score(self, state: Tensor, word: Tensor, *, is_last: bool = False) -> tuple[Tensor, Tensor]:
        model, weights = self.model, self.weights
        assert model is not None
        log_prob, after = model.advance(state, torch.where(word < 0, model.unknown, word))
        log_prob = log_prob + torch.where(word < 0, weights.unknown_offset, 0.0)
        if is_last and weights.boundary:
            log_prob = log_prob + model.advance(after, torch.full_like(word, model.end))[0]
        return weights.lm_weight * log_prob * _LN10 + weights.word_bonus, after

    # -- the end -------------------------------------------------------------------------------------------------

    def _finish(self, beams: _Beams, num_wanted: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return scores and beams of the best results, their language model's part and their acoustic one."""
        is_word = beams.part_length > 0
        text = torch.where(is_word, _mixed(beams.text * _MIX_B + beams.part), beams.text)
        is_alive = beams.acoustic > _NONE
        equal = (text[:, :, None] == text[:, None]) & is_alive[:, :, None] & is_alive[:, None]
        is_first = is_alive & ~(equal & self.earlier).any(-1)
        most = beams.acoustic.amax(-1, keepdim=True).clamp_min(-1e300)
        summed = torch.where(equal, (beams.acoustic - most).exp()[:, None], 0.0).sum(-1).log() + most
        acoustic = torch.where(equal.sum(-1) == 1, beams.acoustic, summed)
        # Of texts that become one the last is scored: it may end in a space, then its last word is none.
        latest = torch.where(equal, torch.arange(equal.shape[-1], device=self.device), -1).amax(-1).clamp_min(0)
        likeliest = torch.where(equal, beams.path[:, None], _NONE).argmax(-1)
        lm = beams.lm
        if self.model is not None:
            word = torch.where(is_word, beams.part_word, -1)
            lm = lm + self._word_score(beams.state, word, is_last=True)[0]
        hot = beams.hot + self.weights.hotword_weight * (is_word & beams.part_hot)
        lm, hot = lm.gather(1, latest), hot.gather(1, latest)
        score = torch.where(is_first, acoustic + lm + hot, _NONE)
        best, chosen = score.topk(num_wanted, -1)
        best = torch.where(best >= best[:, :1] + self.limits.beam_log_prob, best, _NONE)
        return best, likeliest.gather(1, chosen), lm.gather(1, chosen), acoustic.gather(1, chosen)

    def _results(
        self,
        steps: _Steps,
        parents: Tensor,
        labels: Tensor,
        chosen: Tensor,
        scores: Tensor,
        acoustic: Tensor,
        lm: Tensor,
        lengths: Sequence[int],
    ) -> list[list[Found]]:
        small = torch.int16 if self.limits.beam_width < 2**15 else torch.int32
        origin, label = parents.to(small).cpu().numpy(), labels.to(torch.int32).cpu().numpy()
        place = chosen.cpu().numpy()  # (utterances, results)
        path = np.full((*place.shape, len(label)), self.blank, np.int32)
        rows = np.arange(len(place))[:, None]
        for number in range(len(label) - 1, -1, -1):
            path[..., number] = label[number, rows, place]
            place = origin[number, rows, place]
        step_of_frame = steps.step_of_frame.cpu().numpy()
        facts = torch.stack([scores, acoustic, lm], -1).cpu().numpy()
        return [
            [
                Found(path[row, rank][step_of_frame[row, :length]], *map(float, facts[row, rank]))
                for rank in range(place.shape[1])
                if facts[row, rank, 0] > _NONE
            ]
            for row, length in enumerate(lengths)
        ]


class _Graph:
    """A step for one number of utterances and labels, recorded on CUDA; it always works on the same beams."""

    def __init__(self, search: _OnDevice, beams: _Beams, batch: int, size: int) -> None:
        device = search.device
        self.tokens = torch.full((batch, size), search.blank, dtype=torch.int64, device=device)
        self.scores = torch.full((batch, size), _NONE, dtype=torch.float64, device=device)
        self.scores[:, 0] = 0.0
        self.active = torch.zeros(batch, dtype=torch.bool, device=device)
        aside = search._first(batch)
        aside.copy_(beams)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(2):
                search._step(beams, self.tokens, self.scores, self.active)
        torch.cuda.current_stream(device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            after, self.origin, self.last = search._step(beams, self.tokens, self.scores, self.active)
            beams.copy_(after)
        beams.copy_(aside)

    def replay(self) -> None:
        self._graph.replay()


def _mixed(value: Tensor) -> Tensor:
    value = (value ^ _high(value)) * _MIX_A
    value = (value ^ _high(value)) * _MIX_A
    return value ^ _high(value)


def _high(value: Tensor) -> Tensor:
    return (value >> 32) & 0xFFFFFFFF


def _batch_size(number: int) -> int:
    """Return the number of utterances that a batch is filled up to: four sizes between powers of two."""
    step = max(8, 1 << max((number - 1).bit_length() - 3, 0))
    return -(-number // step) * step


def _fitting(number: int, most: int) -> int:
    """Return a number of labels for which there is a step."""
    return min(next((size for size in _SIZES if size >= number), number), most)
