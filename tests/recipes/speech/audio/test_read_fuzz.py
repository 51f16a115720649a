"""Five hundred damaged audio files: no traceback, no hang, what shows is reported, sound files stay sound."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

NUMBER = 500
HANG_S = 120


def test_five_hundred_damaged_files(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-X",
        "faulthandler",
        "-m",
        "tests.recipes.speech.audio.fuzz_audio",
        str(tmp_path),
        str(NUMBER),
        "4",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, cwd=Path(__file__).parents[4])
    assert done.returncode == 0, done.stderr[-3000:]
    fates = json.loads(done.stdout)
    assert sum(fates.values()) == NUMBER
    must = sum(count for fate, count in fates.items() if fate.split()[1].rstrip(":").isupper())
    assert must > 0.3 * NUMBER
    assert sum(count for fate, count in fates.items() if "reported" in fate) > must
    assert sum(count for fate, count in fates.items() if fate.endswith(": read")) > 50
