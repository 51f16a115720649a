"""Choices of `-O4` and `auto`, kept for this machine: one small file each, named by everything it depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.core.disk import replacing
from paceline.speed.autotune.choice import Choice


class Cache:
    """Choices in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def is_empty(self) -> bool:
        return not any(self._folder.glob("*.json"))

    def find(self, facts: Mapping[str, Any]) -> Choice | None:
        """Return the choice that was made under the very same facts; a file that cannot be read counts as none."""
        try:
            stored = json.loads(self._file(facts).read_text(encoding="utf-8"))
            return Choice.read(stored["choice"]) if stored["facts"] == _plain(facts) else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def keep(self, facts: Mapping[str, Any], choice: Choice) -> str | None:
        """Store a choice; return why that failed, if it did: the run does not depend on it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with replacing(self._file(facts)) as file:
                json.dump({"facts": _plain(facts), "choice": choice.record()}, file, indent=1)
        except OSError as error:
            return f"the choice is not kept in {self._folder} ({error.strerror}): the next run measures again"
        return None

    def _file(self, facts: Mapping[str, Any]) -> Path:
        digest = hashlib.sha256(json.dumps(_plain(facts), sort_keys=True).encode()).hexdigest()
        return self._folder / f"{digest[:32]}.json"


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder for choices below the user's cache (XDG base directories)."""
    base = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or Path.home()) / ".cache"
    return Path(base) / "paceline" / "ways"


def _plain(facts: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(dict(facts)))
