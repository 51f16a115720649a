"""Each rank's own log file: what it said, its warnings, and how it failed."""

from __future__ import annotations

import logging
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

FORMAT = "%(asctime)s %(levelname)s %(message)s"
SAID = "paceline.said"
"""Logger of what is said on the console; it has no other way out than these files."""


class _LogFile(logging.FileHandler):
    """A full disk takes no lines: that is not shown in their place, and keeps no rank from training or from ending."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def rank_log(path: Path | None, header: str) -> Iterator[None]:
    """While it lasts, `path` gets what is logged under `paceline`, every warning, and the exception that ends it.

    A resumed run goes on in the same file. Warnings are still shown where they were before.
    """
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    file = _LogFile(path, encoding="utf-8")
    file.setFormatter(logging.Formatter(FORMAT))
    ours = logging.getLogger("paceline")
    level, shown = ours.level, warnings.showwarning

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any, **named: Any
    ) -> None:
        text = warnings.formatwarning(message, category, filename, lineno).rstrip()
        file.handle(logging.makeLogRecord({"msg": text, "levelname": "WARNING", "levelno": logging.WARNING}))
        shown(message, category, filename, lineno, *rest, **named)

    for logger in (ours, logging.getLogger(SAID)):
        logger.addHandler(file)
    ours.setLevel(logging.INFO)
    warnings.showwarning = show
    try:
        ours.info(f"host {socket.gethostname()}, pid {os.getpid()}, {header}")
        yield
    except BaseException:
        file.handle(ours.makeRecord("paceline", logging.ERROR, "", 0, "ended by an exception", (), sys.exc_info()))
        raise
    finally:
        if warnings.showwarning is show:
            warnings.showwarning = shown
        ours.setLevel(level)
        for logger in (ours, logging.getLogger(SAID)):
            logger.removeHandler(file)
        file.close()
