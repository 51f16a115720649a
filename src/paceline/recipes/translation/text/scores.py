"""Scores of translations by sacreBLEU, of a whole test set at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import NotInstalled
from paceline.core.extras import imports_for


@dataclass(frozen=True)
class Bleu:
    """BLEU, 0 to 100, as sacreBLEU computes it for one reference per sentence."""

    tokenize: str = "13a"
    lowercase: bool = False

    def __call__(self, hypotheses: Sequence[str], references: Sequence[str]) -> float:
        return float(_bleu(self, False).corpus_score(list(hypotheses), [list(references)]).score)

    def statistics(self, hypothesis: str, reference: str) -> list[float]:
        """Return what BLEU sums over sentences: lengths of both, matches of 1 to 4 words, numbers of 1- to 4-grams."""
        score = _bleu(self, True).sentence_score(hypothesis, [reference])
        return [float(number) for number in (score.sys_len, score.ref_len, *score.counts, *score.totals)]

    def check(self) -> None:
        """Raise `NotInstalled` where texts cannot be taken apart: before training, not at its first validation."""
        _bleu(self, False)

    @property
    def signature(self) -> str:
        """Return what a published score names: `case:mixed|tok:13a`."""
        return f"case:{'lc' if self.lowercase else 'mixed'}|tok:{self.tokenize}"


@functools.lru_cache(maxsize=4)
def _bleu(of: Bleu, is_of_sentence: bool) -> Any:
    """Return sacreBLEU's metric, whose tokenizer remembers sentences."""
    with imports_for("translation"):
        from sacrebleu.metrics.bleu import BLEU
    try:
        return BLEU(tokenize=of.tokenize, lowercase=of.lowercase, force=True, effective_order=is_of_sentence)
    except RuntimeError:  # what sacreBLEU raises where MeCab or a dictionary is missing
        raise NotInstalled(
            f"`bleu_tokenize` {of.tokenize} needs packages that are not installed",
            hint=f"pip install 'sacrebleu[{of.tokenize.partition('-')[0]}]'",
        ) from None


@dataclass(frozen=True)
class Chrf:
    """chrF2, 0 to 100: F-score of character n-grams, which does not depend on words."""

    lowercase: bool = False

    def __call__(self, hypotheses: Sequence[str], references: Sequence[str]) -> float:
        with imports_for("translation"):
            from sacrebleu.metrics.chrf import CHRF
        metric = CHRF(lowercase=self.lowercase)
        return float(metric.corpus_score(list(hypotheses), [list(references)]).score)
