"""Secrets in settings and command lines: recognized by name or by form, and masked before they are written down.

A run's record, its report and the services that it is logged to are read by others than the one who typed a key.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MASK = "********"

_CERTAIN = r"(?:password|passwd|passphrase|secret|(?:api|access|private|secret|auth|account)[_-]?key)"
_LIKELY = r"(?:token|auth|authorization|credentials?)"
_SECRET_NAME = re.compile(rf"(?:.*[_.-])?{_CERTAIN}", re.IGNORECASE)
_LIKELY_NAME = re.compile(rf"(?:.*[_.-])?{_LIKELY}", re.IGNORECASE)
# `eos_token` is a word of the field: under such a name only what looks drawn at random is a secret.
_RANDOM = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9_.~+/=-]{16,}")
_FORMS = re.compile(
    r"""\b(?:
        hf_[A-Za-z0-9]{20,}                       # Hugging Face
      | gh[pousr]_[A-Za-z0-9]{30,} | github_pat_\w{20,} | glpat-[\w-]{20,}
      | sk-[\w-]{20,} | npm_[A-Za-z0-9]{30,} | pypi-[\w-]{30,} | xox[abeoprs]-[\w-]{10,}
      | (?:AKIA|ASIA)[0-9A-Z]{16} | AIza[\w-]{30,} | ya29\.[\w-]{20,}
      | eyJ[\w-]{8,1024}\.[\w-]{8,}\.[\w-]{8,}    # JSON Web Token
    )""",
    re.VERBOSE,
)
# A path made of an address has one slash. Passwords may have slashes; `host:22/a@b` has a port and no password.
_IN_URL = re.compile(r"(?<=:/)(/?[^\s/:@]*):(?!\d+/)([^\s@]{1,256})(?=@)")
_ASSIGNED = re.compile(
    # Only from the beginning of a name: a word of a megabyte would be searched from each of its letters.
    rf"(?<![\w.-])(?P<name>[\w.-]*(?:{_CERTAIN}|{_LIKELY}|signature))(?P<sign>=|:\s*)(?P<value>[^\s&'\",;]+)",
    re.IGNORECASE,
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9_.~+/=-]{16,}")


def is_secret(name: str, value: object) -> bool:
    """Return True if a setting or variable of this name, with this value, is a secret."""
    if not isinstance(value, str) or not value or value == MASK:
        return False
    return bool(_SECRET_NAME.fullmatch(name) or (_LIKELY_NAME.fullmatch(name) and _RANDOM.fullmatch(value)))


def masked(text: str) -> str:
    """Return a text without what has the form of a key, passwords in addresses, and values of `..._KEY=value`."""
    text = _IN_URL.sub(rf"\1:{MASK}", _FORMS.sub(MASK, text))
    text = _BEARER.sub(rf"\1 {MASK}", text)
    return _ASSIGNED.sub(_assigned, text)


def masked_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command without secrets: also the word after an option whose name is that of one."""
    return list(_words(words))


def masked_command(command: object) -> str | None:
    """Return a recorded command without secrets, as `masked_words`; None where there is none."""
    if not isinstance(command, str):
        return None
    try:
        return shlex.join(masked_words(shlex.split(command)))
    except ValueError:  # no command
        return masked(command)


def masked_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without secrets, at any depth."""
    return {name: MASK if is_secret(name, value) else _masked(value) for name, value in values.items()}


def _words(words: Sequence[str]) -> Iterator[str]:
    name = ""
    for word in words:
        yield MASK if name and is_secret(name, word) else masked(word)
        name = word.lstrip("-") if word.startswith("--") else ""


def _masked(value: Any) -> Any:
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, Mapping):
        return masked_values(value)
    return [_masked(each) for each in value] if isinstance(value, list | tuple) else value


def _assigned(match: re.Match[str]) -> str:
    is_signature = match["name"].lower().endswith("signature") and bool(_RANDOM.fullmatch(match["value"]))
    if is_signature or is_secret(match["name"].lstrip("-"), match["value"]):
        return f"{match['name']}{match['sign']}{MASK}"
    return match[0]
