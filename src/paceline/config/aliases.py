"""Other spellings of settings: those that are accepted, and those that are only answered with the right one.

A section of settings declares the accepted ones, next to its fields:

    class SpeechSettings(Section):
        aliases = {"train_dataset": "train_manifest"}
"""

from __future__ import annotations

from pydantic import BaseModel

SHORT: dict[str, str] = {"O": "level"}
"""Options of one letter, with the value attached or as the next word: `-O2`, `-O 2`."""

MEANT: dict[str, str] = {
    "learning_rate": "lr",
    "batch_size": "global_batch",
    "train_batch_size": "global_batch",
    "num_epochs": "epochs",
    "max_epochs": "epochs",
    "n_epochs": "epochs",
    "max_steps": "steps",
    "num_workers": "workers",
    "nproc": "procs",
    "num_procs": "procs",
    "num_gpus": "procs",
    "gpus": "procs",
    "devices": "procs",
    "wd": "weight_decay",
    "scheduler": "schedule",
    "lr_scheduler": "schedule",
    "lr_policy": "schedule",
    "optim": "optimizer",
    "amp": "precision",
    "dtype": "precision",
    "output_dir": "out",
    "logdir": "out",
    "work_dir": "out",
    "name": "exp_name",
    "checkpoint": "resume",
    "grad_clip": "clip_norm",
    "max_grad_norm": "clip_norm",
    "accumulate_grad_batches": "grains",
    "early_stopping": "patience",
    "strategy": "shard",
    "mode": "validation",
}
"""Names of other toolkits. Not accepted, because the meaning may differ: the error message names ours."""


def aliases_of(model: type[BaseModel]) -> dict[str, str]:
    """Return the other accepted names of a model's fields, as the classes that it is made of declare them."""
    merged: dict[str, str] = {}
    for owner in reversed(model.__mro__):
        merged |= vars(owner).get("aliases", {})
    return merged
