"""Other spellings of settings, as data: those that are accepted, and those that are only pointed out."""

from __future__ import annotations

ALIASES: dict[str, str] = {
    "code_optimization": "level",
    "model_config": "network",
    "train_dataset": "train_manifest",
    "eval_datasets": "val_manifest",
    "min_duration": "min_seconds",
    "max_duration": "max_seconds",
    "reduce_type": "reduce",
    "param_sync_step": "sync_step",
    "param_sync_time_diff": "sync_seconds",
    "horovod_reduce_type": "reduce",
    "horovod_param_sync_step": "sync_step",
    "horovod_param_sync_time_diff": "sync_seconds",
    "horovod_scale_lr": "scale_lr",
    "horovod_dataset_distribution": "dataset_distribution",
    "fsdp": "shard",
    "fully_shard": "shard",
}
"""Accepted instead of the setting's own name, where the model has that setting."""

SHORT: dict[str, str] = {"O": "level"}
"""One letter with its value attached or as the next word: `-O2`, `-O 2`."""

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
}
"""What people type who come from elsewhere. Not accepted, because the meaning may differ: the answer names ours."""
