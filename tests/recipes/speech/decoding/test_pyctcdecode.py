"""Words and scores beside pyctcdecode's, with KenLM; skipped where these are not installed.

Times of words are not compared: of paths that become one text it tells those of the least probable beam, we those of
the most probable path (`test_search.py`).

To run it: `pip install pyctcdecode --no-deps; pip install pygtrie kenlm`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.recipes.speech.decoding.arpa import write_arpa
from paceline.recipes.speech.decoding.decoder import BeamDecoder
from paceline.recipes.speech.decoding.kneser_ney import estimate
from paceline.recipes.speech.text.pieces import Pieces
from tests.recipes.speech.decoding import models

SHAKY: list[dict[str, Any]] = [
    {},
    {"lm_weight": 1.2, "word_bonus": -0.5, "unknown_offset": -3.0, "score_boundary": False},
    {"hotwords": ["ba", "c'", "cb ab"], "hotword_weight": 4.0},
    {"prune_history": False, "beam_width": 7},
    {"beam_log_prob": -4.0, "token_log_prob": -3.0},
    {"lm": None, "hotwords": ["abc"]},
]
CHARACTERS = Pieces((" ", *"abcdz'"))
SUBWORDS = Pieces(("\u2581a", "b", "ab", "\u2581ba", "c", "\u2581c'", "'"))
"""None is a mark alone: pyctcdecode then begins a word in whichever beam comes next."""


@pytest.mark.parametrize("labels", [CHARACTERS, SUBWORDS], ids=["characters", "subwords"])
@pytest.mark.parametrize("choices", SHAKY, ids=lambda choices: ",".join(choices) or "defaults")
@pytest.mark.parametrize("seed", [0, *[pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 20)]])
def test_words_and_scores_are_pyctcdecodes(tmp_path: Path, labels: Pieces, choices: dict[str, Any], seed: int) -> None:
    pytest.importorskip("kenlm", reason="kenlm is not installed")
    pyctcdecode = pytest.importorskip("pyctcdecode", reason="pyctcdecode is not installed")
    logging.disable(logging.WARNING)
    made = estimate([*models.SENTENCES, ["abc", "c'", "dab", "zb"]], 3)
    write_arpa(tmp_path / "lm.arpa", made.words, made.levels)
    path = None if "lm" in choices else str(tmp_path / "lm.arpa")
    given = {"beam_width": 16, "prune_history": True, **choices}
    ours = BeamDecoder(labels, **{"lm": path, **given})
    names = list(labels.symbols if labels is CHARACTERS else labels.pieces)
    theirs = pyctcdecode.build_ctcdecoder(
        [*names, ""],
        path,
        alpha=given.get("lm_weight", 0.5),
        beta=given.get("word_bonus", 1.5),
        unk_score_offset=given.get("unknown_offset", -10.0),
        lm_score_boundary=given.get("score_boundary", True),
    )
    for sharpness in (1.0, 2.0, 4.0):
        for each in models.outputs(np.random.default_rng(seed), 8, len(labels) + 1, sharpness):
            expected = theirs.decode_beams(
                each.astype(np.float64),
                beam_width=given["beam_width"],
                beam_prune_logp=given.get("beam_log_prob", -10.0),
                token_min_logp=given.get("token_log_prob", -5.0),
                prune_history=given["prune_history"],
                hotwords=given.get("hotwords"),
                hotword_weight=given.get("hotword_weight", 10.0),
            )
            found = ours(torch.from_numpy(each)[None], [len(each)], given["beam_width"])[0]
            assert [one.text for one in found] == [one[0] for one in expected]
            np.testing.assert_allclose([one.score for one in found], [one[4] for one in expected], atol=1e-5)
            np.testing.assert_allclose([one.acoustic for one in found], [one[3] for one in expected], atol=1e-5)
