"""Every declared exception fills in its message and hint, in English and in other languages."""

from __future__ import annotations

import pytest

from paceline import PacelineError
from paceline.core.language import speaking
from tests.core.sample_errors import NUM_VARIANTS, fields, load_all

MOST_OF_THEM = 0.8
"""Share of the declared exceptions whose fields have types that samples exist of."""


def _sampled() -> list[type[PacelineError]]:
    declared = [error for error in load_all() if error.sentence]
    sampled = [error for error in declared if fields(error, 0) is not None]
    assert len(sampled) > MOST_OF_THEM * len(declared)
    return sampled


@pytest.mark.parametrize("error", _sampled(), ids=lambda error: error.__name__)
def test_messages_and_hints_are_filled_in(error: type[PacelineError]) -> None:
    failures = []
    for variant in range(NUM_VARIANTS):
        try:
            made = error(*(fields(error, variant) or []))
        except (ValueError, TypeError, LookupError, ArithmeticError) as failure:
            failures.append(failure)  # not every error can be of nothing
            continue
        assert str(made)
        with speaking("zh"):
            assert made.rendered()
    assert len(failures) < NUM_VARIANTS, failures
