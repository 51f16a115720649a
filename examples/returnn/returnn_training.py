"""How RETURNN reduces, updates and rounds, as settings of Paceline."""

from __future__ import annotations

from typing import Any

from returnn_mistakes import OptionRefused, check_known, choose, number, real

Values = dict[str, Any]
REDUCTIONS = {"grad": "grad", "param": "param", "grad_explicit": "grad"}
OPTIMIZERS = {"sgd": "sgd", "adam": "adam", "adamw": "adamw"}
OPTIMIZER_OPTIONS = ["class", "momentum", "betas", "weight_decay"]
IDLE = ["sync_on_cpu", "backend", "class", "options"]
DISTRIBUTED = ["reduce_type", "param_sync_step", "param_sync_time_diff", "timeout_sec", *IDLE]


def reduction(given: Values, words: list[str]) -> Values:
    """`torch_distributed` or `use_horovod`; without both there is nothing to reduce."""
    if "torch_distributed" in given:
        return _torch_distributed(given["torch_distributed"], words)
    if not given.get("use_horovod"):
        return {}
    values: Values = {"dataset_distribution": given.get("horovod_dataset_distribution", "shard")}
    values["reduce"] = choose("horovod_reduce_type", given.get("horovod_reduce_type", "grad"), REDUCTIONS)
    if values["reduce"] == "param":
        seconds = given.get("horovod_param_sync_time_diff")
        every = {"sync_step": number(given, "horovod_param_sync_step", 1)}
        values |= every if seconds is None else {"sync_seconds": seconds}
    return values


def _torch_distributed(options: Any, words: list[str]) -> Values:
    if not isinstance(options, dict):
        raise OptionRefused(f"`torch_distributed` is {options!r}, not a dictionary", "torch_distributed = {}")
    check_known("torch_distributed/", options, DISTRIBUTED)
    idle = [f"`torch_distributed/{name}`" for name in IDLE if name in options]
    words += [f"no effect here: {', '.join(idle)}"] if idle else []
    # Without shards of its own making, each worker walks all data there, in an order of its own.
    values: Values = {"dataset_distribution": "random_seed_offset"}
    values["reduce"] = choose("torch_distributed/reduce_type", options.get("reduce_type", "grad"), REDUCTIONS)
    if values["reduce"] == "param":
        seconds = options.get("param_sync_time_diff")
        every = {"sync_step": number(options, "param_sync_step", 0)} if seconds is None else {"sync_seconds": seconds}
        if every.get("sync_step") == 0:
            raise OptionRefused("`torch_distributed/param_sync_step` is missing", "100, say")
        values |= every
    return values | ({"timeout_s": options["timeout_sec"]} if "timeout_sec" in options else {})


def update(given: Values, words: list[str]) -> Values:
    """Optimizer, clipping and learning rate."""
    options = given.get("optimizer", {"class": "adam" if given.get("adam") else "sgd"})
    if not isinstance(options, dict):
        raise OptionRefused(f"`optimizer` is {options!r}, not a dictionary", 'optimizer = {"class": "adamw"}')
    check_known("optimizer/", set(options) - {"epsilon"}, OPTIMIZER_OPTIONS)
    words += ["`optimizer/epsilon` has no effect here"] if "epsilon" in options else []
    name = choose("optimizer/class", str(options.get("class", "sgd")).lower(), OPTIMIZERS)
    values: Values = {"optimizer": name, "lr": real(given, "learning_rate", 1.0)}
    if name == "sgd":
        values["momentum"] = options.get("momentum", 0.0)
    values |= {key: options[key] for key in ("betas", "weight_decay") if key in options}
    clips = {"clip_value": given.get("gradient_clip"), "clip_norm": given.get("gradient_clip_global_norm")}
    values |= {key: value for key, value in clips.items() if value}
    control = {"constant": "constant", "newbob": "newbob", "newbob_rel": "newbob"}
    values["schedule"] = choose("learning_rate_control", given.get("learning_rate_control", "constant"), control)
    if values["schedule"] == "newbob":
        values |= {"decay": given.get("learning_rate_decay", 0.5), "min_lr": given.get("min_learning_rate", 0.0)}
        values["newbob_threshold"] = -real(given, "newbob_relative_error_threshold", -0.01)
    return values


def precision(given: Values, has_gpu: bool, words: list[str]) -> Values:
    """`torch_amp`: a dtype, or a dictionary with one."""
    amp = given.get("torch_amp")
    dtype = amp.get("dtype") if isinstance(amp, dict) else amp
    if dtype is None:
        return {"level": 0}
    kind = choose("torch_amp", dtype, {"bfloat16": "bf16", "float16": "fp16"})
    if kind == "bf16":
        return {"level": 2}
    if not has_gpu:
        words.append("`torch_amp` float16: no GPU here, training in fp32")
        return {"level": 0}
    return {"precision": "fp16"}
