"""`shelf://`: a file system of fsspec that keeps files in the folder $SHELF, and that fails as it is told to.

It is one like ssh: a file may be there in part. What is to go wrong is a list of words, one per upload of a file whose
name has a certain text in it: `error`, `cut` (half of the bytes are written, and nobody says so); or a kill.
"""

from __future__ import annotations

import os
import signal
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"  # as AWS prints one in its documentation


class Shelf(LocalFileSystem):  # type: ignore[misc]
    protocol = "shelf"
    faults: ClassVar[list[tuple[str, str]]] = []
    """(text in the name, what happens), used up in this order; the text of the first must be in the name."""
    kills_at: ClassVar[int] = 0
    """Number of the checkpoint during whose upload the process is killed, in the order in which they are sent."""
    log: ClassVar[list[str]] = []
    """Names of files that were written, in their order."""

    def __init__(self) -> None:
        """Takes no options: what ssh is given goes to the connection, which knows none of fsspec's."""
        super().__init__()

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        text = str(path)
        return os.path.join(os.environ["SHELF"], text[8:]) if text.startswith("shelf://") else text

    def put_file(self, lpath: str, rpath: str, callback: Any = None, **kwargs: Any) -> None:
        name = os.path.relpath(rpath, os.environ["SHELF"]).removesuffix(".paceline-part")
        fault = self.faults.pop(0)[1] if self.faults and self.faults[0][0] in name else ""
        steps = list(dict.fromkeys(part for each in (*self.log, name) for part in each.split("/") if "step-" in part))
        if self.kills_at and len(steps) == self.kills_at and "optimizer" in name:
            fault = "kill"
        if fault == "error":
            raise ConnectionError(f"connection was closed while {SECRET} and AKIAIOSFODNN7EXAMPLE were used")
        with open(lpath, "rb") as source, open(rpath, "wb") as target:
            content = source.read()
            target.write(content[: len(content) // 2] if fault else content)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        self.log.append(name)


fsspec.register_implementation("shelf", Shelf, clobber=True)
