"""Options of a RETURNN config as settings of Paceline: values in, values and words out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from returnn_data import data_files, idle_data_options
from returnn_mistakes import OptionRefused, choose, number
from returnn_training import precision, reduction, update

Values = dict[str, Any]

RENAMED = {
    "num_epochs": "epochs",
    "save_interval": "save_every_epochs",
    "random_seed": "seed",
    "import_model_train_epoch1": "init_from",
    "num_allowed_consec_invalid_gradient_steps": "max_skipped",
    "model": "out",
}
# fmt: off
TRANSLATED = [
    "task", "device", "use_horovod", "horovod_reduce_type", "horovod_param_sync_step", "horovod_param_sync_time_diff",
    "horovod_scale_lr", "horovod_dataset_distribution", "torch_distributed", "train", "dev", "eval", "eval_datasets",
    "batch_size", "max_seqs",
    "accum_grad_multiple_step", "optimizer", "adam", "learning_rate", "learning_rate_control", "learning_rate_decay",
    "min_learning_rate", "newbob_relative_error_threshold", "gradient_clip", "gradient_clip_global_norm", "torch_amp",
    "start_epoch", "cleanup_old_models", "torch_dataloader_opts", "log_verbosity",
]
WITHOUT_EFFECT = [
    "extern_data", "network", "get_model", "train_step", "forward_step", "backend",
    "use_tensorflow", "behavior_version", "cache_size", "log", "log_batch_size", "learning_rate_file",
    "learning_rate_control_error_measure", "optimizer_epsilon", "tf_log_memory_usage", "torch_log_memory_usage",
    "debug_print_layer_output_template", "grad_scaler", "num_inputs", "num_outputs", "batching", "max_seq_length",
    "min_seq_length", "torch_profile", "tensorboard_opts", "torch_mp_opts", "stop_on_nonfinite_train_score",
    "stop_for_resubmission_when_low_time_left", "store_metadata_mod_step", "tf_session_opts", "use_train_proc_manager",
    "learning_rate_warmup", "learning_rate_control_min_num_epochs_per_new_lr", "use_learning_rate_control_always",
    "learning_rate_control_relative_error_relative_lr", "calculate_exp_loss", "decouple_constraints", "l2", "dropout",
    "gradient_clip_avg_norm", "gradient_nan_inf_filter", "max_seq_length_eval", "batch_size_eval", "batch_size_dev",
    "watch_memory", "reset_dev_memory_caches", "forward_callback", "search_output_layer", "keep_epochs",
]
REFUSED = [
    "learning_rates", "dynamic_learning_rate", "gradient_noise", "chunking", "torch_batching", "preload_from_files",
    "newbob_multi_num_epochs", "newbob_multi_update_interval", "pretrain",
]
# fmt: on
KNOWN = [*RENAMED, *TRANSLATED, *WITHOUT_EFFECT, *REFUSED]
TASKS = {"train": "train_eval", "eval": "eval", "forward": "infer", "search": "infer"}
ORDERS = {"default": "none", "sorted": "sorted", "random": "random", "laplace": "laplace"}


def translate(
    config: Mapping[str, Any], ranks: int, has_gpu: bool, task: str | None = None, used: Collection[str] = ()
) -> tuple[Values, list[str]]:
    """Settings, and what is to be said of them. `task` is the name of the config's task; `used` are options of model
    and data that it takes itself."""
    given = {name: value for name, value in config.items() if name in KNOWN and value is not None}
    order = _order(given.get("train"))
    given = {name: value for name, value in given.items() if name not in used}
    refused = [f"`{name}`" for name in REFUSED if given.get(name)]
    if refused:
        raise OptionRefused(f"not translated: {', '.join(refused)}", "take out, or see docs/from-returnn.md for ours")
    files, own_sets = data_files(given, task)
    idle = [f"`{name}`" for name in [*own_sets, *WITHOUT_EFFECT] if name in given]
    words = [f"no effect here, where model and data are the task's: {', '.join(idle)}"] if idle else []
    values = {ours: given[theirs] for theirs, ours in RENAMED.items() if theirs in given}
    values["mode"] = choose("task", given.get("task", "train"), TASKS)
    if "device" in given:
        values["device"] = choose("device", given["device"], {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda"})
    if number(given, "log_verbosity", 3) >= 5:
        values["log_every"] = 1
    if "num_workers" in given.get("torch_dataloader_opts", {}):
        values["workers"] = given["torch_dataloader_opts"]["num_workers"]
    words += idle_data_options(given)
    values |= files | _batch(given, ranks) | order | update(given, words)
    values |= precision(given, has_gpu, words) | reduction(given, words) | _keeping(given)
    if given.get("use_horovod") and given.get("horovod_scale_lr"):
        words.append(f"learning rate: {values['lr']:g} x {ranks} ranks (`horovod_scale_lr`) = {values['lr'] * ranks:g}")
        values["lr"] *= ranks
    return values, words


def _batch(given: Values, ranks: int) -> Values:
    """Theirs are of one worker and one of the batches that are added up; ours is all that makes a step."""
    grains = ranks * number(given, "accum_grad_multiple_step", 1)
    values: Values = {"grains": grains}
    if number(given, "batch_size", 0):
        values["batch_cost"] = given["batch_size"] * grains
    if number(given, "max_seqs", -1) > 0:
        values["global_batch"] = given["max_seqs"] * grains
    return values


def _order(data: Any) -> Values:
    options = data if isinstance(data, dict) else {}
    name, _, bins = str(options.get("seq_ordering", "default")).partition(":")
    values: Values = {"order": choose("train/seq_ordering", name, ORDERS)}
    if bins and (name != "laplace" or not bins.isdigit()):
        raise OptionRefused(f"`train/seq_ordering` {name}:{bins}: only laplace:BINS has a number here")
    if bins:
        values["bins"] = int(bins)
    if "partition_epoch" in options:
        values["partition_epoch"] = options["partition_epoch"]
    return values


def _keeping(given: Values) -> Values:
    """What is saved; there a run always goes on with what it has saved, and keeps it all unless told otherwise."""
    start, cleanup = given.get("start_epoch", "auto"), given.get("cleanup_old_models")
    if start not in ("auto", 1):
        raise OptionRefused(f"`start_epoch` {start!r}: here it is 'auto' or 1")
    values: Values = {"resume": "auto"} if "model" in given and start == "auto" else {}
    if cleanup:
        numbers = cleanup if isinstance(cleanup, dict) else {}
        return values | {"keep_last": numbers.get("keep_last_n", 2), "keep_best": numbers.get("keep_best_n", 4)}
    return values | ({"keep_last": given["num_epochs"]} if "num_epochs" in given else {})
