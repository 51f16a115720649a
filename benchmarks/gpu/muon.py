"""What one update of a Transformer by Muon costs, beside AdamW and torch's own Muon.

    python benchmarks/gpu/muon.py [--json] [--steps 20] [--size base] [--device cpu]

Hidden matrices by Muon, all else by AdamW, as `--optimizer muon` routes them; gradients that stay as they are. `issue`
is until the host is free again, `done` until the device is; milliseconds, median of 5 interleaved rounds.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from table import Row, parser, show

from paceline.config.settings import OptimSettings
from paceline.optim.build import groups, optimizer
from paceline.optim.muon import hidden_matrices
from paceline.recipes.translation.network.shape import SIZES
from paceline.recipes.translation.network.transformer import Transformer


def make_model(size: str, vocabulary: int, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = Transformer(SIZES["transformer", size], vocabulary).to(device)  # type: ignore[index]
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    return model


def by_settings(model: nn.Module, device: torch.device, **settings: object) -> Callable[[], object]:
    config = OptimSettings.model_validate({"lr": 1e-4, "weight_decay": 0.01, **settings})
    return optimizer(config, groups(model, config), device).step


def torchs(model: nn.Module, device: torch.device) -> Callable[[], None]:
    """torch's Muon and AdamW, as its documentation shows it."""
    chosen = set(hidden_matrices(model))
    named = list(model.named_parameters())
    matrices = [parameter for name, parameter in named if name in chosen]
    others = [parameter for name, parameter in named if name not in chosen]
    both = [
        torch.optim.Muon(matrices, lr=1e-4, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=1e-4, weight_decay=0.01, fused=device.type == "cuda"),
    ]

    def step() -> None:
        for each in both:
            each.step()

    return step


def timed(step: Callable[[], object], num_steps: int, device: torch.device) -> tuple[float, float]:
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    wait()
    began = time.perf_counter()
    for _ in range(num_steps):
        step()
    issued = time.perf_counter()
    wait()
    return (issued - began) / num_steps * 1e3, (time.perf_counter() - began) / num_steps * 1e3


def main() -> None:
    arguments = parser(str(__doc__))
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--size", default="base", choices=["tiny", "small", "base", "big"])
    arguments.add_argument("--vocabulary", type=int, default=32_768)
    arguments.add_argument("--device", default="cuda")
    options = arguments.parse_args()
    device = torch.device(options.device)
    models = [make_model(options.size, options.vocabulary, device) for _ in range(4)]
    steps = {
        "AdamW": by_settings(models[0], device, optimizer="adamw"),
        "torch Muon and AdamW": torchs(models[1], device),
        "Muon": by_settings(models[2], device, optimizer="muon"),
        "Muon, fp32 products": by_settings(models[3], device, optimizer="muon", muon_dtype="fp32"),
    }
    for step in steps.values():
        timed(step, 2, device)
    rounds = [{name: timed(step, options.steps, device) for name, step in steps.items()} for _ in range(5)]
    rows, base = [], "AdamW"
    for index, metric in enumerate(("issue", "done")):
        medians = {name: statistics.median(each[name][index] for each in rounds) for name in steps}
        rows += [Row(name, metric, value, "ms", base, value / medians[base]) for name, value in medians.items()]
    title = f"One update of a Transformer {options.size}"
    show(sorted(rows, key=lambda row: list(steps).index(row.case)), title, options.json)


if __name__ == "__main__":
    main()
