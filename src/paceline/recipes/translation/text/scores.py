"""Scores of translations by sacreBLEU, of a whole test set at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.extras import imports_for


@dataclass(frozen=True)
class Bleu:
    """BLEU, 0 to 100, as sacreBLEU computes it for one reference per sentence."""

    tokenize: str = "13a"
    lowercase: bool = False

    def __call__(self, hypotheses: Sequence[str], references: Sequence[str]) -> float:
        with imports_for("translation"):
            from sacrebleu.metrics.bleu import BLEU
        metric = BLEU(tokenize=self.tokenize, lowercase=self.lowercase, force=True)
        return float(metric.corpus_score(list(hypotheses), [list(references)]).score)

    @property
    def signature(self) -> str:
        """Return what a published score names: `case:mixed|tok:13a`."""
        return f"case:{'lc' if self.lowercase else 'mixed'}|tok:{self.tokenize}"


@dataclass(frozen=True)
class Chrf:
    """chrF2, 0 to 100: F-score of character n-grams, which does not depend on words."""

    lowercase: bool = False

    def __call__(self, hypotheses: Sequence[str], references: Sequence[str]) -> float:
        with imports_for("translation"):
            from sacrebleu.metrics.chrf import CHRF
        metric = CHRF(lowercase=self.lowercase)
        return float(metric.corpus_score(list(hypotheses), [list(references)]).score)
