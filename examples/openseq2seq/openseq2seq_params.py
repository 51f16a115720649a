"""Parameters of an OpenSeq2Seq model as settings of Paceline: values in, values and words out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from openseq2seq_config import ParameterRefused, check_all_known, plain
from openseq2seq_schedule import schedule

Values = dict[str, Any]

RENAMED = {
    "num_epochs": "epochs",
    "max_steps": "steps",
    "max_grad_norm": "clip_norm",
    "save_checkpoint_steps": "save_every_steps",
    "eval_steps": "val_every_steps",
    "print_loss_steps": "log_every",
    "num_checkpoints": "keep_last",
    "random_seed": "seed",
    "load_model": "init_from",
    "logdir": "out",
}
# fmt: off
TRANSLATED = [
    "use_horovod", "num_gpus", "gpu_ids", "batch_size_per_gpu", "eval_batch_size_per_gpu", "iter_size", "dtype",
    "loss_scaling", "larc_params", "lr_policy", "lr_policy_params", "optimizer", "optimizer_params", "regularizer",
    "regularizer_params", "restore_best_checkpoint",
]
OF_THE_TASK = [
    "data_layer", "data_layer_params", "encoder", "encoder_params", "decoder", "decoder_params", "loss", "loss_params",
    "initializer", "initializer_params",
]
WITHOUT_EFFECT = [
    "save_summaries_steps", "print_samples_steps", "print_bench_info_steps", "summaries", "use_xla_jit",
    "loss_scaling_params",
]
# fmt: on
KNOWN = [*RENAMED, *TRANSLATED, *OF_THE_TASK, *WITHOUT_EFFECT]
COUNTS = ["batch_size_per_gpu", "iter_size", "num_gpus"]

LARC = {
    "larc_eta": "larc_eta",
    "larc_mode": "larc",
    "min_update": "larc_min_update",
    "epsilon": "larc_epsilon",
}
OPTIMIZERS = {
    "SGD": "sgd",
    "Momentum": "sgd",
    "Adam": "adam",
    "LazyAdam": "adam",
    "AdamW": "adamw",
    "NovoGrad": "novograd",
}
OPTIMIZER_PARAMS = ["momentum", "beta1", "beta2", "weight_decay", "learning_rate"]
OPTIMIZER_PARAMS_WITHOUT_EFFECT = ["epsilon", "use_nesterov", "grad_averaging"]


def translate(
    train: Mapping[str, Any], validate: Mapping[str, Any], ranks: int, has_gpu: bool, used: Collection[str] = ()
) -> tuple[Values, list[str]]:
    """Settings, and what is to be said of them. `train` and `validate` are the base parameters merged with those of
    their mode; `used` are parameters of model and data that the task takes."""
    check_all_known(level for params in (train, validate) for level in _levels(params))
    for params in (train, validate):
        _check_kinds(params)
    for name in ("use_horovod", "batch_size_per_gpu"):
        if name not in train:
            raise ParameterRefused(f"`{name}` is missing in base_params", "OpenSeq2Seq, too, needs it")
    given = {name: value for name, value in train.items() if value is not None}
    words = [f"`{name}` has no effect here" for name in WITHOUT_EFFECT if name in given]
    if given["use_horovod"] and "num_gpus" in given:
        words.append(f"`num_gpus` {given['num_gpus']} is ignored with Horovod: the launcher's number counts, {ranks}")
    if "regularizer_params" in given and "regularizer" not in given:
        words.append("`regularizer_params` has no effect without `regularizer`")
    of_task = [f"`{name}`" for name in OF_THE_TASK if name in given and name not in used]
    if of_task:
        words.append(f"model and data are the task's: {', '.join(of_task)} not used")

    values = {ours: given[theirs] for theirs, ours in RENAMED.items() if theirs in given}
    accumulated = given.get("iter_size", 1)
    # A step is an update in both; here it is one batch that is cut, there as many batches as are added up.
    values |= {"batch_per_device": given["batch_size_per_gpu"] * accumulated, "grains": ranks * accumulated}
    values["eval_batch"] = validate.get("eval_batch_size_per_gpu") or validate["batch_size_per_gpu"]
    # There, only what is counted in steps happens.
    values |= {"save_every_epochs": None, "val_every_epochs": None}
    values |= _precision(given, has_gpu, words) | _larc(given) | _optimizer(given, words)
    return values | schedule(given), words


def _levels(params: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], Iterable[str]]]:
    """The dictionaries whose names are all known: where, what is given, what is known."""
    inner = {"larc_params": LARC, "optimizer_params": [*OPTIMIZER_PARAMS, *OPTIMIZER_PARAMS_WITHOUT_EFFECT]}
    return [
        ("", params, KNOWN),
        *((f"{name}/", params[name], known) for name, known in inner.items() if isinstance(params.get(name), dict)),
    ]


def count_towers(params: Mapping[str, Any]) -> int:
    """GPUs that OpenSeq2Seq itself would use; with Horovod that is the launcher's matter."""
    _check_kinds(params)
    return 1 if params.get("use_horovod") else params.get("num_gpus") or len(params.get("gpu_ids") or [0])


def _check_kinds(params: Mapping[str, Any]) -> None:
    for name, value in params.items():
        if name.endswith("_params") and not isinstance(value, (dict, type(None))):
            raise ParameterRefused(f"`{name}` is {value!r}, not a dictionary")
        if name in COUNTS and value is not None and (type(value) is not int or value < 1):
            raise ParameterRefused(f"`{name}` is {value!r}, not a number from 1 on")
        if name == "gpu_ids" and not isinstance(value, (list, tuple, type(None))):
            raise ParameterRefused(f"`{name}` is {value!r}, not a list")


def _precision(given: Values, has_gpu: bool, words: list[str]) -> Values:
    dtype = plain(given.get("dtype", "float32"))
    if dtype not in ("float32", "float16", "mixed"):
        raise ParameterRefused(f"`dtype` {dtype} is none of tf.float32, tf.float16 and 'mixed'")
    if dtype != "float32" and not has_gpu:
        words.append(f"`dtype` {dtype}: no GPU here, training in fp32")
    if "loss_scaling" in given and (dtype == "float32" or not has_gpu):
        words.append("`loss_scaling` has no effect in fp32")
    if dtype == "float32" or not has_gpu:
        return {"level": 0}
    scale = given.get("loss_scaling", 1.0)
    scale = scale.lower() if isinstance(scale, str) else scale
    return {"precision": "fp16-master" if dtype == "mixed" else "fp16-pure", "loss_scale": scale}


def _larc(given: Values) -> Values:
    params = given.get("larc_params")
    if params is None:
        return {}
    if "larc_eta" not in params:
        raise ParameterRefused("`larc_params` has no `larc_eta`", "0.002, say")
    if "max_grad_norm" in given:
        raise ParameterRefused("`larc_params` and `max_grad_norm` exclude each other", "keep one of them")
    return {"larc": "clip"} | {LARC[name]: value for name, value in params.items()}


def _optimizer(given: Values, words: list[str]) -> Values:
    name = plain(given.get("optimizer", "Momentum")).removesuffix("Optimizer")
    params = given.get("optimizer_params", {})
    if name not in OPTIMIZERS:
        raise ParameterRefused(f"`optimizer` {name} is not translated", f"translated are {', '.join(OPTIMIZERS)}")
    ignored = [key for key in OPTIMIZER_PARAMS_WITHOUT_EFFECT if key in params]
    words += [f"`optimizer_params/{key}` has no effect here" for key in ignored]
    values: Values = {"optimizer": OPTIMIZERS[name]}
    if OPTIMIZERS[name] == "sgd":
        values["momentum"] = params.get("momentum", 0.0)
    else:
        first, second = (0.95, 0.98) if name == "NovoGrad" else (0.9, 0.999)
        values["betas"] = (params.get("beta1", first), params.get("beta2", second))
    heeded = ("momentum",) if OPTIMIZERS[name] == "sgd" else ("beta1", "beta2")
    others = [key for key in ("momentum", "beta1", "beta2") if key in params and key not in heeded]
    words += [f"`optimizer_params/{key}` has no effect with {name}" for key in others]
    if "weight_decay" in params:
        values["weight_decay"] = params["weight_decay"]
    if "regularizer" in given:
        kind = plain(given["regularizer"])
        if kind != "l2_regularizer":
            raise ParameterRefused(f"`regularizer` {kind} is not translated", "l2_regularizer is")
        values["weight_decay"] = given.get("regularizer_params", {}).get("scale", 0.0)
        words.append(f"`regularizer` is a weight decay of {values['weight_decay']}, on all parameters")
    return values
