"""Times and sizes of a job, as users type them."""

from __future__ import annotations

import pytest

from paceline.core.errors import InvalidSetting
from paceline.world.launch.schedulers.job import mebibytes, seconds


def test_durations() -> None:
    assert [seconds(text) for text in ("90m", "12h", "2d", "1:02:03", "1-12", "1-12:30", "0-00:00:05")] == [
        *(5400, 43_200, 172_800, 3723, 129_600, 131_400, 5)
    ]
    for text in ("90", "2:30", "0h", "1:60:00", "-1h", "12 h", "", "1-2-3"):
        with pytest.raises(InvalidSetting, match="is not a time"):
            seconds(text)


def test_sizes() -> None:
    assert [mebibytes(text) for text in ("800M", "64G", "64GB", "64GiB", "1T")] == [800, 65536, 65536, 65536, 1048576]
    for text in ("64", "0G", "64g", "1.5G", "G", ""):
        with pytest.raises(InvalidSetting, match="is not an amount of memory"):
            mebibytes(text)
