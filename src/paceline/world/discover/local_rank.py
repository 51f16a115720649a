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
    name, given = match[1], match[2]
    rest = list(words[1:])
    if given is None:
        given = rest.pop(0) if rest else ""
    if "LOCAL_RANK" not in env:
        raise EnvironmentIncomplete([name], ["LOCAL_RANK"])
    if given != env["LOCAL_RANK"]:
        raise EnvironmentContradicts([name, "LOCAL_RANK"], f"{given or 'nothing'} and {env['LOCAL_RANK']}")
    return rest
