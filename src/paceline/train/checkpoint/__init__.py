"""Checkpoints: the format, the writer, the reader, and what of an engine goes into one.

For a loop of one's own: `Checkpointer` writes what `collect` returns, `newest` finds it, `restore` puts it back.
"""

from paceline.train.checkpoint.reader import newest as newest
from paceline.train.checkpoint.state import collect as collect
from paceline.train.checkpoint.state import restore as restore
from paceline.train.checkpoint.writer import Checkpointer as Checkpointer
