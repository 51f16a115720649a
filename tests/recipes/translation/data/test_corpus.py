from __future__ import annotations

import pytest

from paceline.config.named_sets import NamedTwice
from paceline.recipes.translation.data.corpus import val_files
from paceline.recipes.translation.settings import TranslationSettings


def names(*sources: str, pairs: tuple[str, ...] = ()) -> list[str]:
    settings = TranslationSettings(
        train_source=["a"],
        train_target=["b"],
        epochs=1,
        val_source=list(sources),
        val_target=[f"{number}.de" for number in range(len(sources))],
        val_pairs=list(pairs),
    )
    return [files.name for files in val_files(settings)]


def test_sets_are_named_by_their_files_or_as_is_said() -> None:
    assert names("val.en.gz", "x/newstest.en", pairs=("dev.tsv.gz",)) == ["val", "newstest", "dev"]
    assert names("v1.0=val.en", "v1.1=test.en") == ["v1.0", "v1.1"]
    assert names("test.2016.en", "test.2017.en") == ["test.2016", "test.2017"]
    with pytest.raises(NamedTwice, match="two validation sets are called 'val'") as caught:
        names("val.en", pairs=("val.tsv",))
    assert "first=FILE" in caught.value.hint
