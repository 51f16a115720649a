"""Learning-rate policies of OpenSeq2Seq as schedules of Paceline."""

from __future__ import annotations

from typing import Any

from openseq2seq_config import ParameterRefused, check_known, plain

Values = dict[str, Any]
DECAY = {"begin_decay_at": "", "decay_steps": ""}
WHERE = "lr_policy_params/"

POLICIES: dict[str, tuple[str, dict[str, str]]] = {
    "fixed_lr": ("constant", {}),
    "piecewise_constant": ("piecewise", {"boundaries": "", "decay_rates": "", "steps_per_epoch": ""}),
    "exp_decay": (
        "exponential",
        {**DECAY, "decay_rate": "decay", "decay_steps": "decay_steps", "min_lr": "min_lr", "use_staircase_decay": ""},
    ),
    "poly_decay": ("polynomial", {**DECAY, "power": "power", "warmup_steps": "warmup_steps", "min_lr": "min_lr"}),
    "cosine_decay": ("cosine", {**DECAY, "warmup_steps": "warmup_steps", "min_lr": ""}),
    "transformer_policy": ("noam", {"d_model": "model_size", "warmup_steps": "warmup_steps", "coefficient": ""}),
}
"""Our schedule, and our names of their parameters; those without one are worked out."""


def schedule(given: Values) -> Values:
    """Settings of the learning rate; `given` are all parameters of the model."""
    policy = plain(given.get("lr_policy", "fixed_lr"))
    params = {name: value for name, value in given.get("lr_policy_params", {}).items() if value is not None}
    if policy not in POLICIES:
        raise ParameterRefused(f"`lr_policy` {policy} is not translated", f"translated are {', '.join(POLICIES)}")
    schedule_name, ours = POLICIES[policy]
    check_known(WHERE, params, ["learning_rate", *ours])
    for name, value in params.items():
        if not isinstance(value, (list, tuple) if name in ("boundaries", "decay_rates") else (int, float)):
            raise ParameterRefused(f"`{WHERE}{name}` is {value!r}, which is of the wrong kind")
    if policy == "transformer_policy":
        params.setdefault("learning_rate", 1.0)
    lr = params.get("learning_rate", given.get("optimizer_params", {}).get("learning_rate"))
    if lr is None:
        raise ParameterRefused(f"`{WHERE}learning_rate` is missing")
    values = {"schedule": schedule_name, "lr": lr * params.get("coefficient", 1.0)}
    values |= {ours[theirs]: value for theirs, value in params.items() if ours.get(theirs)}
    held = _held(given, policy, params)
    if held:
        values["hold_steps"] = held
    if policy == "cosine_decay" and "min_lr" in params:
        values["min_lr"] = params["min_lr"] * lr  # there it is a share of the rate
    if policy == "piecewise_constant":
        values |= _piecewise(given, params)
    return values


def _held(given: Values, policy: str, params: Values) -> int:
    """Steps at the highest rate after the warm-up."""
    warmup: int = params.get("warmup_steps", 0)
    begin: int = max(params.get("begin_decay_at", 0), warmup)
    end = params.get("decay_steps")
    if policy != "exp_decay" and end is not None and end + begin != given.get("max_steps"):
        raise ParameterRefused(f"`{WHERE}decay_steps` {end}: here rates fall until the end of the run", "leave it out")
    if policy == "cosine_decay" and begin > warmup:
        raise ParameterRefused(f"`{WHERE}begin_decay_at`: here a cosine falls at once", "poly_decay can wait")
    if params.get("use_staircase_decay"):
        raise ParameterRefused(f"`{WHERE}use_staircase_decay`: here rates fall smoothly", "see piecewise_constant")
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
