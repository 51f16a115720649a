"""Muon: momentum whose matrices are made orthogonal by Newton-Schulz steps; AdamW for what is no hidden matrix.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks", kellerjordan.github.io/posts/muon, with
the update scale of Liu et al. 2025, "Muon is Scalable for LLM Training", arXiv 2502.16982, or the original one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paceline.core.errors import InvalidSetting, PacelineError
from paceline.core.torch_private import foreach_copy_
from paceline.optim.layerwise import Bucket, Layerwise, OutOfRange, check, scale, unflatten

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic polynomial, as published: the steepest at 0 that keeps singular values within about (0.7, 1.2)."""
NORM_EPS = 1e-7
"""Least norm that a matrix is divided by."""
HEAD_WORDS = frozenset(("head", "lm_head", "classifier", "generator", "logits", "output_layer", "output_projection"))
"""Parts of a parameter's name that tell of the last layer."""
EMBEDDING_WORDS = ("embed", "position")
"""Words in the name of a parameter that tell of a table."""
Scale = Literal["match-rms-adamw", "original"]
Rule = Literal["muon", "adamw"]


class NothingForMuon(PacelineError):
    """`--optimizer muon` for a model without hidden matrices."""

    convolutions: int
    sentence = "the optimizer is muon, but no parameter of the model is a hidden matrix"
    hint = "{advice}"

    @property
    def advice(self) -> str:
        if self.convolutions:
            return f"set `--muon-convolutions` for its {self.convolutions} convolutions, or `--optimizer adamw`"
        return "name some with `--muon-match 'encoder.*'`, or set `--optimizer adamw`"


class Muon(Layerwise):
    """m = momentum * m + (1 - momentum) * g; u = (1 - momentum) * g + momentum * m with `nesterov`, else m.

    w = (1 - lr * weight_decay) * w - lr * s * NS(u). NS makes u / |u| nearly orthogonal by `ns_steps` of
    X = a X + (b A + c A A) X with A = X X^T. The factor s is 0.2 sqrt(max(rows, columns)) for `match-rms-adamw`, so
    that a learning rate for AdamW fits, or sqrt(max(1, rows / columns)), the `original`. A tensor of more dimensions
    is the matrix of its first one by all others.

    A group's `rule` is `muon`, the default, or `adamw`, for which `betas` and `eps` count. `ns_dtype` is what matrices
    are multiplied in: `auto` is bf16 on a GPU, as published, and the dtype of the state elsewhere and of fp64.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        nesterov: bool = True,
        scale: Scale = "match-rms-adamw",
        ns_steps: int = 5,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        ns_dtype: Literal["auto", "bf16", "fp32"] = "auto",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        rule: Rule = "muon",
    ) -> None:
        check(self, lr, betas, eps, weight_decay)
        if not 0.0 <= momentum < 1.0:
            raise OutOfRange("Muon", "momentum", momentum, "at least 0 and below 1")
        if not 1 <= ns_steps < 100:
            raise OutOfRange("Muon", "ns_steps", ns_steps, "from 1 to 99")
        if scale not in ("match-rms-adamw", "original"):
            raise OutOfRange("Muon", "scale", scale, "match-rms-adamw or original")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "scale": scale,
            "ns_steps": ns_steps,
            "ns_coefficients": ns_coefficients,
            "ns_dtype": ns_dtype,
            "betas": betas,
            "eps": eps,
            "rule": rule,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["rule"] not in ("muon", "adamw"):
            raise OutOfRange("Muon", "rule", group["rule"], "muon or adamw")
        for parameter in group["params"] if group["rule"] == "muon" else ():
            if parameter.ndim < 2:
                raise InvalidSetting(
                    f"Muon updates matrices, but a parameter has the shape {[*parameter.shape]}",
                    hint='give it to a group with `"rule": "adamw"`',
                )

    @property
    def way(self) -> str:
        """Number of tensors by rule."""
        numbers = dict.fromkeys(("muon", "adamw"), 0)
        for group in self.param_groups:
            numbers[group["rule"]] += len(group["params"])
        return f"torch; {numbers['muon']} matrices, {numbers['adamw']} tensors by AdamW"

    def _start(self, group: dict[str, Any], weight: Tensor) -> dict[str, Tensor]:
        names = ["momentum_buffer"] if group["rule"] == "muon" else ["exp_avg", "exp_avg_sq"]
        return {name: torch.zeros_like(weight) for name in names}

    def _update(self, group: dict[str, Any], bucket: Bucket, gradients: list[Tensor]) -> None:
        """One step. Products and sums are apart: fused ones round the end of a tensor, and so of a piece, otherwise."""
        foreach_copy_(bucket.views, gradients)
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        if grad_scale is not None:
            bucket.flat.div_(grad_scale)
        bucket.count_step()
        lr, before = group["lr"], _joined(bucket.weights)
        update = self._orthogonal(group, bucket) if group["rule"] == "muon" else self._adam(group, bucket)
        after = before * (1.0 - lr * group["weight_decay"]) if group["weight_decay"] else before
        _store(bucket.weights, before, after - update.mul_(lr), bucket.skip)

    def _adam(self, group: dict[str, Any], bucket: Bucket) -> Tensor:
        """Return Adam's direction m_hat / (sqrt(v_hat) + eps), flat."""
        sizes = [weight.numel() for weight in bucket.weights]
        (beta1, beta2), steps = group["betas"], bucket.state["step"]
        direction = _average(bucket.state["exp_avg"], beta1, bucket.flat, bucket.skip)
        deviation = _average(bucket.state["exp_avg_sq"], beta2, bucket.flat.square_(), bucket.skip)
        scale(direction, sizes, _correction(beta1, steps, direction.dtype))
        scale(deviation, sizes, _correction(beta2, steps, deviation.dtype))
        return direction.div_(deviation.sqrt_().add_(group["eps"]))

    def _orthogonal(self, group: dict[str, Any], bucket: Bucket) -> Tensor:
        """Return the orthogonal momenta, scaled, flat."""
        momentum = group["momentum"]
        average = _average(bucket.state["momentum_buffer"], momentum, bucket.flat, bucket.skip)
        if group["nesterov"]:
            bucket.flat.mul_(1.0 - momentum).add_(average.mul_(momentum))
        else:
            bucket.flat.copy_(average)

        def orthogonal(wholes: list[Tensor]) -> list[Tensor]:
            matrices = [whole.reshape(len(whole), -1) for whole in wholes]
            made = orthogonalize_all(matrices, group["ns_steps"], group["ns_coefficients"])
            return [each.reshape(whole.shape) for each, whole in zip(made, wholes, strict=True)]

        dtype, join = _product_dtype(group["ns_dtype"], bucket.flat), self._join_matrices
        sent = [view.to(dtype) for view in bucket.views]
        updates = orthogonal(sent) if join is None else join(bucket.parameters, sent, orthogonal)
        shapes = [view.shape for view in bucket.views] if join is None else join.shapes(bucket.parameters)
        for view, update, shape in zip(bucket.views, updates, shapes, strict=True):
            torch.mul(update.to(view.dtype), _factor(group["scale"], shape), out=view)
        return bucket.flat


def _average(means: list[Tensor], beta: float, values: Tensor, skip: Tensor) -> Tensor:
    """Move the averages towards the values, unless the step is skipped; return them, flat."""
    before = _joined(means)
    return _store(means, before, before * beta + values * (1.0 - beta), skip)


def _store(tensors: list[Tensor], before: Tensor, after: Tensor, skip: Tensor) -> Tensor:
    """Give the tensors their new values, or leave every bit as it was; return what they hold, flat."""
    values = torch.where(skip > 0, before, after)
    foreach_copy_(tensors, unflatten(values, tensors))
    return values


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _correction(beta: float, steps: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return 1 / (1 - beta^step) of each tensor."""
    counts = torch.stack(list(steps)).double().clamp(min=1.0)  # 0 where the first steps were skipped
    # In rows of a CPU's vectors, so that a number does not depend on those beside it.
    powers = torch.pow(beta, counts.unsqueeze(1).expand(-1, 16).contiguous())[:, 0]
    return (1.0 / (1.0 - powers)).to(dtype)


def _product_dtype(name: str, state: Tensor) -> torch.dtype:
    if name == "bf16" or (name == "auto" and state.device.type == "cuda" and state.dtype is not torch.float64):
        return torch.bfloat16
    return state.dtype


def _factor(name: Scale, shape: torch.Size) -> float:
    rows, columns = shape[0], shape[1:].numel()
    return 0.2 * math.sqrt(max(rows, columns)) if name == "match-rms-adamw" else math.sqrt(max(1.0, rows / columns))


def orthogonalize_all(matrices: list[Tensor], steps: int, coefficients: tuple[float, float, float]) -> list[Tensor]:
    """Return each of the matrices made nearly orthogonal; on a GPU those of one shape together."""
    results: list[Tensor] = list(matrices)
    shapes: dict[torch.Size, list[int]] = {}
    for number, matrix in enumerate(matrices):
        shapes.setdefault(matrix.shape, []).append(number)
    for numbers in shapes.values():
        if len(numbers) == 1 or matrices[numbers[0]].device.type == "cpu":
            for number in numbers:
                results[number] = orthogonalize(matrices[number], steps, coefficients)
        else:
            together = orthogonalize(torch.stack([matrices[number] for number in numbers]), steps, coefficients)
            for number, result in zip(numbers, together.unbind(), strict=True):
                results[number] = result
    return results


def orthogonalize(
    matrix: Tensor, steps: int = 5, coefficients: tuple[float, float, float] = COEFFICIENTS
) -> Tensor:  # (..., rows, columns), of the same shape
    """Return U S' V^T for a matrix U S V^T, with singular values S' near 1, by so many Newton-Schulz steps."""
    a, b, c = coefficients
    is_tall = matrix.size(-2) > matrix.size(-1)
    x = matrix.mT if is_tall else matrix
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=NORM_EPS)
    product = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = product(x, product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def hidden_matrices(model: nn.Module, *, convolutions: bool = False) -> list[str]:
    """Return the names of the parameters that Muon is for: matrices that are no embedding and no head.

    A head is what a part of the name says (`HEAD_WORDS`); if none does, the last matrix, unless it has as many outputs
    as another one has inputs. `convolutions`: their kernels, too, as matrices of output channels by all else.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    matrices = {
        name: parameter
        for name, parameter in model.named_parameters()
        if is_matrix(parameter, convolutions) and id(parameter) not in embeddings
    }
    heads = [name for name, each in matrices.items() if any(_is_head(other) for other in names[id(each)])]
    apart = {*heads, *(name for name in matrices if any(word in name.lower() for word in EMBEDDING_WORDS))}
    if not heads and matrices:
        last = next(reversed(matrices))
        inputs = {each.shape[1:].numel() for name, each in matrices.items() if name != last}
        apart |= {last} if matrices[last].shape[0] not in inputs else set()
    return [name for name in matrices if name not in apart]


def is_matrix(parameter: Tensor, convolutions: bool) -> bool:
    """Return True if a parameter is a matrix of more than a row and a column, or is to be taken as one."""
    if parameter.ndim != 2 and not (convolutions and parameter.ndim > 2):
        return False
    return parameter.shape[0] > 1 and parameter.shape[1:].numel() > 1


def _is_head(name: str) -> bool:
    return not HEAD_WORDS.isdisjoint(name.lower().split("."))
