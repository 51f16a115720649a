"""A real browser without a screen and without a net: what it made of a page, and what it complained of."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

TIMEOUT_S = 120
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_CONSOLE = re.compile(r"CONSOLE[^\]]*\] (.*)")


@dataclass(frozen=True)
class Seen:
    """A page after its scripts have run."""

    document: str
    complaints: list[str]
    """What was written to the console, among it all that the page's own rules forbid."""


def find_browser() -> str:
    """The browser, or the test is skipped."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip("no Chromium: `apt-get install chromium` has one")
    return found


def look(page: Path | str, profile: Path, *options: str) -> Seen:
    """Open a page from its file, or by its address. No name is resolved: what is not in the file cannot be had."""
    command = [
        find_browser(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        f"--user-data-dir={profile}",
        "--enable-logging=stderr",
        "--log-level=0",
        "--virtual-time-budget=20000",
        "--window-size=1280,2000",
        *options,
        "--dump-dom",
        page.as_uri() if isinstance(page, Path) else page,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    # The browser's own surface is made of pages, too, which complain of a missing net.
    return Seen(done.stdout, [text for text in _CONSOLE.findall(done.stderr) if "source: chrome" not in text])
