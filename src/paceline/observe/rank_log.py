"""Log file of a rank: console output, log messages, warnings, and the exception that ended it."""

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
CONSOLE = "paceline.said"
"""Name of the logger of console output, which goes to these files only."""


class _LogFile(logging.FileHandler):
    """Log file that loses lines on a full disk in silence: it keeps no rank from training or from ending."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def rank_log(path: Path | None, header: str) -> Iterator[None]:
    """Log to `path` what goes to the logger `paceline`, every warning, and the exception that ends the block.

    A resumed run goes on in the same file. Warnings are still shown where they were before.
    """
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    file = _LogFile(path, encoding="utf-8")
    file.setFormatter(logging.Formatter(FORMAT))
    package = logging.getLogger("paceline")
    level, show_before = package.level, warnings.showwarning

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any, **named: Any
    ) -> None:
        text = warnings.formatwarning(message, category, filename, lineno).rstrip()
        file.handle(logging.makeLogRecord({"msg": text, "levelname": "WARNING", "levelno": logging.WARNING}))
        show_before(message, category, filename, lineno, *rest, **named)

    for logger in (package, logging.getLogger(CONSOLE)):
        logger.addHandler(file)
    package.setLevel(logging.INFO)
    warnings.showwarning = show
    try:
        package.info(f"host {socket.gethostname()}, pid {os.getpid()}, {header}")
        yield
    except BaseException:
        file.handle(package.makeRecord("paceline", logging.ERROR, "", 0, "ended by an exception", (), sys.exc_info()))
        raise
    finally:
        if warnings.showwarning is show:
            warnings.showwarning = show_before
        package.setLevel(level)
        for logger in (package, logging.getLogger(CONSOLE)):
            logger.removeHandler(file)
        file.close()
