"""What lines of a manifest say beside the keys that Paceline knows, such as `speaker`: packed with them, as JSON."""

from __future__ import annotations

import numpy as np

from paceline.core.json_text import json_text
from paceline.data.manifest.columns import Manifest
from paceline.data.manifest.line import AUDIO_KEYS, parse_object
from paceline.data.packed.errors import is_packed
from paceline.data.packed.reader import open_packed
from paceline.data.strings import Strings

_KNOWN = frozenset((*AUDIO_KEYS, "duration", "offset", "text", "text_filepath"))


def extra_keys(manifest: Manifest) -> Strings:
    """Of each row a JSON object, empty text where there is nothing more."""
    found = [b""] * len(manifest)
    is_line = np.ones(len(manifest), bool)
    for number, path in enumerate(manifest.sources):
        if not is_packed(path):
            continue
        is_mine = manifest.source_numbers == number
        is_line &= ~is_mine
        if (extras := open_packed(path).extras) is not None:
            for row in np.flatnonzero(is_mine).tolist():
                found[row] = extras.raw(manifest.line(row) - 1)
    lines = np.flatnonzero(is_line)
    for at, raw in manifest.take(lines).raw_lines():
        extra = {key: value for key, value in parse_object(raw).items() if key not in _KNOWN}
        if extra:
            found[lines[at]] = json_text(extra).encode()
    return Strings.pack(found)
