"""What lines of a manifest say beside the keys that Paceline knows, such as `speaker`: packed with them, as JSON."""

from __future__ import annotations

from paceline.config.json_text import json_text
from paceline.data.manifest_columns import Manifest
from paceline.data.manifest_line import AUDIO_KEYS, parse_object
from paceline.data.strings import Strings

_KNOWN = frozenset((*AUDIO_KEYS, "duration", "offset", "text", "text_filepath"))


def extra_keys(manifest: Manifest) -> Strings:
    """Of each row a JSON object, empty text where there is nothing more."""
    found = [b""] * len(manifest)
    for row, raw in manifest.raw_lines():
        extra = {key: value for key, value in parse_object(raw).items() if key not in _KNOWN}
        if extra:
            found[row] = json_text(extra).encode()
    return Strings.pack(found)
