"""What was chosen is found again under the same facts, and under no others."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.speed.autotune.cache import Cache, cache_folder
from paceline.speed.autotune.candidates import Candidate
from paceline.speed.autotune.choice import Choice


def test_kept_for_the_machine(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "ways")
    choice = Choice(Candidate(2, kernels=True), {"-O2 + kernels": 1.5, "-O0": 9.0}, ("so",))
    facts = {"device": "an H200", "shapes": [(64, 1680)], "versions": {"torch": "2.11"}}
    assert cache.find(facts) is None
    assert cache.keep(facts, choice) is None
    assert cache.find(facts) == choice
    assert cache.find(facts | {"device": "an A100"}) is None
    [file] = (tmp_path / "ways").iterdir()
    assert json.loads(file.read_text())["facts"]["device"] == "an H200"
    file.write_text("{")  # cut short
    assert cache.find(facts) is None
    (tmp_path / "file").write_text("")
    assert "not kept" in str(Cache(tmp_path / "file" / "ways").keep(facts, choice))


def test_the_folder() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/paceline/ways")
    assert cache_folder({"HOME": "/home/me"}) == Path("/home/me/.cache/paceline/ways")


def test_a_file_of_an_earlier_version(tmp_path: Path) -> None:
    facts = {"device": "an H200"}
    cache = Cache(tmp_path)
    cache.keep(facts, Choice(Candidate(0)))
    [file] = tmp_path.iterdir()
    way = {"level": 2, "kernels": True, "graphs": False}
    file.write_text(
        json.dumps({"facts": facts, "choice": {"way": way, "step_ms": {"-O2 + kernels": 3.5}, "notes": []}})
    )
    assert cache.find(facts) == Choice(Candidate(2, kernels=True), {"-O2 + kernels": 3.5})
