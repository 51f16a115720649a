"""A program: `paceline train asr` where the package soundfile is not installed."""

from __future__ import annotations

import sys

from paceline.cli.main import main as paceline


def main() -> int:
    assert "soundfile" not in sys.modules
    sys.modules["soundfile"] = None  # type: ignore[assignment]  # what `import` takes for a package that is not there
    return paceline(["train", "asr", "--train-manifest", "a.json", "--epochs", "1"])
