"""`python -m torch.distributed.launch ... -m paceline train ...` puts `--local-rank=N` before the command."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from paceline.world.discover.environment import EnvironmentContradicts, EnvironmentIncomplete


def without_local_rank(words: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return the words behind a leading `--local-rank N`, which must agree with LOCAL_RANK."""
    if not words:
        return []
    match = re.fullmatch(r"(--local[-_]rank)(?:=(.*))?", words[0])
    if match is None:
        return list(words)
    name, value = match[1], match[2]
    rest = list(words[1:])
    if value is None:
        value = rest.pop(0) if rest else ""
    if "LOCAL_RANK" not in env:
        raise EnvironmentIncomplete([name], ["LOCAL_RANK"])
    if value != env["LOCAL_RANK"]:
        raise EnvironmentContradicts([name, "LOCAL_RANK"], f"{value or 'nothing'} and {env['LOCAL_RANK']}")
    return rest
