"""Learning-rate policies of OpenSeq2Seq as schedules of Paceline."""

from __future__ import annotations

from typing import Any

from openseq2seq_config import ParameterRefused, check_known, plain

Values = dict[str, Any]
WHERE = "lr_policy_params/"

POLICIES: dict[str, tuple[str, dict[str, str]]] = {
    "fixed_lr": ("constant", {}),
    "piecewise_constant": ("piecewise", {"boundaries": "", "decay_rates": "", "steps_per_epoch": ""}),
    "exp_decay": ("exponential", {"decay_rate": "decay", "decay_steps": "decay_steps", "min_lr": "min_lr"}),
    "poly_decay": ("polynomial", {"power": "power", "warmup_steps": "warmup_steps", "min_lr": "min_lr"}),
    "cosine_decay": ("cosine", {"warmup_steps": "warmup_steps", "min_lr": ""}),
    "transformer_policy": ("noam", {"d_model": "model_size", "warmup_steps": "warmup_steps", "coefficient": ""}),
}
"""Our schedule, and our names of their parameters; those without one are worked out."""


def schedule(given: Values) -> Values:
    """Settings of the learning rate; `given` are all parameters of the model."""
    policy = plain(given.get("lr_policy", "fixed_lr"))
    params = {name: value for name, value in given.get("lr_policy_params", {}).items() if value is not None}
    if policy not in POLICIES:
        raise ParameterRefused(f"`lr_policy` {policy} is not translated", f"translated are {', '.join(POLICIES)}")
    for name, value in params.items():
        if not isinstance(value, (list, tuple) if name in ("boundaries", "decay_rates") else (int, float)):
            raise ParameterRefused(f"`{WHERE}{name}` is {value!r}, which is of the wrong kind")
    name, ours = POLICIES[policy]
    if policy == "transformer_policy":
        params.setdefault("learning_rate", 1.0)
    lr = params.get("learning_rate", given.get("optimizer_params", {}).get("learning_rate"))
    if lr is None:
        raise ParameterRefused(f"`{WHERE}learning_rate` is missing")
    values = {"schedule": name, "lr": lr * params.get("coefficient", 1.0)}
    values |= {ours[theirs]: value for theirs, value in params.items() if ours.get(theirs)}
    begin = _begin(given, policy, params)
    check_known(WHERE, params, ["learning_rate", *ours])
    if begin:
        values["hold_steps"] = begin
    if policy == "cosine_decay" and "min_lr" in params:
        values["min_lr"] = params["min_lr"] * lr  # there it is a share of the rate
    if policy == "piecewise_constant":
        values |= _piecewise(given, params)
    return values


def _begin(given: Values, policy: str, params: Values) -> int:
    """Steps at the highest rate after the warm-up; takes what says so out of the parameters."""
    warmup: int = params.get("warmup_steps", 0)
    begin: int = max(params.pop("begin_decay_at", 0), warmup)
    if policy in ("poly_decay", "cosine_decay"):
        end = params.pop("decay_steps", None)
        if end is not None and end + begin != given.get("max_steps"):
            raise ParameterRefused(
                f"`{WHERE}decay_steps` {end}: here rates fall until the end of the run", "leave it out"
            )
    if begin > warmup and policy not in ("poly_decay", "exp_decay"):
        raise ParameterRefused(f"`{WHERE}begin_decay_at` is for poly_decay and exp_decay here", "leave it out")
    if params.get("use_staircase_decay"):
        raise ParameterRefused(
            f"`{WHERE}use_staircase_decay`: here the rate falls smoothly", "piecewise_constant has steps"
        )
    params.pop("use_staircase_decay", None)
    return begin - warmup


def _piecewise(given: Values, params: Values) -> Values:
    for name in ("boundaries", "decay_rates"):
        if not params.get(name):
            raise ParameterRefused(f"`{WHERE}{name}` is missing")
    rates, factor = params["decay_rates"], params.get("steps_per_epoch") if "num_epochs" in given else 1
    if factor is None:
        raise ParameterRefused(f"`{WHERE}boundaries` are epochs with `num_epochs`", f"add `{WHERE}steps_per_epoch`")
    if any(abs(rate - rates[0] ** number) > 1e-9 for number, rate in enumerate(rates, 1)):
        raise ParameterRefused(f"`{WHERE}decay_rates` {rates}: here each is the one before it times the first")
    return {"decay": rates[0], "milestones": tuple(round(boundary * factor) for boundary in params["boundaries"])}
