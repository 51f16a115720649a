"""`paceline train`: a recipe or `file.py:Task`, as one process, as one of many, or as `--procs` of them."""

from paceline.config.train_command import POSITIONAL as POSITIONAL
from paceline.config.train_command import TRAIN_OPTIONS as OPTIONS
from paceline.train.command import run

__all__ = ["OPTIONS", "POSITIONAL", "run"]
